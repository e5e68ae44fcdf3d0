"""What users of NeMo AutoModel do with its names, on gloo ranks: gradients are those of one process."""

import dataclasses
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pydantic
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from transformers import LlamaForCausalLM

from meshwright.distributed import _torch_compat, parallelizer
from meshwright.distributed.data.fsdp_units import fsdp_units
from meshwright.distributed.fsdp2 import FSDP2Manager
from meshwright.distributed.memory.activation_checkpointing import checkpoint_forward, is_checkpointed
from meshwright.distributed.parallelizer import (
    DefaultParallelizationStrategy,
    ParallelizationStrategy,
    apply_fsdp2_sharding_recursively,
    fsdp2_strategy_parallelize,
    get_hf_tp_shard_plan,
    get_lm_ac_layers,
    register_parallel_strategy,
    validate_tp_mesh,
)
from meshwright.distributed.tensor.loss_parallel import cross_entropy_sum
from meshwright.errors import LayoutError, MissingPlanError, ModelError, PlanError, UnsupportedError
from tests.harness import refuses, run_ranks
from tests.tiny import Plain, batches, logits_of, make, summed_loss, tiny_config, whole

FP32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)


def same_gradients(model: nn.Module, alone: nn.Module) -> None:
    theirs = dict(alone.named_parameters())
    for name, ours in model.named_parameters():
        expected = theirs[name].grad
        assert (ours.grad is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(whole(ours.grad), expected, rtol=1e-4, atol=2e-6, msg=name)


def compare(model: nn.Module, alone: nn.Module, data_rank: int, data_ranks: int) -> None:
    """One backward on each data rank, against the average in one process."""
    data = batches(data_ranks)
    logits = logits_of(model, data[data_rank]["input_ids"])
    if isinstance(logits, DTensor):  # sharded over the vocabulary
        cross_entropy_sum(logits, data[data_rank]["labels"]).backward()
    else:
        labels = data[data_rank]["labels"].flatten()
        nn.functional.cross_entropy(logits.float().flatten(0, 1), labels, reduction="sum").backward()
    (sum(summed_loss(alone, batch) for batch in data) / data_ranks).backward()
    same_gradients(model, alone)


# -- strategies --------------------------------------------------------------------------------------------------------------


class Mine(LlamaForCausalLM):
    """A model of the user's."""


class Other(LlamaForCausalLM):
    """Another one."""


def of_class(kind: type[LlamaForCausalLM]) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = kind._from_config(tiny_config("llama"), dtype=torch.float32)
    model.config.use_cache = False
    return model


CALLS: list[Any] = []


@register_parallel_strategy(name="Mine")
class MineStrategy(DefaultParallelizationStrategy):
    """Does something of its own, and the rest as always."""

    def parallelize(self, model: nn.Module, device_mesh: Any, *args: Any, **kwargs: Any) -> nn.Module:
        CALLS.append((args, kwargs))
        return super().parallelize(model, device_mesh, *args, **kwargs, use_hf_tp_plan=False)


@register_parallel_strategy(name="Other")
class OtherStrategy(ParallelizationStrategy):
    """As a user of the reference writes it: no spec, only this."""

    def parallelize(
        self,
        model: nn.Module,
        device_mesh: Any,
        mp_policy: Any = None,
        offload_policy: Any = None,
        sequence_parallel: bool = False,
        activation_checkpointing: bool = False,
        tp_shard_plan: Any = None,
        use_hf_tp_plan: bool = False,
        dp_replicate_mesh_name: str = "dp_replicate",
        dp_shard_cp_mesh_name: str = "dp_shard_cp",
        tp_mesh_name: str = "tp",
    ) -> nn.Module:
        if device_mesh[tp_mesh_name].size() > 1:
            parallelizer.validate_tp_mesh(model, device_mesh[tp_mesh_name])
            parallelize_module(model, device_mesh[tp_mesh_name], tp_shard_plan)
        for layer in get_lm_ac_layers(model) if activation_checkpointing else ():
            checkpoint_forward(layer)
        mesh = device_mesh[dp_replicate_mesh_name, dp_shard_cp_mesh_name]
        apply_fsdp2_sharding_recursively(model, mesh, mp_policy, offload_policy)
        return fully_shard(model, mesh=mesh, mp_policy=mp_policy, reshard_after_forward=False)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_manager_calls_the_strategy_of_the_user(tp: int) -> None:
    def on_rank(rank: int) -> None:
        manager = FSDP2Manager(tp_size=tp, mp_policy=FP32, defer_fsdp_grad_sync=False)
        model = of_class(Mine)
        assert manager.parallelize(model) is model
        (((), arguments),) = CALLS
        assert arguments["mp_policy"] is FP32
        assert manager.plan is not None
        assert {unit.sync for unit in manager.plan.fsdp_units} == {"reduce_each"}
        compare(model, of_class(Mine), rank // tp, 2 // tp)

    CALLS.clear()
    run_ranks(on_rank, 2)


LLAMA = {f"model.layers.*.{name}": ColwiseParallel() for name in ("mlp.up_proj", "mlp.gate_proj")} | {
    "model.layers.*.mlp.down_proj": RowwiseParallel()
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "sizes",
    [
        {"activation_checkpointing": True},
        {"dp_replicate_size": 2},
        {"tp_size": 2},
        {"tp_size": 2, "use_hf_tp_plan": True, "activation_checkpointing": True},
        {"tp_size": 2, "custom_tp_plan": f"{__name__}.LLAMA"},
    ],
)
def test_a_strategy_that_only_parallelizes(sizes: dict[str, Any]) -> None:
    """It is given the plan that was chosen, in styles of torch, as in the reference."""

    def on_rank(rank: int) -> None:
        manager = FSDP2Manager(mp_policy=FP32, **sizes)
        model = manager.parallelize(of_class(Other))
        assert isinstance(model, FSDPModule)
        assert manager.plan is None
        tp = manager.tp_size
        compare(model, of_class(Other), rank // tp, 4 // tp)
        with pytest.raises(PlanError, match=r"Other: the model is already parallelized \(its root is an FSDP unit\)"):
            manager.parallelize(model)

    run_ranks(on_rank, 4)


def test_helpers_ask_the_model_where_a_strategy_has_no_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    model = of_class(Other)
    assert get_lm_ac_layers(model) == list(model.model.layers)
    assert get_hf_tp_shard_plan(model).keys() == parallelizer._get_parallel_plan(model, use_hf_tp_plan=True).keys()
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    FSDP2Manager(activation_checkpointing=True).parallelize(model)
    assert all(is_checkpointed(layer) for layer in model.model.layers)


class Parts(nn.Module):
    """A language model, and something beside it that microbatches need not use."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = of_class(LlamaForCausalLM)
        self.spare, self.extra = nn.Linear(4, 4), nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm(ids).logits.float()


@register_parallel_strategy(name="Parts")
class PartsStrategy(DefaultParallelizationStrategy):
    """Has a part sharded as always, and the rest by hand."""

    def parallelize(self, model: nn.Module, device_mesh: Any, mp_policy: Any = None, **kwargs: Any) -> nn.Module:
        mesh = device_mesh["dp_replicate", "dp_shard_cp"]
        apply_fsdp2_sharding_recursively(model.extra, mesh, mp_policy)
        super().parallelize(model.lm, device_mesh, mp_policy, **kwargs)
        return fully_shard(model, mesh=mesh, mp_policy=mp_policy)


def test_a_part_of_a_model_by_the_default_strategy() -> None:
    """What its plan claims is not claimed of the rest."""

    def on_rank(rank: int) -> None:
        torch.manual_seed(0)
        model, alone = Parts(), Parts()
        alone.load_state_dict(model.state_dict())
        manager = FSDP2Manager(mp_policy=FP32)
        manager.parallelize(model)
        assert manager.plan is None
        data = batches(4)
        with model.no_sync(), model.no_sync():  # nested: the outer one counts
            summed_loss(model, data[rank]).backward()
        summed_loss(model, data[2 + rank]).backward()
        (sum(summed_loss(alone, batch) for batch in data) / 2).backward()
        same_gradients(model, alone)

    run_ranks(on_rank, 2)


def test_tensor_parallel_by_hand() -> None:
    def on_rank(rank: int) -> None:
        manager = FSDP2Manager(tp_size=2, mp_policy=FP32)
        model = of_class(LlamaForCausalLM)
        parallelize_module(model, manager.device_mesh["tp"], LLAMA)
        assert len(get_lm_ac_layers(model)) == 2
        with pytest.raises(PlanError, match=r"'model.layers.0.mlp.gate_proj.weight' is a DTensor already"):
            manager.parallelize(model)
        with pytest.raises(LayoutError, match="device_mesh: has 2 of 4 ranks"):
            fsdp2_strategy_parallelize(of_class(LlamaForCausalLM), manager.device_mesh["tp"], FP32)

    run_ranks(on_rank, 4)


def test_a_pattern_that_names_nothing_is_left_out_with_a_warning() -> None:
    def on_rank(rank: int) -> None:
        plan = {**LLAMA, "model.layers.*.self_attn.qkv_proj": "colwise"}
        manager = FSDP2Manager(tp_size=2, custom_tp_plan=plan, mp_policy=FP32)
        with pytest.warns(UserWarning, match="qkv_proj names nothing in LlamaForCausalLM; left out"):
            model = manager.parallelize(of_class(LlamaForCausalLM))
        compare(model, of_class(LlamaForCausalLM), 0, 1)

    run_ranks(on_rank, 2)


def test_heads_of_families_that_nobody_described_leave_their_logits_sharded() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
    for family in ("cohere", "granite", "starcoder2"):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, num_key_value_heads=4))
        head = get_hf_tp_shard_plan(model)["lm_head"]
        assert (head.output_layouts, head.use_local_output) == ((Shard(-1),), False), family


def test_the_registry_can_be_read() -> None:
    found = parallelizer.PARALLELIZATION_STRATEGIES
    assert isinstance(found["Mine"], MineStrategy)
    assert {"NemotronHForCausalLM", "WanTransformer3DModel", "DiffusionGemmaForBlockDiffusion"} <= found.keys()
    assert all(isinstance(strategy, ParallelizationStrategy) for strategy in found.values())
    with pytest.raises(TypeError):
        found["New"] = MineStrategy()  # type: ignore[index]


# -- plain modules -----------------------------------------------------------------------------------------------------------


class TwoStacks(Plain):
    """Blocks, a shorter list of others, and a list of modules without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.drops = nn.ModuleList(nn.Dropout(0.0) for _ in range(6))
        self.mixed = nn.ModuleList([nn.Linear(16, 16), nn.LayerNorm(16)])
        self.heads = nn.ModuleDict({"left": nn.Linear(16, 16), "right": nn.Linear(16, 16)})  # by name: no stack

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for layer in (*self.blocks, *self.tail, *self.mixed, *self.drops, *self.heads.values()):
            hidden = hidden + layer(hidden)
        return self.head(self.norm(hidden))


def stacks() -> TwoStacks:
    torch.manual_seed(0)
    return TwoStacks()


GIVEN = {"blocks.*.0": ColwiseParallel(), "blocks.*.2": RowwiseParallel()}


@pytest.mark.parametrize("options", [{}, {"tp_size": 2, "custom_tp_plan": GIVEN}, {"activation_checkpointing": True}])
def test_a_plain_module(options: dict[str, Any]) -> None:
    def on_rank(rank: int) -> None:
        manager = FSDP2Manager(mp_policy=FP32, **options)
        model = manager.parallelize(stacks())
        layers = [*(f"blocks.{index}" for index in range(4)), "tail.0", "tail.1"]
        assert list(fsdp_units(model)) == ["", *layers]
        assert is_checkpointed(model.tail[1]) == ("activation_checkpointing" in options)
        compare(model, stacks(), rank // manager.tp_size, 2 // manager.tp_size)
        again = fsdp2_strategy_parallelize(stacks(), manager.device_mesh, FP32, tp_shard_plan=options.get("custom_tp_plan"))
        assert list(fsdp_units(again)) == ["", *layers]

    run_ranks(on_rank, 2)


def test_questions_about_a_plain_module() -> None:
    model = stacks()
    assert get_lm_ac_layers(model) == [*model.blocks, *model.tail]
    assert parallelizer._get_parallel_plan(model, tp_shard_plan=GIVEN) == GIVEN
    with refuses(MissingPlanError, "tp.no_styles") as caught:
        parallelizer._get_parallel_plan(model)
    assert isinstance(caught.value, PlanError)
    assert isinstance(caught.value, AssertionError)
    alike = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    assert get_lm_ac_layers(nn.Sequential(alike, nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)]))) == list(alike)
    with pytest.raises(ModelError, match="Linear: has no layers, which are entries of one class in a ModuleList"):
        get_lm_ac_layers(nn.Linear(2, 2))

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        validate_tp_mesh(model, mesh)
        model.config = tiny_config("llama")
        with pytest.raises(LayoutError, match="tp=3: 4 attention heads"):
            validate_tp_mesh(model, mesh)
        with refuses(MissingPlanError, "tp.no_styles"):
            fsdp2_strategy_parallelize(stacks(), mesh, FP32)

    run_ranks(on_rank, 3)


def test_units_do_not_go_inside_an_entry() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, value: torch.Tensor, expert: int) -> torch.Tensor:
            return self.experts[expert](value)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))
            self.nested = nn.ModuleList([nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), nn.Linear(4, 4)])

        def forward(self, value: torch.Tensor, expert: int) -> torch.Tensor:
            for layer in self.layers:
                value = layer(value, expert)
            for layer in (*self.nested[0], self.nested[1]):
                value = layer(value)
            return value

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        model, alone = Model(), Model()
        alone.load_state_dict(model.state_dict())
        apply_fsdp2_sharding_recursively(model, mesh, FP32)
        assert list(fsdp_units(model)) == ["layers.0", "layers.1", "nested.0.0", "nested.0.1", "nested.1"]
        fully_shard(model, mesh=mesh, mp_policy=FP32, reshard_after_forward=False)
        value = torch.arange(8.0).view(2, 4) / 8
        model(value, rank).sum().backward()  # ranks use different experts
        units = fsdp_units(model).items()
        keeping = {name for name, unit in units if not _torch_compat.reshards_after_forward(unit, is_root=not name)}
        assert keeping == {"", "layers.1", "nested.0.1", "nested.1"}
        (sum(alone(value, expert).sum() for expert in (0, 1)) / 2).backward()
        same_gradients(model, alone)

    run_ranks(on_rank, 2)


# -- the manager -------------------------------------------------------------------------------------------------------------


def test_fields_of_the_manager_by_position() -> None:
    names = (
        "dp_size dp_replicate_size tp_size cp_size pp_size ep_size sequence_parallel use_hf_tp_plan custom_tp_plan mp_policy "
        "offload_policy backend world_size activation_checkpointing defer_fsdp_grad_sync"
    )
    by_position = [item.name for item in dataclasses.fields(FSDP2Manager) if item.init and not item.kw_only]
    assert by_position == names.split()

    def on_rank(rank: int) -> None:
        manager = FSDP2Manager(4, 2, 2, 1, 1, 2, False, False, None, FP32, CPUOffloadPolicy(), "gloo", 8, True, True)
        assert (manager.dp_size, manager.dp_shard_size, manager.ep_shard_size) == (4, 2, 2)
        assert manager.device_mesh.mesh_dim_names == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        assert manager.device_mesh.mesh.shape == (1, 2, 2, 1, 2)
        assert manager.moe_mesh.mesh_dim_names == ("pp", "dp_replicate", "ep_shard", "ep")
        assert manager.device_mesh["dp_replicate", "dp_shard_cp"].mesh.shape == (2, 2)
        assert {name: manager.device_mesh[name].size() for name in ("dp", "dp_shard_cp", "dp_cp")} == {
            "dp": 4, "dp_shard_cp": 2, "dp_cp": 4
        }  # fmt: skip
        plain = FSDP2Manager(None, None, None, 0, -1, 4)
        assert (plain.dp_size, plain.dp_replicate_size, plain.tp_size, plain.ep_shard_size) == (8, 1, 1, 2)
        assert plain.moe_mesh.mesh_dim_names == ("pp", "ep_shard", "ep")
        assert plain.moe_mesh.mesh.shape == (1, 2, 4)
        assert FSDP2Manager().moe_mesh is None
        with pytest.raises(LayoutError, match="world_size=4: there are 8 processes"):
            FSDP2Manager(world_size=4)
        with pytest.raises(LayoutError, match="dp_replicate_size=3: must divide dp_size=8"):
            FSDP2Manager(8, 3)

    run_ranks(on_rank, 8)


def test_default_dtypes() -> None:
    """Of the manager all bf16, of a strategy fp32 reduction and outputs: as the reference's documentation has it."""

    def on_rank(rank: int) -> None:
        manager = FSDP2Manager()
        model = manager.parallelize(make("llama")[0])
        assert model(batches(1)[0]["input_ids"]).logits.dtype is torch.bfloat16
        rows = {(unit.param_dtype, unit.reduce_dtype) for unit in manager.plan.units}
        assert rows == {("bfloat16", "bfloat16")}
        manager = FSDP2Manager(mp_policy=None)
        model = manager.parallelize(make("llama")[0])
        assert model(batches(1)[0]["input_ids"]).logits.dtype is torch.float32
        rows = {(unit.param_dtype, unit.reduce_dtype) for unit in manager.plan.units}
        assert rows == {("bfloat16", "float32")}

    run_ranks(on_rank, 2)


def test_a_world_of_one_sets_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    manager = FSDP2Manager()
    assert (manager.device_mesh, manager.moe_mesh, manager.mesh) == (None, None, None)
    assert not torch.distributed.is_initialized()
    model, _ = make("llama")
    assert manager.parallelize(model) is model
    assert not fsdp_units(model)
    assert not any(is_checkpointed(module) for module in model.modules())
    with model.no_sync():
        summed_loss(model, batches(1)[0]).backward()
    assert torch.equal(pickle.loads(pickle.dumps(model)).lm_head.weight, model.lm_head.weight)
    with pytest.warns(UserWarning, match="FSDP2Manager\\(tp_size=2\\): there is one process, so nothing is set up"):
        manager = FSDP2Manager(tp_size=2, activation_checkpointing=True)
    other, _ = make("llama")
    manager.parallelize(other)
    assert [is_checkpointed(layer) for layer in other.model.layers] == [True] * len(other.model.layers)
    summed_loss(other, batches(1)[0]).backward()
    same_gradients(other, model)


def test_a_configuration_and_meshes_of_later_versions() -> None:
    @dataclasses.dataclass
    class FSDP2Config:
        sequence_parallel: bool = False
        tp_plan: Any = None
        mp_policy: Any = None
        offload_policy: Any = None
        activation_checkpointing: bool = False
        defer_fsdp_grad_sync: bool = True
        backend: str = "nccl"
        enable_async_tensor_parallel: bool = False
        prefetch_depth: int = 2

    def on_rank(rank: int) -> None:
        names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        mesh = init_device_mesh("cpu", (1, 1, 2, 1, 2), mesh_dim_names=names)
        mesh["dp_replicate", "dp_shard"]._flatten(mesh_dim_name="dp")
        mesh["dp_shard", "cp"]._flatten(mesh_dim_name="dp_shard_cp")
        moe = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "ep_shard", "ep"))
        config = FSDP2Config(mp_policy=FP32, sequence_parallel=True, activation_checkpointing=True)
        by_name = FSDP2Manager(config=config, device_mesh=mesh)
        for manager in (by_name, FSDP2Manager(config, mesh), FSDP2Manager(config, device_mesh=mesh)):
            assert (manager.dp_size, manager.tp_size, manager.ep_size) == (2, 2, 1)
            assert manager.sequence_parallel
        model = manager.parallelize(make("llama")[0])
        assert manager.plan.options.sequence_parallel
        compare(model, make("llama")[0], rank // 2, 2)
        manager = FSDP2Manager(FSDP2Config(mp_policy=FP32), device_mesh=mesh, moe_mesh=moe)
        assert (manager.ep_size, manager.ep_shard_size) == (2, 2)
        model = manager.parallelize(make("mixtral")[0])
        compare(model, make("mixtral")[0], rank // 2, 2)

        class Attributes:
            mp_policy = FP32
            activation_checkpointing = True
            prefetch_depth = 2

        class Slots:
            __slots__ = ("mp_policy", "other")

            def __init__(self) -> None:
                self.mp_policy, self.other = FP32, None

        class Model(pydantic.BaseModel):
            sequence_parallel: bool = True
            prefetch_depth: int = 2

        for given, field, value in (
            (Attributes(), "activation_checkpointing", True),
            (Slots(), "mp_policy", FP32),
            (Model(), "sequence_parallel", True),
            ({"sequence_parallel": True}, "sequence_parallel", True),
        ):
            assert getattr(FSDP2Manager(given, mesh), field) == value
        with pytest.raises(LayoutError, match="FSDP2Config is a class"):
            FSDP2Manager(FSDP2Config, mesh)
        with pytest.raises(LayoutError, match=r"dp_size='none'.*: legal are a number, None, or a configuration object"):
            FSDP2Manager(dp_size="none")
        with pytest.raises(UnsupportedError, match="prefetch_depth=3 of Model"):
            FSDP2Manager(Model(prefetch_depth=3), mesh)
        with pytest.raises(LayoutError, match="dp_replicate_size=2: device_mesh has 1"):
            dataclasses.replace(FSDP2Manager(config, mesh), dp_replicate_size=2)
        with pytest.raises(UnsupportedError, match="enable_async_tensor_parallel=True of FSDP2Config"):
            FSDP2Manager(FSDP2Config(enable_async_tensor_parallel=True), device_mesh=mesh)
        with pytest.raises(LayoutError, match="needs device_mesh"):
            FSDP2Manager(config)
        turned = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "ep", "ep_shard"))
        with pytest.raises(LayoutError, match="moe_mesh: this rank's group on ep is"):
            FSDP2Manager(FSDP2Config(), device_mesh=mesh, moe_mesh=turned)

    run_ranks(on_rank, 4)


def test_the_plan_that_the_model_declares() -> None:
    """Norms of queries and keys are in it: the reference leaves them out, and their gradients are wrong there."""

    def on_rank(rank: int) -> None:
        manager = FSDP2Manager(tp_size=2, use_hf_tp_plan=True, mp_policy=FP32)
        model = manager.parallelize(make("qwen3")[0])
        logits = model(batches(1)[0]["input_ids"]).logits
        assert logits.placements == (Shard(2),)
        other, alone = FSDP2Manager(tp_size=2, use_hf_tp_plan=True, loss_parallel=False, mp_policy=FP32), make("qwen3")[0]
        compare(other.parallelize(make("qwen3")[0]), alone, 0, 1)
        with refuses(MissingPlanError, "tp.no_styles"):
            manager.parallelize(make("gpt2")[0])

    run_ranks(on_rank, 2)


# -- plans -------------------------------------------------------------------------------------------------------------------


def test_the_plan_of_transformers_is_for_parallelize_module() -> None:
    model, _ = make("qwen3", meta=True)
    with pytest.warns(UserWarning, match=r"torch has no style for model.layers.\*.self_attn.q_norm"):
        plan = get_hf_tp_shard_plan(model)
    assert all(not isinstance(style, str) for style in plan.values())
    assert "model.layers.*.self_attn.q_norm" not in plan
    model, _ = make("llama", meta=True)
    model.model._tp_plan = {"layers.*.mlp.up_proj": "colwise_rep"}
    assert get_hf_tp_shard_plan(model)["model.layers.*.mlp.up_proj"].output_layouts == (Replicate(),)
    model.model._tp_plan = {"layers.*.mlp.up_proj": "sideways"}
    with pytest.raises(ValueError, match="style 'sideways': torch has no such style"):
        get_hf_tp_shard_plan(model)
    with pytest.raises(AssertionError, match="GPT2LMHeadModel: declares no tensor parallel plan"):
        get_hf_tp_shard_plan(make("gpt2", meta=True)[0])

    def on_rank(rank: int) -> None:
        model, alone = make("llama")[0], make("llama")[0]
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, get_hf_tp_shard_plan(model))
        ids = batches(1)[0]["input_ids"]
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits.full_tensor(), alone(ids).logits, rtol=1e-4, atol=1e-5)

    run_ranks(on_rank, 2)


def test_a_path_that_leads_nowhere_is_left_out_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="'torch.nn.Nothing': left out"):
        assert parallelizer.import_classes_from_paths(["torch.nn.Nothing", "torch.nn.Linear"]) == [nn.Linear]


def test_a_given_plan_that_shards_the_sequence_is_carried_out() -> None:
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "model.layers.*.input_layernorm": SequenceParallel(),
        "model.layers.*.self_attn.q_proj": ColwiseParallel(input_layouts=Shard(1)),
        "model.layers.*.self_attn.k_proj": ColwiseParallel(input_layouts=Shard(1)),
        "model.layers.*.self_attn.v_proj": ColwiseParallel(input_layouts=Shard(1)),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "model.layers.*.post_attention_layernorm": SequenceParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(input_layouts=Shard(1)),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(input_layouts=Shard(1)),
        "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }

    def on_rank(rank: int) -> None:
        manager = FSDP2Manager(tp_size=2, custom_tp_plan=plan, mp_policy=FP32)
        model = manager.parallelize(make("llama")[0])
        assert manager.plan.options.sequence_parallel
        compare(model, make("llama")[0], rank // 2, 2)

    run_ranks(on_rank, 4)
    assert parallelizer._get_parallel_plan(make("llama", meta=True)[0], tp_shard_plan=plan) == plan


def test_without_tensor_parallel_ranks_its_arguments_count_for_nothing() -> None:
    def on_rank(rank: int) -> None:
        manager = FSDP2Manager(sequence_parallel=True, use_hf_tp_plan=True, custom_tp_plan=GIVEN, mp_policy=FP32)
        compare(manager.parallelize(make("llama")[0]), make("llama")[0], rank, 2)

    run_ranks(on_rank, 2)


# -- accumulation ------------------------------------------------------------------------------------------------------------


class Routed(nn.Module):
    """Microbatches use different branches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, value: torch.Tensor, branch: int) -> torch.Tensor:
        return self.head(self.branches[branch](value)).square().sum()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make_model", [lambda: make("llama")[0], lambda: make("mixtral")[0]])
@pytest.mark.parametrize("sizes", [{}, {"dp_replicate_size": 2}, {"tp_size": 2}])
def test_no_sync(make_model: Callable[[], nn.Module], sizes: dict[str, int]) -> None:
    def on_rank(rank: int) -> None:
        manager = FSDP2Manager(mp_policy=FP32, **sizes)
        model, alone = manager.parallelize(make_model()), make_model()
        ranks = manager.dp_size
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, alone)]
        for step, microbatches in enumerate((3, 1, 2)):
            data = batches(microbatches * ranks, seed=step + 1)
            mine = data[rank // manager.tp_size :: ranks]
            for index, batch in enumerate(mine):
                with nullcontext() if index == microbatches - 1 else model.no_sync():
                    summed_loss(model, batch).backward()
                if index < microbatches - 1:
                    assert all(parameter.grad is None for parameter in model.parameters())
            (sum(summed_loss(alone, batch) for batch in data) / ranks).backward()
            same_gradients(model, alone)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    run_ranks(on_rank, 4 if sizes else 2)


def test_no_sync_of_branches_that_the_last_microbatch_does_not_use() -> None:
    def on_rank(rank: int) -> None:
        model, alone = FSDP2Manager(mp_policy=FP32).parallelize(Routed()), Routed()
        value = torch.arange(8.0).view(2, 4) / 8
        for branch in (0, 1):
            with model.no_sync() if branch == 0 else nullcontext():
                model(value + rank, branch).backward()
            for other in (0, 1):
                (alone(value + other, branch) / 2).backward()
        same_gradients(model, alone)
        assert model.branches[2].weight.grad is None

    run_ranks(on_rank, 2)


# -- what is parallelized already ----------------------------------------------------------------------------------------------


def test_asking_again_says_that_it_is_parallelized() -> None:
    def on_rank(rank: int) -> None:
        manager = FSDP2Manager(mp_policy=FP32)
        model = manager.parallelize(make("llama")[0])
        questions: tuple[Callable[[Any], Any], ...] = (
            get_lm_ac_layers,
            manager.parallelize,
            parallelizer._get_parallel_plan,
            get_hf_tp_shard_plan,
            lambda model: fsdp2_strategy_parallelize(model, manager.device_mesh),
        )
        for ask in questions:
            with pytest.raises(PlanError, match=r"LlamaForCausalLM: the model is already parallelized \(its root"):
                ask(model)

    run_ranks(on_rank, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(get_lm_ac_layers(make("llama", meta=True)[0])) == 2

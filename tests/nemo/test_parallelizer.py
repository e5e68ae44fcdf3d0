"""The names of NeMo AutoModel: all are in their façades with their signatures, and do what the machinery does."""

import importlib
import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from meshwright.distributed import parallelizer
from meshwright.distributed.fsdp2 import FSDP2Manager
from meshwright.distributed.tensor.loss_parallel import cross_entropy_sum
from meshwright.errors import LayoutError, MissingPlanError, PlanError
from meshwright.models.diffusion_gemma import fsdp
from meshwright.models.families import nemotron_h, wan
from meshwright.models.specs import derived as spec
from meshwright.models.specs import registry, strategy
from meshwright.moe import fsdp_mixin
from tests.harness import refuses, run_ranks
from tests.tiny import batches, make, summed_loss, whole

FP32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)

STRATEGY = (
    "model, device_mesh, mp_policy=None, offload_policy=None, sequence_parallel=False, activation_checkpointing=False, "
    "tp_shard_plan=None, dp_replicate_mesh_name='dp_replicate', dp_shard_cp_mesh_name='dp_shard_cp', tp_mesh_name='tp'"
)
SIGNATURES = {
    "apply_fsdp2_sharding_recursively": "module, mesh, mp_policy, offload_policy=None",
    "get_hf_tp_shard_plan": "model",
    "import_class_from_path": "name",
    "import_classes_from_paths": "class_paths",
    "translate_to_torch_parallel_style": "style",
    "validate_tp_mesh": "model, tp_mesh",
    "get_lm_ac_layers": "model",
    "_get_parallel_plan": "model, sequence_parallel=False, tp_shard_plan=None, use_hf_tp_plan=False",
    "fsdp2_strategy_parallelize": STRATEGY,
    "nvfsdp_strategy_parallelize": (
        "model, device_mesh, optimizer=None, nvfsdp_unit_modules=None, tp_shard_plan=None, "
        "data_parallel_sharding_strategy='optim_grads_params', init_nvfsdp_with_meta_device=False, "
        "grad_reduce_in_fp32=False, preserve_fp32_weights=False, overlap_grad_reduce=True, overlap_param_gather=True, "
        "check_for_nan_in_grad=True, average_in_collective=False, disable_bucketing=False, calculate_per_token_loss=False, "
        "keep_fp8_transpose_cache_when_using_custom_fsdp=False, nccl_ub=False, fsdp_double_buffer=False, "
        "dp_mesh_name='dp', cp_mesh_name='cp', tp_mesh_name='tp'"
    ),
    "megatron_fsdp_strategy_parallelize": (
        "model, device_mesh, optimizer=None, megatron_fsdp_unit_modules=None, tp_shard_plan=None, zero_dp_strategy=3, "
        "init_fsdp_with_meta_device=False, grad_reduce_in_fp32=False, preserve_fp32_weights=False, overlap_grad_reduce=True, "
        "overlap_param_gather=True, check_for_nan_in_grad=True, average_in_collective=False, disable_bucketing=False, "
        "calculate_per_token_loss=False, keep_fp8_transpose_cache=False, nccl_ub=False, fsdp_double_buffer=False, "
        "dp_shard_dim='dp', tp_dim='tp'"
    ),
    "unshard_fsdp2_model": "model",
    "get_parallelization_strategy": "model",
    "ParallelizationStrategy.parallelize": f"self, {STRATEGY}",
    "DefaultParallelizationStrategy.parallelize": f"self, {STRATEGY}",
    "NemotronHParallelizationStrategy.parallelize": f"self, {STRATEGY}",
    "WanParallelizationStrategy.parallelize": f"self, {STRATEGY}",
}
"""Of `meshwright.distributed.parallelizer`; keyword-only arguments of ours, and those of later versions, may follow."""


MIXIN = {
    "MoEFSDPSyncMixin.prepare_for_grad_accumulation": "self, pp_enabled=False",
    "MoEFSDPSyncMixin.prepare_for_final_backward": "self, pp_enabled=False",
    "_configure_fsdp_module": "fsdp_module, is_last_backward, reshard_after_backward, requires_gradient_sync",
    "_disable_fsdp_for_moe_module": "module",
    "_iter_fsdp_modules": "module",
    "_run_post_backward_for_moe_module": "module",
    "_run_post_backward_hooks": "fsdp_module",
    "patched_backward_maybe_with_nosync": "self, backward_type, bwd_kwargs, last_backward=False",
}
"""Of `meshwright.moe.fsdp_mixin`."""

DIFFUSION_GEMMA = {
    "_has_fsdp_state": "module",
    "_fully_shard_once": "module, mesh, mp_policy, offload_policy=None, fsdp_kwargs",
    "fully_shard_diffusion_gemma": "module, mesh, mp_policy, offload_policy=None, fsdp_kwargs",
    "register_diffusion_gemma_parallel_strategy": "",
}
"""Of `meshwright.models.diffusion_gemma.fsdp`."""

FACADES = {parallelizer: SIGNATURES, fsdp_mixin: MIXIN, fsdp: DIFFUSION_GEMMA}


def shown(function: Any) -> str:
    found = [
        parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is not parameter.KEYWORD_ONLY and parameter.name not in LATER
    ]
    return ", ".join(found)


LATER = {"enable_fsdp2_prefetch", "fsdp2_backward_prefetch_depth", "fsdp2_forward_prefetch_depth", "reshard_after_forward",
         "fully_shard_fn", "others"}  # fmt: skip


@pytest.mark.parametrize(("home", "name"), [(home, name) for home, names in FACADES.items() for name in names])
def test_every_name_has_its_signature(home: Any, name: str) -> None:
    found = home
    for part in name.split("."):
        found = getattr(found, part)
    assert shown(found) == FACADES[home][name]


def test_the_other_names_are_there() -> None:
    assert parallelizer.HAVE_NVFSDP is (importlib.util.find_spec("megatron_fsdp") is not None)
    assert parallelizer.ParallelizationStrategy is strategy.ParallelizationStrategy
    assert parallelizer.DefaultParallelizationStrategy is spec.DefaultParallelizationStrategy
    assert parallelizer.NemotronHParallelizationStrategy is nemotron_h.NemotronHParallelizationStrategy
    assert parallelizer.WanParallelizationStrategy is wan.WanParallelizationStrategy
    assert parallelizer.get_parallelization_strategy is registry.get_parallelization_strategy
    assert parallelizer.register_parallel_strategy is registry.register_parallel_strategy
    fields = inspect.signature(FSDP2Manager).parameters
    assert {"dp_size", "dp_replicate_size", "tp_size", "cp_size", "pp_size", "ep_size", "sequence_parallel"} <= fields.keys()
    assert {"mp_policy", "offload_policy", "activation_checkpointing", "defer_fsdp_grad_sync"} <= fields.keys()


def test_paths_of_classes() -> None:
    assert parallelizer.import_class_from_path("torch.optim.AdamW") is torch.optim.AdamW
    assert parallelizer.import_classes_from_paths(["torch.nn.Linear", "torch.nn.Module.forward"]) == [
        nn.Linear,
        nn.Module.forward,
    ]
    for wrong in ("torch.nn.Nothing", "no_such_package.Thing", "AdamW"):
        with pytest.raises(ImportError, match=wrong):
            parallelizer.import_class_from_path(wrong)


def test_names_of_styles() -> None:
    translate = parallelizer.translate_to_torch_parallel_style
    assert isinstance(translate("colwise"), ColwiseParallel)
    assert isinstance(translate("sequence_parallel"), SequenceParallel)
    assert translate("colwise_rep").output_layouts == (Replicate(),)
    assert translate("rowwise_rep").input_layouts == (Replicate(),)
    with pytest.raises(ValueError, match="style 'columns': torch has no such style; legal are colwise"):
        translate("columns")


def test_the_plan_that_a_model_declares() -> None:
    with pytest.warns(UserWarning, match="q_norm"):
        plan = parallelizer.get_hf_tp_shard_plan(make("qwen3", meta=True)[0])
    assert isinstance(plan["model.embed_tokens"], RowwiseParallel)
    assert plan["model.embed_tokens"].input_layouts == (Replicate(),)
    assert plan["lm_head"].output_layouts == (Shard(-1),)
    assert not plan["lm_head"].use_local_output
    with refuses(PlanError, "tp.no_styles"):
        parallelizer.get_hf_tp_shard_plan(make("gpt2", meta=True)[0])


def test_the_plan_that_is_taken() -> None:
    model, _ = make("llama", meta=True)
    mine = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    assert parallelizer._get_parallel_plan(model, tp_shard_plan=mine).keys() == mine.keys()
    own = parallelizer._get_parallel_plan(model)
    assert own.keys() == parallelizer.get_hf_tp_shard_plan(model).keys()
    sequence = parallelizer._get_parallel_plan(model, sequence_parallel=True)
    norms = {"model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm", "model.norm"}
    assert {name for name, style in sequence.items() if isinstance(style, SequenceParallel)} == norms
    assert sequence["model.layers.*.mlp.down_proj"].output_layouts == (Shard(1),)
    with pytest.raises(MissingPlanError, match=r"there are no styles; derived: 'transformer.h.\*.\S*' counts what is sliced"):
        parallelizer._get_parallel_plan(make("gpt2", meta=True)[0])
    with pytest.raises(PlanError, match="sequence_parallel=True: the inside of its layers is unknown"):
        parallelizer._get_parallel_plan(make("nemotron_h", meta=True)[0], sequence_parallel=True)


def test_a_model_that_declares_no_plan_gets_the_styles_of_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model, family = make("llama", meta=True)
    monkeypatch.setattr("meshwright.nemo.functions.spec_of", lambda _: replace(family, tp_styles={}))
    plan = parallelizer._get_parallel_plan(model)
    layer = "model.layers.*"
    columns = [f"{layer}.self_attn.{name}_proj" for name in "qkv"] + [f"{layer}.mlp.{name}_proj" for name in ("gate", "up")]
    assert {name for name, style in plan.items() if isinstance(style, ColwiseParallel)} == {*columns, "lm_head"}
    assert {name for name, style in plan.items() if isinstance(style, RowwiseParallel)} == {
        f"{layer}.self_attn.o_proj", f"{layer}.mlp.down_proj", "model.embed_tokens",
    }  # fmt: skip


def test_heads_that_a_mesh_cannot_share_are_refused() -> None:
    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        with pytest.raises(LayoutError, match="tp=3: 4 attention heads cannot be divided by 3; legal are 1, 2, 4"):
            parallelizer.validate_tp_mesh(make("llama", meta=True)[0], mesh)
        parallelizer.validate_tp_mesh(
            make("llama", meta=True, hidden_size=48, num_attention_heads=6, num_key_value_heads=3)[0], mesh
        )

    run_ranks(on_rank, 3)


PLANS = {
    "the family's or model's own": {},
    "sequence parallel": {"sequence_parallel": True},
    "given": {"tp_shard_plan": {"model.layers.*.mlp.up_proj": ColwiseParallel(), "model.layers.*.mlp.gate_proj": "colwise",
                                "model.layers.*.mlp.down_proj": RowwiseParallel()}},
    "given by path": {"tp_shard_plan": f"{__name__}.sharded_logits"},
    "its own plan given back": {"tp_shard_plan": "own", "sequence_parallel": True},
    "recomputed": {"activation_checkpointing": True},
}  # fmt: skip


def sharded_logits() -> dict[str, Any]:
    return {"lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arguments", PLANS.values(), ids=PLANS)
def test_gradients_over_a_mesh_of_somebody_else(arguments: dict[str, Any]) -> None:
    """With axes of other names: gradients are the average over data ranks of one process's."""

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        model, _ = make("llama")
        alone, _ = make("llama")
        chosen = dict(arguments)
        if chosen.get("tp_shard_plan") == "own":
            chosen["tp_shard_plan"] = parallelizer._get_parallel_plan(model, sequence_parallel=True)
        names = {"dp_shard_cp_mesh_name": "data", "tp_mesh_name": "model"}
        found = parallelizer.fsdp2_strategy_parallelize(model, mesh, FP32, **chosen, **names)
        assert found is model
        assert isinstance(model, FSDPModule)
        data = batches(2)
        logits = model(data[rank // 2]["input_ids"]).logits
        wants_sharded = "tp_shard_plan" in arguments and "up_proj" not in str(arguments)
        assert isinstance(logits, DTensor) == wants_sharded
        if wants_sharded:
            cross_entropy_sum(logits, data[rank // 2]["labels"]).backward()
        else:
            targets = data[rank // 2]["labels"].flatten()
            nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum").backward()
        (sum(summed_loss(alone, batch) for batch in data) / 2).backward()
        for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=1e-4, atol=2e-6, msg=name)

    run_ranks(on_rank, 4)


def test_the_manager_with_sequence_and_loss_parallel() -> None:
    def on_rank(rank: int) -> None:
        manager = FSDP2Manager(tp_size=2, sequence_parallel=True, loss_parallel=True, mp_policy=FP32)
        model, _ = make("llama")
        alone, _ = make("llama")
        manager.parallelize(model)
        assert manager.plan is not None
        assert manager.plan.options.sequence_parallel
        assert manager.plan.tp_level == "model"
        data = batches(2)
        cross_entropy_sum(model(data[rank // 2]["input_ids"]).logits, data[rank // 2]["labels"]).backward()
        (sum(summed_loss(alone, batch) for batch in data) / 2).backward()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=1e-4, atol=2e-6)
        given = FSDP2Manager(tp_size=2, custom_tp_plan={"lm_head": "colwise_gather_output"}, mp_policy=FP32)
        given.parallelize(make("llama")[0])
        assert given.plan is not None
        assert given.plan.tp_level == "given"
        assert [row.module for row in given.plan.tensor_parallel] == ["lm_head"]

    run_ranks(on_rank, 4)

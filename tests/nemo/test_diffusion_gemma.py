"""The names of NeMo AutoModel for sharding a DiffusionGemma by hand."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from meshwright.distributed import _torch_compat
from meshwright.distributed.data.fsdp_units import fsdp_units
from meshwright.distributed.fsdp2 import FSDP2Manager
from meshwright.distributed.mesh import build_mesh
from meshwright.errors import UnsupportedError
from meshwright.layout import Layout
from meshwright.models.diffusion_gemma.fsdp import (
    _has_fsdp_state,
    fully_shard_diffusion_gemma,
    register_diffusion_gemma_parallel_strategy,
)
from meshwright.models.specs.derived import DefaultParallelizationStrategy
from meshwright.models.specs.registry import get_parallelization_strategy
from tests.diffusion_gemma import tiny_diffusion_gemma
from tests.harness import run_ranks
from tests.tiny import tiny_model, whole


def test_sharding_by_hand_makes_experts_a_unit_inside_their_layer() -> None:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = torch.nn.Module()
            self.moe.experts = torch.nn.Linear(4, 4)
            self.other = torch.nn.Linear(4, 4)

    def on_rank(rank: int) -> None:
        mesh = build_mesh(Layout(), "cpu")["dp_shard"]
        policy = torch.distributed.fsdp.MixedPrecisionPolicy()
        for module, experts in (
            (tiny_model("mixtral").model.layers[0].mlp, "experts"),
            (Holder(), "moe.experts"),
            (torch.nn.Linear(4, 4), None),
        ):
            for _ in range(2):  # idempotent
                assert fully_shard_diffusion_gemma(module, mesh, policy, reshard_after_forward=False) is module
            assert _has_fsdp_state(module)
            assert list(fsdp_units(module)) == ["", *([experts] if experts else [])]
            own = {id(parameter) for parameter in _torch_compat.owned_parameters(module)}
            inside = module.get_submodule(experts).parameters() if experts else ()
            assert own == {id(parameter) for parameter in module.parameters()} - {id(parameter) for parameter in inside}

    run_ranks(on_rank, 2)
    for _ in range(2):
        register_diffusion_gemma_parallel_strategy()
    with torch.device("meta"):
        model = tiny_diffusion_gemma()
    strategy = get_parallelization_strategy(model)
    assert type(strategy).__name__ == "DiffusionGemmaParallelizationStrategy"
    assert isinstance(strategy, DefaultParallelizationStrategy)


FP32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
STACKS = ("model.encoder.language_model.layers", "model.decoder.layers")


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [layer for stack in STACKS for layer in model.get_submodule(stack)]


def by_layers(model: nn.Module, mesh: Any) -> list[str]:
    """As a loop of the user's does: layer by layer, then the root. The second stack has the parameters of the first."""
    for _ in range(2):  # idempotent
        for layer in layers_of(model):
            fully_shard_diffusion_gemma(layer, mesh, FP32)
        fully_shard_diffusion_gemma(model, mesh, FP32, reshard_after_forward=False)
    return [f"{stack}.{index}{inner}" for stack in STACKS for index in range(2) for inner in ("", ".experts")]


def by_parts(model: nn.Module, mesh: Any) -> list[str]:
    """Experts first, then layers, the second stack first, and the inner model; then values are given to a model without any."""
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    layers = layers_of(model)
    for layer in (*layers[2:], *layers[:2]):
        fully_shard_diffusion_gemma(layer.experts, mesh, FP32)
    for layer in (*layers[2:], *layers[:2]):
        fully_shard_diffusion_gemma(layer, mesh, FP32)
    fully_shard_diffusion_gemma(model, mesh, FP32, reshard_after_forward=False)
    model.to_empty(device="cpu")
    for name, tensor in model.named_buffers():
        tensor.copy_(values[name] if name in values else tiny_diffusion_gemma().get_buffer(name))
    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True))
    return [f"{stack}.{index}{inner}" for stack in STACKS for index in range(2) for inner in ("", ".experts")]


def at_once(model: nn.Module, mesh: Any) -> list[str]:
    """The plan makes one unit of both layers, because their gradients are small."""
    fully_shard_diffusion_gemma(model, mesh, FP32)
    return [f"{STACKS[0]}.{index}{inner}" for index in range(2) for inner in ("", ".experts")]


def by_recursion(model: nn.Module, mesh: Any) -> list[str]:
    """By the manager, whose strategy is the registered one."""
    FSDP2Manager(mp_policy=FP32).parallelize(model)
    return [f"{STACKS[0]}.{index}{inner}" for index in range(2) for inner in ("", ".experts")]


def by_function(model: nn.Module, mesh: Any) -> list[str]:
    """As the reference binds it to a strategy."""
    names = {"dp_replicate_mesh_name": "dp_replicate"} if mesh.ndim > 1 else {}
    get_parallelization_strategy(model).parallelize(
        model, mesh, FP32, dp_shard_cp_mesh_name="dp_shard", fully_shard_fn=fully_shard_diffusion_gemma, **names
    )
    return [f"{stack}.{index}{inner}" for stack in STACKS for index in range(2) for inner in ("", ".experts")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shard", [by_layers, by_parts, at_once, by_recursion, by_function])
@pytest.mark.parametrize("whole_mesh", [(2,), (2, 2)])
def test_the_model_of_transformers(shard: Any, whole_mesh: tuple[int, ...]) -> None:
    def on_rank(rank: int) -> None:
        names = ("dp_replicate", "dp_shard")[-len(whole_mesh) :]
        mesh = init_device_mesh("cpu", whole_mesh, mesh_dim_names=names)
        ranks = mesh.size()
        model, alone = tiny_diffusion_gemma(), tiny_diffusion_gemma()
        expected = shard(model, mesh)
        units = [name for name in fsdp_units(model) if any(name.startswith(stack) for stack in STACKS)]
        assert units == expected
        firsts, seconds = (model.get_submodule(stack) for stack in STACKS)
        for first, second in zip(firsts, seconds, strict=True):
            assert first.mlp.gate_proj.weight is second.mlp.gate_proj.weight
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, alone)]
        read = torch.randint(3, 29, (2 * ranks, 24), generator=torch.Generator().manual_seed(3))
        for _ in range(2):

            def loss(denoiser: nn.Module, rows: torch.Tensor) -> torch.Tensor:
                logits = denoiser(input_ids=rows[:, :16], decoder_input_ids=rows[:, 16:]).logits
                return logits.logsumexp(-1).sum()

            loss(model, read[2 * rank : 2 * rank + 2]).backward()
            (loss(alone, read) / ranks).backward()
            theirs = dict(alone.named_parameters())
            for name, parameter in model.named_parameters():
                assert (parameter.grad is None) == (theirs[name].grad is None), name
                if parameter.grad is not None:
                    torch.testing.assert_close(whole(parameter.grad), theirs[name].grad, rtol=1e-4, atol=1e-5, msg=name)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    run_ranks(on_rank, whole_mesh[0] * (whole_mesh[1] if len(whole_mesh) > 1 else 1))


class DiffusionGemmaForBlockDiffusion(nn.Module):
    """Of NeMo AutoModel's shape: one stack in a dict, experts within `moe`, each pass a call of the inner model."""

    class Moe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 2)
            self.experts = nn.Linear(8, 8)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.experts(hidden) * self.gate(hidden).softmax(-1)[..., :1]

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.moe = DiffusionGemmaForBlockDiffusion.Moe()

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + self.moe(self.norm(hidden))

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(29, 8)
            self.layers = nn.ModuleDict({str(index): DiffusionGemmaForBlockDiffusion.Layer() for index in range(3)})

        def forward(self, ids: torch.Tensor, before: torch.Tensor | float = 0.0) -> torch.Tensor:
            hidden = self.embed_tokens(ids) + before
            for layer in self.layers.values():
                hidden = layer(hidden)
            return hidden

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = self.Inner()
        self.lm_head = nn.Linear(8, 29)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        encoded = self.model(ids)
        with torch.no_grad():
            draft = self.model(ids)
        return self.lm_head(self.model(ids, encoded + draft))


@pytest.mark.parametrize("how", ["manager", "by hand"])
def test_a_model_of_the_shape_of_the_reference(how: str) -> None:
    def on_rank(rank: int) -> None:
        model, alone = DiffusionGemmaForBlockDiffusion(), DiffusionGemmaForBlockDiffusion()
        if how == "manager":
            manager = FSDP2Manager(mp_policy=FP32)
            manager.parallelize(model)
            assert [unit.kind for unit in manager.plan.units if "experts" in unit.name] == ["unit"] * 3
        else:
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
            for layer in model.model.layers.values():
                fully_shard_diffusion_gemma(layer, mesh, FP32)
            fully_shard_diffusion_gemma(model, mesh, FP32, reshard_after_forward=False)
        inside = [name for index in range(3) for name in (f"model.layers.{index}", f"model.layers.{index}.moe.experts")]
        assert list(fsdp_units(model)) == ["", *inside]
        ids = torch.randint(0, 29, (4, 6), generator=torch.Generator().manual_seed(1))
        model(ids[2 * rank : 2 * rank + 2]).logsumexp(-1).sum().backward()
        (alone(ids).logsumexp(-1).sum() / 2).backward()
        for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=1e-4, atol=1e-5, msg=name)

    run_ranks(on_rank, 2)


def test_a_layer_that_shares_only_some_parameters_is_refused() -> None:
    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        second.weight = first.weight
        fully_shard_diffusion_gemma(first, mesh, FP32)
        with pytest.raises(UnsupportedError, match="Linear: shares 'weight' with a module that is sharded already"):
            fully_shard_diffusion_gemma(second, mesh, FP32)
        model = tiny_diffusion_gemma()
        for layer in layers_of(model):
            fully_shard_diffusion_gemma(layer, mesh, FP32)
        fully_shard(model, mesh=mesh, mp_policy=FP32)
        ids = torch.zeros(1, 8, dtype=torch.long)
        with pytest.raises(UnsupportedError, match="EncoderTextLayer: fully_shard_diffusion_gemma sharded this layer, but not"):
            model(input_ids=ids, decoder_input_ids=ids)
        whole = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
        for module in (whole[0][0], whole[0], whole):
            fully_shard_diffusion_gemma(module, mesh, FP32)
        whole.to_empty(device="cpu")
        assert fully_shard_diffusion_gemma(tiny_diffusion_gemma(), init_device_mesh("cpu", (2,)), FP32) is not None
        with pytest.raises(UnsupportedError, match="ignored_params: for a whole model only reshard_after_forward is legal"):
            fully_shard_diffusion_gemma(tiny_diffusion_gemma(), mesh, FP32, ignored_params=set())

    run_ranks(on_rank, 2)

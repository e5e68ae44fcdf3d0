"""The names of NeMo AutoModel for sharding a DiffusionGemma by hand."""

import torch

from meshwright.distributed import _torch_compat
from meshwright.distributed.fsdp import fsdp_units
from meshwright.distributed.mesh import build_mesh
from meshwright.layout import Layout
from meshwright.models.diffusion_gemma.fsdp import (
    _has_fsdp_state,
    fully_shard_diffusion_gemma,
    register_diffusion_gemma_parallel_strategy,
)
from meshwright.models.registry import get_parallelization_strategy
from tests.diffusion_gemma import tiny_diffusion_gemma
from tests.harness import run_ranks
from tests.tiny import tiny_model


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
    assert type(get_parallelization_strategy(model)).__name__ == "DiffusionGemmaParallelizationStrategy"

"""Gradient norm and clipping over different meshes, equal to those of one process."""

import math

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshwright.distributed.mesh import build_mesh
from meshwright.distributed.update.grad_clip import clip_grad_norm_, total_grad_norm
from meshwright.layout import Layout
from tests.harness import run_ranks

SHAPES = {"sharded": (6, 3), "hsdp": (5, 2), "replicated": (4,), "tiny": (1, 2), "plain": (3,), "two_axes": (4, 6)}


def gradients(poison: float | None = None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    if poison is not None:
        found["sharded"][5, 1] = poison  # in the shard of one rank only
    return found


def on_meshes(values: dict[str, torch.Tensor]) -> list[torch.nn.Parameter]:
    mesh = build_mesh(Layout(dp_replicate=2), "cpu")
    shard, both = mesh["dp_shard"], mesh.root["dp_replicate", "dp_shard"]
    places = {
        "sharded": (shard, [Shard(0)]),
        "hsdp": (both, [Replicate(), Shard(0)]),
        "replicated": (both, [Replicate(), Replicate()]),
        "tiny": (both, [Shard(0), Shard(0)]),  # three of four ranks hold nothing
        "two_axes": (both, [Shard(1), Shard(0)]),
    }
    found = []
    for name, value in values.items():
        if name in places:
            value = distribute_tensor(value, *places[name], src_data_rank=None)
        parameter = torch.nn.Parameter(torch.zeros_like(value))
        parameter.grad = value
        found.append(parameter)
    found.append(torch.nn.Parameter(torch.zeros(2)))  # no gradient
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
def test_norm_and_clipped_gradients_equal_one_process(norm_type: float) -> None:
    def on_rank(rank: int) -> None:
        for max_norm in (None, 0.5, 1e6):
            expected = gradients()
            alone = [torch.nn.Parameter(torch.zeros_like(value)) for value in expected.values()]
            for parameter, value in zip(alone, expected.values(), strict=True):
                parameter.grad = value.clone()
            reference = torch.nn.utils.clip_grad_norm_(alone, max_norm or math.inf, norm_type)
            parameters = on_meshes(gradients())
            norm = clip_grad_norm_(parameters, max_norm, norm_type)
            assert not isinstance(norm, DTensor)
            torch.testing.assert_close(norm, reference)
            for ours, theirs in zip(parameters, alone, strict=False):
                gradient = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
                torch.testing.assert_close(gradient, theirs.grad)

    run_ranks(on_rank, 4)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_all_ranks_see_a_norm_that_is_not_finite_and_leave_gradients_alone(poison: float, norm_type: float) -> None:
    def on_rank(rank: int) -> float:
        parameters = on_meshes(gradients(poison))
        before = [None if p.grad is None else p.grad.clone() for p in parameters]
        norm = float(clip_grad_norm_(parameters, 0.5, norm_type))
        for parameter, expected in zip(parameters, before, strict=True):
            if expected is not None:
                ours, theirs = (g.to_local() if isinstance(g, DTensor) else g for g in (parameter.grad, expected))
                torch.testing.assert_close(ours, theirs, equal_nan=True)
        return norm

    norms = run_ranks(on_rank, 4)
    assert all(math.isnan(norm) if math.isnan(poison) else norm == math.inf for norm in norms), norms


def test_without_gradients_the_norm_is_zero() -> None:
    assert float(total_grad_norm([torch.nn.Parameter(torch.ones(2))])) == 0.0

"""Layers that are compiled after they were sliced and sharded: what they compute is what they compute eagerly."""

import shutil

import pytest
import torch
import torch._dynamo

from meshwright.distributed.conductor import parallelize
from meshwright.distributed.grad_sync import GradSync
from meshwright.distributed.mesh import build_mesh
from meshwright.layout import Layout
from meshwright.plan.options import ParallelOptions
from meshwright.plan.resolver import resolve
from tests.harness import run_ranks
from tests.tiny import batches, make, summed_loss, whole

Found = tuple[list[torch.Tensor], list[torch.Tensor]]


def step(family: str, layout: Layout, world: int, backend: str | None = None) -> Found:
    """Losses and gradients of three microbatches, the last one shorter, and the loss of an evaluation."""
    model, spec = make(family)
    compiled = {} if backend is None else {"compile": True, "compile_backend": backend}
    options = ParallelOptions(param_dtype="float32", sync="reduce_each", microbatches=3, **compiled)
    plan = resolve(spec, model, layout, options, world_size=world)
    parallelize(model, plan, build_mesh(plan.layout, "cpu"))
    sync, losses = GradSync.from_plan(model, plan), []
    data = [*batches(2), *batches(1, length=9)]
    for _, batch in sync.microbatches(data):
        loss = summed_loss(model, batch)
        loss.backward()
        losses.append(loss.detach())
    with torch.no_grad(), sync.forward_only():
        losses.append(summed_loss(model.eval(), data[0]))
    return losses, [whole(p.grad) for p in model.parameters() if p.grad is not None]


def compare(family: str, layout: Layout, world: int, backend: str) -> tuple[list[Found], dict[str, int], int]:
    """Eager and compiled; how many frames were met and compiled; breaks of a graph."""
    eager = step(family, layout, world)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = step(family, layout, world, backend)
    return [eager, compiled], dict(counters["frames"]), sum(counters["graph_break"].values())


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"tp": 2}], ids=str)
def test_graphs_without_a_break(family: str, axes: dict[str, int]) -> None:
    """Whole layers, with the collectives of tensor parallel in their graph, to the bit; parts of those that have experts, whose
    gradients are added in another order."""

    def on_rank(rank: int) -> None:
        (eager, compiled), frames, breaks = compare(family, Layout(**axes), 2, "aot_eager")
        assert breaks == 0
        assert frames["ok"] == frames["total"] > 0
        for one, other in zip((*eager[0], *eager[1]), (*compiled[0], *compiled[1]), strict=True):
            assert one.equal(other) if family == "llama" else (one - other).abs().max() <= 1e-6 * one.abs().max()

    run_ranks(on_rank, 2)


def test_experts_over_ep_are_compiled_beside_their_dispatch() -> None:
    def on_rank(rank: int) -> None:
        (eager, compiled), frames, breaks = compare("mixtral", Layout(ep=2), 2, "aot_eager")
        assert breaks == 0
        assert frames["ok"] == frames["total"] > 0
        for one, other in zip((*eager[0], *eager[1]), (*compiled[0], *compiled[1]), strict=True):
            assert (one - other).abs().max() <= 1e-6 * one.abs().max()

    run_ranks(on_rank, 2)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ on the CPU, and there is no g++")
def test_inductor_under_tensor_parallel() -> None:
    def on_rank(rank: int) -> None:
        (eager, compiled), frames, breaks = compare("llama", Layout(tp=2), 2, "inductor")
        assert breaks == 0
        assert frames["ok"] == frames["total"] > 0
        for one, other in zip((*eager[0], *eager[1]), (*compiled[0], *compiled[1]), strict=True):
            assert (one - other).abs().max() <= 1e-5 * one.abs().max()

    run_ranks(on_rank, 2)

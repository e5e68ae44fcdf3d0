"""Layers that are compiled after they were sliced and sharded: what they compute is what they compute eagerly."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo

from meshwright.distributed.conductor import parallelize
from meshwright.distributed.data.grad_sync import GradSync
from meshwright.distributed.mesh import build_mesh
from meshwright.layout import Layout
from meshwright.models.specs.registry import spec_of
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.resolver import resolve
from tests.harness import run_ranks
from tests.tiny import batches, make, summed_loss, tiny_model, whole

Found = tuple[list[torch.Tensor], list[torch.Tensor]]


def step(family: str, layout: Layout, world: int, backend: str | None = None, recomputed: str = "none") -> Found:
    """Losses and gradients of three microbatches, the last one shorter, and the loss of an evaluation."""
    model, spec = make(family)
    compiled = {} if backend is None else {"compile": True, "compile_backend": backend}
    chosen = {"param_dtype": "float32", "sync": "reduce_each", "activation_checkpointing": recomputed}
    options = ParallelOptions(microbatches=3, **chosen, **compiled)
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


def compare(
    family: str, layout: Layout, world: int, backend: str, recomputed: str = "none"
) -> tuple[list[Found], dict[str, int], int]:
    """Eager and compiled; how many frames were met and compiled; breaks of a graph."""
    eager = step(family, layout, world, recomputed=recomputed)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = step(family, layout, world, backend, recomputed)
    return [eager, compiled], dict(counters["frames"]), sum(counters["graph_break"].values())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("family", "axes", "recomputed"),
    [
        ("llama", {"dp_shard": 2}, "none"),
        ("llama", {"tp": 2}, "none"),
        ("llama", {"dp_shard": 2}, "full"),
        ("llama", {"tp": 2}, "full"),
        ("llama", {"tp": 2}, "submodule"),
        ("mixtral", {"dp_shard": 2}, "none"),
        ("mixtral", {"tp": 2}, "none"),
    ],
    ids=str,
)
def test_graphs_without_a_break(family: str, axes: dict[str, int], recomputed: str) -> None:
    """Whole layers, with the collectives of tensor parallel in their graph, to the bit; parts of those that have experts, or
    are recomputed in parts, whose gradients are added in another order."""
    exact = family == "llama" and recomputed != "submodule"

    def on_rank(rank: int) -> None:
        (eager, compiled), frames, breaks = compare(family, Layout(**axes), 2, "aot_eager", recomputed)
        assert breaks == 0
        assert frames["ok"] == frames["total"] > 0
        for one, other in zip((*eager[0], *eager[1]), (*compiled[0], *compiled[1]), strict=True):
            assert one.equal(other) if exact else (one - other).abs().max() <= 1e-6 * one.abs().max()

    run_ranks(on_rank, 2)


@pytest.mark.thorough
def test_experts_over_ep_are_compiled_beside_their_dispatch() -> None:
    def on_rank(rank: int) -> None:
        (eager, compiled), frames, breaks = compare("mixtral", Layout(ep=2), 2, "aot_eager")
        assert breaks == 0
        assert frames["ok"] == frames["total"] > 0
        for one, other in zip((*eager[0], *eager[1]), (*compiled[0], *compiled[1]), strict=True):
            assert (one - other).abs().max() <= 1e-6 * one.abs().max()

    run_ranks(on_rank, 2)


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ on the CPU, and there is no g++")
def test_inductor_under_tensor_parallel() -> None:
    def on_rank(rank: int) -> None:
        (eager, compiled), frames, breaks = compare("llama", Layout(tp=2), 2, "inductor")
        assert breaks == 0
        assert frames["ok"] == frames["total"] > 0
        for one, other in zip((*eager[0], *eager[1]), (*compiled[0], *compiled[1]), strict=True):
            assert (one - other).abs().max() <= 1e-5 * one.abs().max()

    run_ranks(on_rank, 2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layers", "axes", "recomputed", "parts"),
    [
        (12, {"tp": 2}, "full", 1),
        (12, {"tp": 2}, "submodule", 4),
        (12, {"dp_shard": 2}, "selective", 1),
        (40, {"dp_shard": 2}, "none", 1),
    ],
    ids=str,
)
def test_no_layer_falls_back_to_eager(layers: int, axes: dict[str, int], recomputed: str, parts: int) -> None:
    """torch compiles a frame 8 times at most, and runs what comes then as it is, without an error. All layers share a graph."""
    calls = [0]

    def counting(graph: torch.fx.GraphModule, example: object) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            calls[0] += 1
            return graph(*args)

        return run

    def on_rank(rank: int) -> None:
        torch._dynamo.reset()
        torch._dynamo.register_backend(counting, name="counting")
        model = tiny_model("llama", num_hidden_layers=layers)
        options = ParallelOptions(
            param_dtype="float32", compile=True, compile_backend="counting", activation_checkpointing=recomputed
        )
        plan = resolve(spec_of(model), model, Layout(**axes), options, world_size=2)
        parallelize(model, plan, build_mesh(plan.layout, "cpu"))
        optimizer, losses = torch.optim.SGD(model.parameters(), 1e-4), []
        (batch,) = batches(1)
        for _ in range(2):
            before = calls[0]
            loss = summed_loss(model, batch)
            assert calls[0] - before == parts * layers
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        assert losses[1] < losses[0]

    run_ranks(on_rank, 2)

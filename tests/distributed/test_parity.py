"""Gradients of every data-parallel layout against one process, parameter by parameter, and the collectives of a step."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from meshwright.distributed.comm_counter import CommCounter
from meshwright.distributed.grad_clip import clip_grad_norm_
from meshwright.distributed.grad_sync import GradSync
from meshwright.distributed.mesh import build_mesh
from meshwright.distributed.parallelizer import parallelize
from meshwright.layout import Layout
from meshwright.plan.options import ParallelOptions
from meshwright.plan.price import totals
from meshwright.plan.resolver import resolve
from tests.harness import run_ranks
from tests.tiny import batches, make, summed_loss, valid_tokens

POLICIES = ("defer", "reshard_each", "reduce_each")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def reference(family: str, data: list[dict[str, torch.Tensor]], **changes: Any) -> dict[str, torch.Tensor]:
    model, _ = make(family, **changes)
    total = valid_tokens(data)
    for batch in data:
        (summed_loss(model, batch) / total).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def step(family: str, layout: Layout, options: ParallelOptions, world: int, rank: int, **changes: Any) -> dict[str, Any]:
    """One accumulated step under a layout: gradients against one process, and collectives against the plan."""
    microbatches = options.microbatches
    data = batches(world * microbatches)
    total = valid_tokens(data)
    mine = data[rank * microbatches : (rank + 1) * microbatches]
    model, spec = make(family, **changes)
    plan = resolve(spec, model, layout, options, world_size=world)
    mesh = build_mesh(plan.layout, "cpu")
    parallelize(model, plan, mesh)
    model.train()
    sync = GradSync.from_plan(model, plan)
    with CommCounter() as counter:
        for _, batch in sync.microbatches(mine):
            (summed_loss(model, batch) / total).backward()
    expected = reference(family, data, **changes)
    errors = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None, name
            continue
        gradient = whole(parameter.grad)
        errors[name] = float((gradient - expected[name]).abs().max() / expected[name].abs().max())
    norm = clip_grad_norm_(model.parameters(), None)
    expected_norm = torch.stack([g.norm() for n, g in expected.items() if n in errors]).norm()
    planned = totals(plan).traffic
    return {
        "worst": max(errors.items(), key=lambda item: item[1]),
        "norm": abs(float(norm / expected_norm) - 1),
        "counts": dict(counter.counts),
        "bytes": dict(counter.bytes),
        "planned": planned,
    }


def check(found: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert found["worst"][1] <= tolerance, found["worst"]
    assert found["norm"] <= tolerance
    planned = found["planned"]
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        assert found["counts"].get(kind, 0) == getattr(planned, f"{kind}s"), (kind, found)
        assert found["bytes"].get(kind, 0) == getattr(planned, f"{kind}_bytes"), (kind, found)


LAYOUTS = [
    (Layout(), 1),
    (Layout(), 2),
    (Layout(), 4),
    (Layout(dp_replicate=2), 2),
    (Layout(dp_replicate=4), 4),
    (Layout(dp_replicate=2), 4),
]


@pytest.mark.parametrize(("layout", "world"), LAYOUTS, ids=lambda value: str(value).replace(" ", "-"))
@pytest.mark.parametrize("family", ["plain", "llama"])
def test_gradients_and_collectives_equal_one_process_and_the_plan(family: str, layout: Layout, world: int) -> None:
    def on_rank(rank: int) -> None:
        for policy in POLICIES:
            for microbatches in (1, 4):
                options = ParallelOptions(param_dtype="float32", sync=policy, microbatches=microbatches)
                check(step(family, layout, options, world, rank))

    run_ranks(on_rank, world)

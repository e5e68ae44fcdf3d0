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
from meshwright.plan.spec import ParallelSpec
from tests.harness import run_ranks
from tests.tiny import FAMILIES, batches, make, summed_loss, valid_tokens

POLICIES = ("defer", "reshard_each", "reduce_each")
LAYOUTS = [
    (Layout(), 1),
    (Layout(), 2),
    (Layout(), 4),
    (Layout(dp_replicate=2), 2),
    (Layout(dp_replicate=4), 4),
    (Layout(dp_replicate=2), 4),
]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def reference(family: str, data: list[dict[str, torch.Tensor]], frozen: set[str], **changes: Any) -> dict[str, torch.Tensor]:
    """Gradients of one process, with the loss divided by all valid tokens."""
    model, _ = make(family, **changes)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    total = valid_tokens(data)
    for batch in data:
        (summed_loss(model, batch) / total).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def step(
    family: str,
    layout: Layout,
    options: ParallelOptions,
    world: int,
    rank: int,
    spec: ParallelSpec | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """One accumulated step under a layout: gradients against one process, and collectives with what was planned."""
    microbatches = options.microbatches
    data = batches(world * microbatches)
    assert len({valid_tokens([batch]) for batch in data}) > 1 or len(data) == 1  # uneven on ranks and microbatches
    total = valid_tokens(data)
    model, derived = make(family, **changes)
    plan = resolve(spec or derived, model, layout, options, world_size=world)
    mesh = build_mesh(plan.layout, "cpu")
    parallelize(model, plan, mesh)
    model.train()
    sync = GradSync.from_plan(model, plan)
    with CommCounter() as counter:
        for _, batch in sync.microbatches(data[rank * microbatches : (rank + 1) * microbatches]):
            (summed_loss(model, batch) / total).backward()
    expected = reference(family, data, {row.name for row in plan.parameters if not row.trainable}, **changes)
    errors = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None, name
            continue
        difference = (whole(parameter.grad) - expected[name]).abs().max()
        errors[name] = float(difference / expected[name].abs().max().clamp(min=1e-12))
    norm = clip_grad_norm_(model.parameters(), None)
    expected_norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    return {
        "errors": errors,
        "norm": abs(float(norm / expected_norm) - 1),
        "counts": dict(counter.counts),
        "bytes": dict(counter.bytes),
        "plan": plan,
        "model": model,
    }


def check(found: dict[str, Any], tolerance: float = 1e-5) -> None:
    worst = max(found["errors"].items(), key=lambda item: item[1])
    assert worst[1] <= tolerance, worst
    assert found["norm"] <= tolerance
    planned = totals(found["plan"]).traffic
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        assert found["counts"].get(kind, 0) == getattr(planned, f"{kind}s"), (kind, found["counts"], planned)
        assert found["bytes"].get(kind, 0) == getattr(planned, f"{kind}_bytes"), (kind, found["bytes"], planned)


@pytest.mark.parametrize(("layout", "world"), LAYOUTS, ids=lambda value: str(value).replace(" ", "-"))
@pytest.mark.parametrize("family", ["plain", "llama"])
def test_gradients_and_collectives_equal_one_process_and_the_plan(family: str, layout: Layout, world: int) -> None:
    def on_rank(rank: int) -> None:
        for policy in POLICIES:
            for microbatches in (1, 4):
                options = ParallelOptions(param_dtype="float32", sync=policy, microbatches=microbatches)
                check(step(family, layout, options, world, rank))

    run_ranks(on_rank, world)


def test_collectives_of_the_issue() -> None:
    """Five units, four microbatches: 5 and 5 with ``defer``; every peer makes 44 to 52 all-gathers."""

    def on_rank(rank: int) -> dict[str, tuple[int, int]]:
        found = {}
        for policy in POLICIES:
            for microbatches in (1, 4):
                options = ParallelOptions(param_dtype="float32", sync=policy, microbatches=microbatches)
                counts = step("plain", Layout(), options, 2, rank)["counts"]
                found[f"{policy} {microbatches}"] = (counts["all_gather"], counts["reduce_scatter"])
        return found

    assert run_ranks(on_rank, 2)[0] == {
        "defer 1": (5, 5),
        "defer 4": (5, 5),
        "reshard_each 1": (8, 5),  # the last block and the root keep their parameters between forward and backward
        "reshard_each 4": (32, 5),
        "reduce_each 1": (8, 5),
        "reduce_each 4": (32, 20),
    }


def test_every_family_and_uneven_shards() -> None:
    def on_rank(rank: int) -> None:
        for family in FAMILIES:
            for layout in (Layout(), Layout(dp_replicate=2)):
                options = ParallelOptions(param_dtype="float32", sync="defer", microbatches=2)
                check(step(family, layout, options, 4, rank))
        for world_layout in (Layout(), Layout(dp_replicate=2)):
            check(step("plain", world_layout, ParallelOptions(param_dtype="float32"), 4, rank, vocab=29, width=6))

    run_ranks(on_rank, 4)


def test_policies_by_unit_frozen_parameters_and_all_reduce_each() -> None:
    def on_rank(rank: int) -> None:
        mixed = {"blocks.0": "reduce_each", "blocks.1": "reshard_each"}
        for options in (
            ParallelOptions(param_dtype="float32", microbatches=3, sync_units=mixed),
            ParallelOptions(param_dtype="float32", microbatches=3, sync="reduce_each", all_reduce_once=False),
            ParallelOptions(param_dtype="float32", microbatches=2, freeze=("embed.*", "blocks.0.**", "blocks.1.**")),
            ParallelOptions(param_dtype="float32", microbatches=2, sync="reduce_each", freeze=("embed.*", "blocks.0.**")),
            ParallelOptions(param_dtype="float32", microbatches=2, sync="reduce_each", freeze=("head.*", "blocks.3.**")),
            ParallelOptions(param_dtype="float32", microbatches=2, sync="reduce_each", reshard_after_forward=False),
        ):
            for layout in (Layout(), Layout(dp_replicate=2), Layout(dp_replicate=4)):
                check(step("plain", layout, options, 4, rank))

    run_ranks(on_rank, 4)


def test_bf16_compute_with_fp32_reduction() -> None:
    """In bf16 the arithmetic itself errs; the gradient may differ by that much and no more, and is kept in fp32."""

    def on_rank(rank: int) -> None:
        for layout in (Layout(), Layout(dp_replicate=2), Layout(dp_replicate=4)):
            for policy in POLICIES:
                found = step("llama", layout, ParallelOptions(sync=policy, microbatches=2), 4, rank)
                assert max(found["errors"].values()) < 5e-2, found["errors"]
                assert min(max(found["errors"].values()), 1) > 1e-5  # it did compute in bf16
                planned = totals(found["plan"]).traffic
                assert found["bytes"].get("all_gather", 0) == planned.all_gather_bytes
                assert found["bytes"].get("reduce_scatter", 0) == planned.reduce_scatter_bytes
                assert {p.grad.dtype for p in found["model"].parameters()} == {torch.float32}

    run_ranks(on_rank, 4)


def test_mean_reduction_is_the_average_over_data_ranks() -> None:
    def on_rank(rank: int) -> None:
        for layout in (Layout(), Layout(dp_replicate=2)):
            for mode, factor in (("sum", 1.0), ("mean", 4.0)):
                options = ParallelOptions(param_dtype="float32", gradient_reduction=mode)
                model = step("plain", layout, options, 4, rank)["model"]
                expected = reference("plain", batches(4), set())
                for name, parameter in model.named_parameters():
                    torch.testing.assert_close(whole(parameter.grad) * factor, expected[name], rtol=1e-4, atol=1e-7)

    run_ranks(on_rank, 4)

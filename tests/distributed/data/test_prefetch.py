"""Explicit prefetching: the same gradients and collectives, and as many units gathered at once as the plan says."""

from io import StringIO
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from meshwright.distributed.comm_counter import CommCounter
from meshwright.distributed.conductor import parallelize
from meshwright.distributed.data.fsdp_units import fsdp_units
from meshwright.distributed.data.grad_sync import GradSync
from meshwright.distributed.mesh import build_mesh
from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.plan.axes.data.prefetch import layer_groups, prefetch_targets
from meshwright.plan.cost.price import totals
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.given.spec import ParallelSpec, UnitRule
from meshwright.plan.resolver import resolve
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.plan.show.explain import explain
from tests.distributed.tensor.test_bytes import holds
from tests.harness import run_ranks
from tests.tiny import PLAIN_SPEC, Plain, batches, make, summed_loss, whole

NESTED = ParallelSpec("plain", layers=("blocks.*",), units=(UnitRule("blocks.*.2"), UnitRule("norm")))


def planned(spec: ParallelSpec = PLAIN_SPEC, layout: Layout | None = None, **options: Any) -> ShardingPlan:
    model, _ = make("plain", meta=True, blocks=6)
    return resolve(spec, model, layout or Layout(), ParallelOptions(**options), world_size=2)


def step(plan: ShardingPlan) -> tuple[list[torch.Tensor], dict[str, int], int]:
    """Gradients and collectives of a step, and the most bytes that were gathered at once."""
    model, _ = make("plain", blocks=6)
    parallelize(model, plan, build_mesh(plan.layout, "cpu"))
    units = fsdp_units(model)
    gathered = {unit.name: 0 for unit in plan.units}
    for row in plan.parameters:
        gathered[row.unit] += row.gathered_bytes
    peak = 0

    def look(*_: object) -> None:
        nonlocal peak
        peak = max(peak, sum(gathered[name] for name, unit in units.items() if holds(unit)))

    for block in model.blocks:
        block[0].register_forward_hook(look)
        block[2].register_full_backward_hook(look)
    with CommCounter() as counter:
        for _, batch in GradSync.from_plan(model, plan).microbatches(batches(plan.options.microbatches)):
            summed_loss(model, batch).backward()
    assert not any(holds(unit) for unit in units.values())
    return [whole(p.grad) for p in model.parameters() if p.grad is not None], dict(counter.counts), peak


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["none", "full", "submodule"])
@pytest.mark.parametrize("sync", ["reduce_each", "reshard_each"])
def test_gradients_and_collectives_stay_and_the_units_gathered_at_once_are_those_of_the_plan(sync: str, mode: str) -> None:
    def on_rank(rank: int) -> None:
        common = {"param_dtype": "float32", "sync": sync, "microbatches": 2, "activation_checkpointing": mode}
        gradients, counts, _ = step(planned(**common))
        for forward, backward in product((None, 1, 2, 5, 9), (None, 0, 1, 3, 9)):
            plan = planned(prefetch_forward=forward, prefetch_backward=backward, **common)
            found, its_counts, peak = step(plan)
            where = (forward, backward)
            assert its_counts == counts, where
            assert counts["all_gather"] == totals(plan).traffic.all_gathers
            assert all(one.equal(other) for one, other in zip(found, gradients, strict=True)), where
            price = totals(plan).gathered_peak_bytes
            if where == (None, 0):  # the one ahead in forward is a matter of streams, and no state of a unit
                assert peak == price - totals(plan).largest_unit_bytes
            else:
                assert peak == price, where

    run_ranks(on_rank, 2)


def test_each_layer_ahead_costs_a_layer() -> None:
    sizes = [totals(planned(sync="reduce_each", prefetch_forward=n)).gathered_peak_bytes for n in (1, 2, 3, 4, 5, 9)]
    layer = sum(row.gathered_bytes for row in planned().parameters if row.unit == "blocks.0")
    assert [after - before for before, after in pairwise(sizes)] == [layer] * 4 + [0]
    plan = planned(sync="reduce_each")
    assert totals(plan).gathered_peak_bytes == sizes[0]
    assert totals(planned()).gathered_peak_bytes == sum(row.gathered_bytes for row in plan.parameters)  # defer


@pytest.mark.thorough
def test_units_inside_and_beside_layers() -> None:
    """A turn is a layer with what is in it, or a unit beside the layers."""
    plan = planned(NESTED, sync="reduce_each", prefetch_forward=1, prefetch_backward=1)
    assert [[unit.name for unit in turn] for turn in layer_groups(plan.shared).turns] == [
        *([f"blocks.{index}", f"blocks.{index}.2"] for index in range(6)),
        ["norm"],
    ]
    forward, backward = prefetch_targets(plan)
    assert forward[""] == ("blocks.0", "blocks.0.2")
    assert forward["blocks.5"] == ("norm",)
    assert "norm" not in forward
    assert "blocks.0.2" not in forward
    assert backward[""] == ("norm",)
    assert backward["norm"] == ("blocks.5.2", "blocks.5")
    assert backward["blocks.0"] == ("blocks.0",)
    assert backward["blocks.3.2"] == ("blocks.3.2",)

    def on_rank(rank: int) -> None:
        common = {"param_dtype": "float32", "sync": "reduce_each", "activation_checkpointing": "full"}
        gradients, _, _ = step(planned(NESTED, **common))
        for forward, backward in product((None, 1, 2), (None, 0, 1, 2)):
            plan = planned(NESTED, prefetch_forward=forward, prefetch_backward=backward, **common)
            found, counts, peak = step(plan)
            assert counts["all_gather"] == totals(plan).traffic.all_gathers, (forward, backward)
            assert all(one.equal(other) for one, other in zip(found, gradients, strict=True))
            assert peak <= totals(plan).gathered_peak_bytes

    run_ranks(on_rank, 2)


def test_what_no_gradient_flows_through_is_not_gathered_in_backward() -> None:
    """FSDP2 itself gathers one unit too many."""

    def on_rank(rank: int) -> list[int]:
        found = []
        for backward in (None, 0, 2):
            freeze = ("embed.*", "blocks.0.**", "blocks.1.**")
            plan = planned(sync="reduce_each", param_dtype="float32", freeze=freeze, prefetch_backward=backward)
            _, counts, _ = step(plan)
            assert counts["all_gather"] == totals(plan).traffic.all_gathers
            found.append(counts["all_gather"])
        return found

    assert run_ranks(on_rank, 2)[0] == [11, 10, 10]


class Skipping(Plain):
    """Leaves a block out where it is told to."""

    skipped: int | None = None

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for index, block in enumerate(self.blocks):
            if index != self.skipped:
                hidden = hidden + block(hidden)
        return self.head(self.norm(hidden))


def test_a_layer_that_was_gathered_ahead_and_left_out_has_its_new_weights_the_next_time() -> None:
    def on_rank(rank: int) -> None:
        torch.manual_seed(0)
        model = Skipping()
        torch.manual_seed(0)
        alone = Skipping()
        options = ParallelOptions(param_dtype="float32", sync="reduce_each", prefetch_forward=2, prefetch_backward=2)
        plan = resolve(PLAIN_SPEC, model, Layout(), options, world_size=2)
        parallelize(model, plan, build_mesh(plan.layout, "cpu"))
        sync = GradSync.from_plan(model, plan)
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, alone)]
        for skipped in (None, 2, None, 3, None):
            model.skipped = alone.skipped = skipped
            with sync.forward_only(), torch.no_grad():
                summed_loss(model, batches(1)[0])
            assert not any(holds(unit) for unit in fsdp_units(model).values())
            for _, batch in sync.microbatches(batches(1)):
                loss = summed_loss(model, batch)
                loss.backward()
            expected = summed_loss(alone, batches(1)[0])
            (2 * expected).backward()  # both ranks had the batch
            torch.testing.assert_close(loss, expected)
            assert not any(holds(unit) for unit in fsdp_units(model).values())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    run_ranks(on_rank, 2)


def test_prefetching_that_has_nothing_to_do_is_refused() -> None:
    def problems(**options: Any) -> tuple[str, ...]:
        with pytest.raises(PlanError) as error:
            planned(**options)
        return error.value.problems

    assert problems(prefetch_forward=0, prefetch_backward=-1) == (
        "prefetch_forward=0: must be at least 1; FSDP2 cannot be kept from running ahead",
        "prefetch_backward=-1: must be at least 0",
    )
    assert "sync=defer: nothing is gathered in backward" in problems(prefetch_backward=1, sync="defer")[0]
    assert "reshard_after_forward=False leaves nothing" in problems(prefetch_backward=1, reshard_after_forward=False)[0]
    replicas = problems(prefetch_forward=2, prefetch_backward=1, layout=Layout(dp_replicate=2))
    assert [line.split(":")[0] for line in replicas] == ["prefetch_forward=2", "prefetch_backward=1"]
    assert {unit.sync for unit in planned(prefetch_backward=1).units} == {
        "reduce_each"
    }  # sync=null: gathering anew is asked for
    assert {unit.sync for unit in planned(prefetch_forward=1).units} == {"defer"}


def test_the_plan_says_how_far_ahead() -> None:
    console = Console(width=160, record=True, file=StringIO())
    console.print(explain(planned(sync="reduce_each", prefetch_forward=3, prefetch_backward=0), parameters=False))
    assert "3 ahead in forward, 0 ahead in backward" in console.export_text()


def test_a_model_of_transformers_with_recomputation() -> None:
    def on_rank(rank: int) -> None:
        results: list[tuple[int, list[torch.Tensor]]] = []
        for chosen in ({}, {"prefetch_forward": 2, "prefetch_backward": 2}):
            model, spec = make("llama", num_hidden_layers=4)
            options = ParallelOptions(param_dtype="float32", sync="reduce_each", activation_checkpointing="selective", **chosen)
            plan = resolve(spec, model, Layout(), options, world_size=2)
            parallelize(model, plan, build_mesh(plan.layout, "cpu"))
            with CommCounter() as counter:
                for _, batch in GradSync.from_plan(model, plan).microbatches(batches(1)):
                    summed_loss(model, batch).backward()
            results.append((counter.counts["all_gather"], [whole(p.grad) for p in _parameters(model)]))
        (count, gradients), (its_count, found) = results
        assert count == its_count == 8
        assert all(one.equal(other) for one, other in zip(gradients, found, strict=True))

    run_ranks(on_rank, 2)


def _parameters(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())

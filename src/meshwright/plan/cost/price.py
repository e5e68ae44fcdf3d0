"""What a plan costs a rank: stored bytes, and collectives and bytes of one optimizer step. Plain arithmetic over its rows."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.plan.axes.data.prefetch import gathered_peak
from meshwright.plan.axes.data.unit_traffic import UnitTraffic, gradient_peak, unit_traffic, use_traffic
from meshwright.plan.axes.pipeline.replay import receive_buffer_bytes
from meshwright.plan.axes.pipeline.stage_plan import parts_of_rank
from meshwright.plan.axes.pipeline.stage_rows import rows_on_stages
from meshwright.plan.cost.alike_ranks import alike_rank
from meshwright.plan.result.plan_rows import PlanRows
from meshwright.plan.result.rows import UnitRow
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.plan.update.states import state_bytes

__all__ = [
    "Totals",
    "fullest_rank",
    "priced_json",
    "totals",
    "totals_of_rank",
]


@dataclass(frozen=True)
class Totals:
    """What the rank that stores the most stores and communicates. All sizes are in bytes unless stated otherwise.

    Attributes:
        parameters: number of elements of the whole model; a tied parameter counts once.
        trainable: number of those that have a gradient.
        parameter_bytes: its shards of the parameters, as stored.
        gradient_bytes: its shards of the gradients.
        optimizer_bytes: its shards of the optimizer's state.
        largest_unit: name of the unit with the most gathered bytes.
        largest_unit_bytes: gathered bytes of that unit.
        gathered_peak_bytes: gathered parameters held at once at the peak (see :mod:`meshwright.plan.axes.data.prefetch`).
        unsharded_gradient_peak_bytes: unsharded gradients held at the peak.
        receive_buffer_bytes: buffers for hidden states and gradients of other stages, of all microbatches of a run; 0 if the
            number of tokens is unknown.
        traffic: collectives over the data axes in one optimizer step, under the sync policies of the units.
    """

    parameters: int
    trainable: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    largest_unit: str
    largest_unit_bytes: int
    gathered_peak_bytes: int
    unsharded_gradient_peak_bytes: int
    receive_buffer_bytes: int
    traffic: UnitTraffic

    @property
    def stored_bytes(self) -> int:
        """Its shards together."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def totals(plan: ShardingPlan) -> Totals:
    """Add up a plan, for the rank of `pp` that stores the most."""
    return totals_of_rank(plan, fullest_rank(plan))


def fullest_rank(plan: ShardingPlan) -> int:
    """Return the rank of `pp` that stores the most."""
    return plan.once(_fullest_rank)


def _fullest_rank(plan: ShardingPlan) -> int:
    if not plan.stages:
        return 0
    ranks = dict.fromkeys(alike_rank(plan, rank) for rank in range(plan.layout.size("pp")))
    return max(ranks, key=lambda rank: totals_of_rank(plan, rank).stored_bytes)


def priced_json(plan: ShardingPlan, more: Mapping[str, Any] | None = None) -> str:
    """Return the whole plan, its totals, and what else is known of the run, as JSON text."""
    return json.dumps({**plan.to_dict(), "totals": asdict(totals(plan)), **(more or {})}, indent=1)


def totals_of_rank(plan: ShardingPlan, rank: int) -> Totals:
    """Add up the stages of a rank of `pp`."""
    return plan.once(_totals_of_rank, rank)


def _totals_of_rank(plan: ShardingPlan, rank: int) -> Totals:
    stages = [rows_on_stages(plan, own) for own in parts_of_rank(plan, rank)]
    largest, index = max((stage.shared.once(_largest_unit)[0], -index) for index, stage in enumerate(stages))
    traffic = [unit_traffic(stage, unit) for stage in stages for unit in stage.units]
    return Totals(
        parameters=plan.numbers[0],
        trainable=plan.numbers[1],
        parameter_bytes=sum(stage.shared.ways.parameter_bytes for stage in stages),
        gradient_bytes=sum(stage.shared.ways.gradient_bytes for stage in stages),
        optimizer_bytes=sum(number * state_bytes(plan, row) for stage in stages for row, number in stage.shared.ways),
        largest_unit=stages[-index].shared.once(_largest_unit)[1].label,
        largest_unit_bytes=largest,
        gathered_peak_bytes=sum(map(gathered_peak, stages)),
        unsharded_gradient_peak_bytes=sum(map(gradient_peak, stages)),
        receive_buffer_bytes=receive_buffer_bytes(plan, rank),
        traffic=UnitTraffic(
            *(_total([*traffic, *map(use_traffic, stages)], name) for name in UnitTraffic.__dataclass_fields__)
        ),
    )


def _largest_unit(rows: PlanRows) -> tuple[int, UnitRow]:
    """Return the most bytes that a unit gathers, and the unit."""
    sizes = [rows.ways_of(unit).gathered_bytes if unit.forwards and not unit.part_of else 0 for unit in rows.units]
    return max(sizes), rows.units[sizes.index(max(sizes))]


def _total(traffic: Iterable[UnitTraffic], name: str) -> int:
    return sum(getattr(item, name) for item in traffic)

"""What a plan costs a rank: stored bytes, and collectives and bytes of one optimizer step. Plain arithmetic over its rows."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from meshwright.plan.moves import Move
from meshwright.plan.options import SyncPolicy
from meshwright.plan.prefetch import gathered_peak, turns
from meshwright.plan.sharding_plan import ParameterRow, ShardingPlan, UnitRow, shard_axis

__all__ = ["Totals", "UnitTraffic", "priced_json", "tensor_parallel_counts", "totals", "unit_traffic", "use_traffic"]

ADAMW_STATES = 2
"""Number of tensors that AdamW keeps for a parameter (both moments), in the dtype and placement of the parameter."""


@dataclass(frozen=True)
class UnitTraffic:
    """The collectives of one unit in one optimizer step, on one rank. Bytes are of the larger buffer of each call."""

    all_gathers: int = 0
    all_gather_bytes: int = 0
    reduce_scatters: int = 0
    reduce_scatter_bytes: int = 0
    all_reduces: int = 0
    all_reduce_bytes: int = 0


@dataclass(frozen=True)
class Totals:
    """What the rank that stores the most stores and communicates. All sizes are in bytes unless stated otherwise.

    Attributes:
        parameters: number of elements of the whole model; a tied parameter counts once.
        trainable: number of those that have a gradient.
        parameter_bytes: its shards of the parameters, as stored.
        gradient_bytes: its shards of the gradients.
        optimizer_bytes: its shards of AdamW's state.
        largest_unit: name of the unit with the most gathered bytes.
        largest_unit_bytes: gathered bytes of that unit.
        gathered_peak_bytes: gathered parameters held at once at the peak (see :mod:`meshwright.plan.prefetch`).
        unsharded_gradient_peak_bytes: unsharded gradients held at the peak.
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
    traffic: UnitTraffic


def unit_traffic(plan: ShardingPlan, unit: UnitRow, stage: int | None = None) -> UnitTraffic:
    """Return the collectives of a unit in one optimizer step; if a stage is given, only for the parameters of that stage."""
    layout, microbatches = plan.layout, plan.options.microbatches
    if unit.part_of:
        return UnitTraffic()
    shards, replicas = layout.size(shard_axis(layout, unit.kind)), layout.size("dp_replicate")
    gathered, reduced = _unit_bytes(plan, unit, stage)
    gathers = 0
    if shards > 1 and gathered:
        once = unit.sync is SyncPolicy.DEFER
        parts = plan.parts(unit)
        forwards, backwards = sum(part.forwards for part in parts), len(parts) if unit.gathers_in_backward else 0
        # If it stays gathered after forward, its first backward does not gather it again.
        once = once and forwards > 0
        again = 0 if not forwards else forwards + backwards if unit.reshard_after_forward else 1 + max(0, backwards - 1)
        gathers = 1 if once else microbatches * again
    reductions = (microbatches if unit.sync is SyncPolicy.REDUCE_EACH else 1) if reduced else 0
    scatters = reductions if shards > 1 else 0
    all_reduces = 0
    if replicas > 1:
        all_reduces = min(reductions, 1) if plan.options.all_reduce_once else reductions
    return UnitTraffic(gathers, gathers * gathered, scatters, scatters * reduced, all_reduces, all_reduces * reduced // shards)


MOVED = {
    Move.ENTER: (None, "all_reduce"),
    Move.LEAVE: ("all_reduce", None),
    Move.GATHER_FEATURES: ("all_gather", None),
    Move.SPLIT_FEATURES: (None, "all_gather"),
    Move.EXCHANGE_FEATURES: ("all_to_all", "all_to_all"),
    Move.GATHER_SEQUENCE: ("all_gather", "reduce_scatter"),
    Move.GATHER_SEQUENCE_WHOLE: ("all_gather", None),
    Move.SPLIT_SEQUENCE: (None, "all_gather"),
    Move.SCATTER_SEQUENCE: ("reduce_scatter", "all_gather"),
}
"""The collective of each move in forward, and in backward."""

LOSS_PARALLEL = 2
"""Number of all-reduces of a cross-entropy over a sharded vocabulary: one for the largest logit, then one for sums."""


def tensor_parallel_counts(plan: ShardingPlan) -> Counter[str]:
    """Return the collectives over ``tp`` of one optimizer step on one rank, by kind. Their bytes depend on the batch.

    The counts assume that everything is trained and nothing is recomputed. A module that no gradient flows through has fewer
    collectives, recomputation has more.
    """
    counts: Counter[str] = Counter()
    for row in plan.tensor_parallel:
        forwards = plan.forwards(row.module)
        # Two tensors enter experts: the hidden state and the weights of the routing.
        for move, times in ((row.entry, 2 if row.style == "moe_tp_experts" else 1), (row.exit, 1)):
            forward, backward = MOVED.get(move, (None, None))
            counts[forward or ""] += times * forwards
            counts[backward or ""] += times
        counts["all_reduce"] += len(row.sums) + (LOSS_PARALLEL if row.exit is Move.VOCABULARY else 0)
    return Counter({kind: count * plan.options.microbatches for kind, count in counts.items() if kind and count})


def use_traffic(plan: ShardingPlan, stage: int) -> UnitTraffic:
    """Return the traffic of the flags of use: one all-reduce at the end of a step.

    It tells which trainable parameters were used: a number of eight bytes for each, and two for the order in which units ran.
    """
    if not plan.flags_of_use:
        return UnitTraffic()
    trainable = sum(row.trainable for row in plan.parameters if row.stage == stage)
    return UnitTraffic(all_reduces=1, all_reduce_bytes=8 * (trainable + 2))


def totals(plan: ShardingPlan) -> Totals:
    """Add up a plan, for the pipeline stage that stores the most."""
    stages = range(plan.layout.size("pp"))
    return max((_stage_totals(plan, stage) for stage in stages), key=lambda stage_totals: stage_totals.parameter_bytes)


def priced_json(plan: ShardingPlan) -> str:
    """Return the whole plan and its totals as JSON text."""
    return json.dumps({**plan.to_dict(), "totals": asdict(totals(plan))}, indent=1)


def _stage_totals(plan: ShardingPlan, stage: int) -> Totals:
    rows = [row for row in plan.parameters if row.stage == stage]
    gathered = {unit.name: 0 if unit.part_of or not unit.forwards else _unit_bytes(plan, unit, stage)[0] for unit in plan.units}
    largest_name = max(gathered, key=lambda name: gathered[name])
    traffic = [unit_traffic(plan, unit, stage) for unit in plan.units]
    return Totals(
        parameters=sum(row.numel for row in plan.parameters),
        trainable=sum(row.numel for row in plan.parameters if row.trainable),
        parameter_bytes=sum(row.bytes_per_rank for row in rows),
        gradient_bytes=sum(row.bytes_per_rank for row in rows if row.trainable),
        optimizer_bytes=ADAMW_STATES * sum(row.bytes_per_rank for row in rows if row.trainable),
        largest_unit=plan.unit(largest_name).label,
        largest_unit_bytes=gathered[largest_name],
        gathered_peak_bytes=gathered_peak(plan, gathered),
        unsharded_gradient_peak_bytes=_gradient_peak(plan, rows),
        traffic=UnitTraffic(*(_total([*traffic, use_traffic(plan, stage)], name) for name in UnitTraffic.__dataclass_fields__)),
    )


def _gradient_peak(plan: ShardingPlan, rows: Sequence[ParameterRow]) -> int:
    """Return the peak bytes of unsharded gradients that are computed and not reduced yet.

    It is what waits through all of backward, and the largest of what exists for a moment on top of it.
    """
    trained = [row for row in rows if row.trainable]
    parts = turns(plan)
    units = {unit.name: unit for unit in plan.fsdp_units}
    first_layer = next((index for index, row in enumerate(trained) if units[row.unit].kind == "layer"), 0)
    waiting = 0  # held through all of backward
    last = 0  # computed after all others, and reduced together with `waiting`
    doubled = 0  # computed in several parts: the sum, the next part and their new sum exist at once
    written: dict[str, int] = {}  # by unit, for units that reduce right after their own backward
    for index, row in enumerate(trained):
        around = units[row.unit] in parts.around
        shared = len(plan.parts(units[row.unit])) > 1
        if row.aliases and not any(unit.twin_of and unit.twin_of == row.unit for unit in plan.units):
            doubled = max(doubled, 2 * row.gathered_bytes)
        copies = [unit for unit in plan.fsdp_units if (unit.twin_of or unit.name) == row.unit and unit.forwards]
        for unit in copies:
            accumulated = plan.options.microbatches > 1 and unit.sync is not SyncPolicy.REDUCE_EACH
            waiting += row.reduced_bytes if accumulated else 0  # in the dtype of reduction
            if shared:  # one gradient, which is complete after both passes
                waiting += row.gathered_bytes
            elif accumulated and row.reduced_bytes == row.gathered_bytes:  # added to those of earlier microbatches at once
                doubled = max(doubled, row.gathered_bytes)
            elif around and index < first_layer and not row.aliases:
                last += row.gathered_bytes
            elif around:  # reduced at the end of backward
                waiting += row.gathered_bytes
            else:
                written[unit.name] = written.get(unit.name, 0) + row.gathered_bytes
    of_turns = max((sum(written.get(unit.name, 0) for unit in turn) for turn in parts.turns), default=0)
    return waiting + max(last, doubled, of_turns)


def _unit_bytes(plan: ShardingPlan, unit: UnitRow, stage: int | None) -> tuple[int, int]:
    """Return the gathered and the reduced bytes of a unit."""
    rows = [row for row in plan.rows(unit) if stage in (None, row.stage)]
    return sum(row.gathered_bytes for row in rows), sum(row.reduced_bytes for row in rows)


def _total(traffic: Iterable[UnitTraffic], name: str) -> int:
    return sum(getattr(item, name) for item in traffic)

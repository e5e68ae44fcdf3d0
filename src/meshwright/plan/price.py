"""What a plan costs a rank: stored bytes, and collectives and bytes of one optimizer step. Plain arithmetic over its rows."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.plan.moves import Move
from meshwright.plan.options import SyncPolicy
from meshwright.plan.pipeline import crossing_bytes, on_stages, stages_of_rank
from meshwright.plan.prefetch import gathered_peak, turns
from meshwright.plan.schedule import receive_buffers
from meshwright.plan.sharding_plan import ParameterRow, ShardingPlan, UnitRow, shard_axis

__all__ = [
    "Totals",
    "UnitTraffic",
    "fullest_rank",
    "priced_json",
    "tensor_parallel_counts",
    "totals",
    "totals_of_rank",
    "unit_traffic",
    "use_traffic",
]

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


def unit_traffic(plan: ShardingPlan, unit: UnitRow) -> UnitTraffic:
    """Return the collectives of a unit in one optimizer step."""
    layout, microbatches = plan.layout, plan.options.microbatches
    if unit.part_of:
        return UnitTraffic()
    shards, replicas = layout.size(shard_axis(layout, unit.kind)), layout.size("dp_replicate")
    gathered, reduced = _unit_bytes(plan, unit)
    gathers = 0
    if shards > 1 and gathered:
        once = unit.sync is SyncPolicy.DEFER
        if not unit.reshard_after_forward and not any(row.trainable for row in plan.parameters):
            once = True  # a stage without a backward, after which it would be resharded
        parts = plan.parts(unit)
        forwards = sum(part.forwards * part.places for part in parts)
        backwards = sum(part.places for part in parts) if unit.gathers_in_backward else 0
        if len(parts) > 1 and not _gets_gradient(plan, unit):  # it stays gathered from one part's backward to the next
            backwards = min(backwards, 1)
        # If it stays gathered after forward, its first backward does not gather it again.
        once = once and forwards > 0
        again = 0 if not forwards else forwards + backwards if unit.reshard_after_forward else 1 + max(0, backwards - 1)
        gathers = 1 if once else microbatches * again
    runs = any(part.forwards for part in plan.parts(unit))
    reductions = (microbatches if unit.sync is SyncPolicy.REDUCE_EACH else 1) if reduced and runs else 0
    scatters = reductions if shards > 1 else 0
    all_reduces = 0
    if replicas > 1:
        all_reduces = min(reductions, 1) if plan.options.all_reduce_once else reductions
    return UnitTraffic(gathers, gathers * gathered, scatters, scatters * reduced, all_reduces, all_reduces * reduced // shards)


def _gets_gradient(plan: ShardingPlan, unit: UnitRow) -> bool:
    """Return whether the input of a unit has a gradient, so that FSDP2 reshards it after its backward.

    It has one if something before it is trained. The root has what comes before every stack of layers.
    """
    first = next((index for index, row in enumerate(plan.parameters) if row.unit == unit.name), 0)
    return any(row.trainable and (index < first or not row.unit) for index, row in enumerate(plan.parameters))


MOVED = {
    Move.ENTER: (None, "all_reduce"),
    Move.ENTER_LAST: (None, "all_reduce"),
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
        chunks = plan.loss.chunks if plan.loss is not None and plan.loss.module == row.module else 1
        forwards, backwards = (runs * chunks for runs in plan.runs(row.module))
        # Two tensors enter experts: the hidden state and the weights of the routing.
        for move, times in ((row.entry, 2 if row.style == "moe_tp_experts" else 1), (row.exit, 1)):
            forward, backward = MOVED.get(move, (None, None))
            counts[forward or ""] += times * forwards
            counts[backward or ""] += times * backwards
        counts["all_reduce"] += forwards if row.style == "dora_columns" else 0  # the norms of rows
        counts["all_reduce"] += chunks * (len(row.sums) + (LOSS_PARALLEL if row.exit is Move.VOCABULARY else 0))
    return Counter({kind: count * plan.options.microbatches for kind, count in counts.items() if kind and count})


def use_traffic(plan: ShardingPlan) -> UnitTraffic:
    """Return the traffic of the flags of use: one all-reduce at the end of a step.

    It tells which trainable parameters were used: a number of eight bytes for each, and two for the order in which units ran.
    """
    if not plan.flags_of_use:
        return UnitTraffic()
    trainable = sum(row.trainable for row in plan.parameters)
    return UnitTraffic(all_reduces=1, all_reduce_bytes=8 * (trainable + 2))


def totals(plan: ShardingPlan) -> Totals:
    """Add up a plan, for the rank of `pp` that stores the most."""
    return totals_of_rank(plan, fullest_rank(plan))


def fullest_rank(plan: ShardingPlan) -> int:
    """Return the rank of `pp` that stores the most."""

    def stored(rank: int) -> int:
        own = set(stages_of_rank(plan, rank))
        tensors = {True: 2 + ADAMW_STATES, False: 1}  # a trained parameter has a gradient and a state
        return sum(tensors[row.trainable] * row.bytes_per_rank * len(own & set(row.stages)) for row in plan.parameters)

    return max(range(plan.layout.size("pp")), key=stored)


def priced_json(plan: ShardingPlan, more: Mapping[str, Any] | None = None) -> str:
    """Return the whole plan, its totals, and what else is known of the run, as JSON text."""
    return json.dumps({**plan.to_dict(), "totals": asdict(totals(plan)), **(more or {})}, indent=1)


def totals_of_rank(plan: ShardingPlan, rank: int) -> Totals:
    """Add up the stages of a rank of `pp`."""
    stages = [on_stages(plan, [stage]) for stage in stages_of_rank(plan, rank)]
    rows = [row for stage in stages for row in stage.parameters]
    gathered = [
        {unit.name: 0 if unit.part_of or not unit.forwards else _unit_bytes(stage, unit)[0] for unit in stage.units}
        for stage in stages
    ]
    largest, index = max((max(sizes.values()), -index) for index, sizes in enumerate(gathered))
    name = next(name for name, size in gathered[-index].items() if size == largest)
    traffic = [unit_traffic(stage, unit) for stage in stages for unit in stage.units]
    return Totals(
        parameters=sum(row.numel for row in plan.parameters),
        trainable=sum(row.numel for row in plan.parameters if row.trainable),
        parameter_bytes=sum(row.bytes_per_rank for row in rows),
        gradient_bytes=sum(row.bytes_per_rank for row in rows if row.trainable),
        optimizer_bytes=ADAMW_STATES * sum(row.bytes_per_rank for row in rows if row.trainable),
        largest_unit=stages[-index].unit(name).label,
        largest_unit_bytes=largest,
        gathered_peak_bytes=sum(gathered_peak(stage, sizes) for stage, sizes in zip(stages, gathered, strict=True)),
        unsharded_gradient_peak_bytes=sum(_gradient_peak(stage, stage.parameters) for stage in stages),
        receive_buffer_bytes=receive_buffers(plan, rank) * crossing_bytes(plan) if plan.stages else 0,
        traffic=UnitTraffic(
            *(_total([*traffic, *map(use_traffic, stages)], name) for name in UnitTraffic.__dataclass_fields__)
        ),
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


def _unit_bytes(plan: ShardingPlan, unit: UnitRow) -> tuple[int, int]:
    """Return the gathered and the reduced bytes of a unit."""
    rows = plan.rows(unit)
    return sum(row.gathered_bytes for row in rows), sum(row.reduced_bytes for row in rows)


def _total(traffic: Iterable[UnitTraffic], name: str) -> int:
    return sum(getattr(item, name) for item in traffic)

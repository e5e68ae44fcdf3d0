"""What data parallel costs: the collectives and bytes of each unit, and the gradients that wait to be reduced."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.plan.axes.data.prefetch import layer_groups
from meshwright.plan.given.closed_choices import SyncPolicy
from meshwright.plan.result.plan_rows import PlanRows
from meshwright.plan.result.sharding_plan import ShardingPlan, UnitRow, shard_axis

__all__ = ["UnitTraffic", "gradient_peak", "gradients_between", "unit_bytes", "unit_traffic", "unshards", "use_traffic"]


@dataclass(frozen=True)
class UnitTraffic:
    """The collectives of one unit in one optimizer step, on one rank. Bytes are of the larger buffer of each call."""

    all_gathers: int = 0
    all_gather_bytes: int = 0
    reduce_scatters: int = 0
    reduce_scatter_bytes: int = 0
    all_reduces: int = 0
    all_reduce_bytes: int = 0


def unit_traffic(plan: ShardingPlan, unit: UnitRow) -> UnitTraffic:
    """Return the collectives of a unit in one optimizer step."""
    return plan.once(_unit_traffic, unit)


def _unit_traffic(plan: ShardingPlan, unit: UnitRow) -> UnitTraffic:
    layout, microbatches = plan.layout, plan.options.microbatches
    if unit.part_of:
        return UnitTraffic()
    shards, replicas = layout.size(shard_axis(layout, unit.kind)), layout.size("dp_replicate")
    gathered, reduced = unit_bytes(plan, unit)
    gathers = unshards(plan, unit) if shards > 1 and gathered else 0
    runs = any(part.forwards for part in plan.parts(unit))
    reductions = (microbatches if unit.sync is SyncPolicy.REDUCE_EACH else 1) if reduced and runs else 0
    scatters = reductions if shards > 1 else 0
    all_reduces = 0
    if replicas > 1:
        all_reduces = min(reductions, 1) if plan.options.all_reduce_once else reductions
    return UnitTraffic(gathers, gathers * gathered, scatters, scatters * reduced, all_reduces, all_reduces * reduced // shards)


def unshards(plan: ShardingPlan, unit: UnitRow) -> int:
    """Return how often FSDP2 unshards a unit in one optimizer step.

    Each is an all-gather if ranks share the unit. With `cpu_offload` each is a copy to the device, shared or not.
    """
    parts = plan.parts(unit)
    forwards = sum(part.forwards * part.places for part in parts)
    if unit.part_of or not forwards:
        return 0
    # A stage without a backward stays unsharded, because a unit is resharded after its backward.
    stays = not unit.reshard_after_forward and not any(row.trainable for row in plan.parameters)
    if stays or unit.sync is SyncPolicy.DEFER:
        return 1
    backwards = sum(part.places for part in parts) if unit.gathers_in_backward else 0
    if len(parts) > 1 and not _gets_gradient(plan, unit):  # it stays unsharded from one part's backward to the next
        backwards = min(backwards, 1)
    # If it stays unsharded after forward, its first backward does not unshard it again.
    return plan.options.microbatches * (forwards + backwards if unit.reshard_after_forward else 1 + max(0, backwards - 1))


def _gets_gradient(plan: ShardingPlan, unit: UnitRow) -> bool:
    """Return whether the input of a unit has a gradient, so that FSDP2 reshards it after its backward.

    It has one if something before it is trained. The root has what comes before every stack of layers.
    """
    first = next((index for index, row in enumerate(plan.parameters) if row.unit == unit.name), 0)
    return any(row.trainable and (index < first or not row.unit) for index, row in enumerate(plan.parameters))


def use_traffic(plan: ShardingPlan) -> UnitTraffic:
    """Return the traffic of the flags of use: one all-reduce at the end of a step.

    It tells which trainable parameters were used: a number of eight bytes for each, and two for the order in which units ran.
    """
    if not plan.flags_of_use:
        return UnitTraffic()
    trainable = sum(row.trainable for row in plan.parameters)
    return UnitTraffic(all_reduces=1, all_reduce_bytes=8 * (trainable + 2))


def gradient_peak(plan: ShardingPlan) -> int:
    """Return the peak bytes of unsharded gradients that are computed and not reduced yet.

    It is what waits through all of backward, and the largest of what exists for a moment on top of it.
    """
    return plan.shared.once(_gradient_peak, plan.options.microbatches > 1)


def _gradient_peak(rows: PlanRows, several: bool) -> int:
    parts = layer_groups(rows)
    holders = {unit.name for unit in parts.around}
    units = {unit.name: unit for unit in rows.fsdp_units}
    twins = {unit.twin_of for unit in rows.units if unit.twin_of}
    before = _before_layers(rows, units)
    # Computed in several parts: the sum, the next part and their new sum exist at once.
    named = (rows.parameters[place] for place in rows.arrangement.tied)
    tied = (row for row in named if row.aliases and row.trainable and row.unit not in twins)
    doubled = max((2 * row.gathered_bytes for row in tied), default=0)
    waiting = 0  # held through all of backward
    last = 0  # computed after all others, and reduced together with `waiting`
    written: dict[str, int] = {}  # by unit, for units that reduce right after their own backward
    for name, copies in _copies(rows).items():
        in_holder, shared = name in holders, len(rows.parts(units[name])) > 1
        own = [(row, 1) for row in rows.rows(units[name])] if in_holder else rows.ways_of(units[name])
        trained = [(row, number) for row, number in own if row.trainable]
        for unit in copies:
            accumulated = _accumulates(unit, several)
            for row, number in trained:
                gathered = number * row.gathered_bytes
                waiting += number * row.reduced_bytes if accumulated else 0  # in the dtype of reduction
                if shared:  # one gradient, which is complete after both passes
                    waiting += gathered
                elif accumulated and row.reduced_bytes == row.gathered_bytes:  # added to those of earlier microbatches at once
                    doubled = max(doubled, row.gathered_bytes)
                elif not in_holder:
                    written[unit.name] = written.get(unit.name, 0) + gathered
                elif row.name in before and not row.aliases:
                    last += gathered
                else:  # reduced at the end of backward
                    waiting += gathered
    largest_group = max((sum(written.get(unit.name, 0) for unit in turn) for turn in parts.turns), default=0)
    return waiting + max(last, doubled, largest_group)


def _before_layers(rows: PlanRows, units: Mapping[str, UnitRow]) -> set[str]:
    """Return the names of the parameters before the first trained one of a layer; none if no layer has one."""
    before: set[str] = set()
    for row in rows.parameters:
        if row.trainable and units[row.unit].kind == "layer":
            return before
        before.add(row.name)
    return set()


def gradients_between(plan: ShardingPlan) -> tuple[int, int]:
    """Return the bytes of gradients that a rank holds between two microbatches: unsharded ones, and shards."""
    return plan.shared.once(_gradients_between, plan.options.microbatches > 1)


def _gradients_between(rows: PlanRows, several: bool) -> tuple[int, int]:
    copies, unsharded, shards = _copies(rows), 0, 0
    for name, own in rows.ways_of_units.items():
        accumulating = [_accumulates(unit, several) for unit in copies.get(name, ())]
        unsharded += sum(accumulating) * own.reduced_bytes
        shards += 0 if all(accumulating) else own.gradient_bytes
    return unsharded, shards


def _copies(rows: PlanRows) -> dict[str, list[UnitRow]]:
    """Return the units that gather the parameters of each unit: itself, and the second of twins."""
    copies: dict[str, list[UnitRow]] = {}
    for unit in rows.fsdp_units:
        if unit.forwards:
            copies.setdefault(unit.twin_of or unit.name, []).append(unit)
    return copies


def _accumulates(unit: UnitRow, several: bool) -> bool:
    """Return whether the gradients of a unit stay unsharded from one microbatch to the next, if there are several."""
    return several and unit.sync is not SyncPolicy.REDUCE_EACH


def unit_bytes(plan: ShardingPlan, unit: UnitRow) -> tuple[int, int]:
    """Return the gathered and the reduced bytes of a unit."""
    rows = plan.shared.ways_of(unit)
    return rows.gathered_bytes, rows.reduced_bytes

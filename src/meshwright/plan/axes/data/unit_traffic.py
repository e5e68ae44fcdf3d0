"""What data parallel costs: the collectives and bytes of each unit, and the gradients that wait to be reduced."""

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.plan.axes.data.prefetch import layer_groups
from meshwright.plan.given.closed_choices import SyncPolicy
from meshwright.plan.result.sharding_plan import ParameterRow, ShardingPlan, UnitRow, shard_axis

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


def gradient_peak(plan: ShardingPlan, rows: Sequence[ParameterRow]) -> int:
    """Return the peak bytes of unsharded gradients that are computed and not reduced yet.

    It is what waits through all of backward, and the largest of what exists for a moment on top of it.
    """
    trained = [row for row in rows if row.trainable]
    parts = layer_groups(plan)
    holders = {unit.name for unit in parts.around}
    units = {unit.name: unit for unit in plan.fsdp_units}
    twins = {unit.twin_of for unit in plan.units if unit.twin_of}
    first_layer = next((index for index, row in enumerate(trained) if units[row.unit].kind == "layer"), 0)
    waiting = 0  # held through all of backward
    last = 0  # computed after all others, and reduced together with `waiting`
    doubled = 0  # computed in several parts: the sum, the next part and their new sum exist at once
    written: dict[str, int] = {}  # by unit, for units that reduce right after their own backward
    copies = {name: [(unit.name, _accumulates(plan, unit)) for unit in gathering] for name, gathering in _copies(plan).items()}
    shared = {name for name, unit in units.items() if len(plan.parts(unit)) > 1}
    for index, row in enumerate(trained):
        if row.aliases and row.unit not in twins:
            doubled = max(doubled, 2 * row.gathered_bytes)
        for name, accumulated in copies.get(row.unit, ()):
            waiting += row.reduced_bytes if accumulated else 0  # in the dtype of reduction
            if row.unit in shared:  # one gradient, which is complete after both passes
                waiting += row.gathered_bytes
            elif accumulated and row.reduced_bytes == row.gathered_bytes:  # added to those of earlier microbatches at once
                doubled = max(doubled, row.gathered_bytes)
            elif row.unit not in holders:
                written[name] = written.get(name, 0) + row.gathered_bytes
            elif index < first_layer and not row.aliases:
                last += row.gathered_bytes
            else:  # reduced at the end of backward
                waiting += row.gathered_bytes
    largest_group = max((sum(written.get(unit.name, 0) for unit in turn) for turn in parts.turns), default=0)
    return waiting + max(last, doubled, largest_group)


def gradients_between(plan: ShardingPlan) -> tuple[int, int]:
    """Return the bytes of gradients that a rank holds between two microbatches: unsharded ones, and shards."""
    copies, unsharded, shards = _copies(plan), 0, 0
    for row in plan.parameters:
        if row.trainable:
            accumulating = [_accumulates(plan, unit) for unit in copies.get(row.unit, ())]
            unsharded += sum(accumulating) * row.reduced_bytes
            shards += 0 if all(accumulating) else row.bytes_per_rank
    return unsharded, shards


def _copies(plan: ShardingPlan) -> dict[str, list[UnitRow]]:
    """Return the units that gather the parameters of each unit: itself, and the second of twins."""
    copies: dict[str, list[UnitRow]] = {}
    for unit in plan.fsdp_units:
        if unit.forwards:
            copies.setdefault(unit.twin_of or unit.name, []).append(unit)
    return copies


def _accumulates(plan: ShardingPlan, unit: UnitRow) -> bool:
    """Return whether the gradients of a unit stay unsharded from one microbatch to the next."""
    return plan.options.microbatches > 1 and unit.sync is not SyncPolicy.REDUCE_EACH


def unit_bytes(plan: ShardingPlan, unit: UnitRow) -> tuple[int, int]:
    """Return the gathered and the reduced bytes of a unit."""
    return plan.once(_unit_bytes, unit)


def _unit_bytes(plan: ShardingPlan, unit: UnitRow) -> tuple[int, int]:
    gathered = reduced = 0
    for row in plan.rows(unit):
        gathered += row.gathered_bytes
        reduced += row.reduced_bytes
    return gathered, reduced

"""Which units are gathered ahead of their use, and how much is gathered at once because of it.

Without options FSDP2 decides. In forward, the all-gather of the next unit overlaps the compute of the current one, because the
CPU runs ahead of the GPU. In backward, each unit starts the all-gather of the unit that finished forward before it. With
`prefetch_forward` and `prefetch_backward`, when a turn begins, its outer unit starts the all-gathers of that many next turns.
The root starts those of the first turns.

A *turn* is a layer, together with the units inside it, or a unit outside the layers. A unit that has layers inside, such as the
root, belongs to no turn: it stays gathered while its layers run.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from meshwright.errors import Problems, Refusal
from meshwright.plan.draft import Draft, Found
from meshwright.plan.given.closed_choices import SyncPolicy
from meshwright.plan.given.names import holder_of, inside
from meshwright.plan.result.plan_rows import PlanRows
from meshwright.plan.result.program import Prefetch
from meshwright.plan.result.sharding_plan import ROOT, ShardingPlan, UnitRow

__all__ = ["LayerGroups", "check_prefetch", "gathered_peak", "layer_groups", "prefetch_actions", "prefetch_targets"]


@dataclass(frozen=True)
class LayerGroups:
    """The units of a plan, grouped by when they compute.

    Attributes:
        around: units that have layers inside; the root is the first.
        turns: the other units, in forward order, grouped by turn; in a turn, the outer unit is first. Idle units have no turn.
    """

    around: tuple[UnitRow, ...]
    turns: tuple[tuple[UnitRow, ...], ...]


def layer_groups(rows: PlanRows) -> LayerGroups:
    """Group the units of a plan into turns."""
    return rows.once(_layer_groups)


def _layer_groups(rows: PlanRows) -> LayerGroups:
    around: list[UnitRow] = []
    groups: list[list[UnitRow]] = []
    holders = {ROOT}
    for layer in rows.layers:
        while (layer := holder_of(layer)) not in holders:
            holders.add(layer)
    for unit in rows.fsdp_units:  # in model order, parents first
        if not unit.forwards:
            continue
        if unit.name in holders:
            around.append(unit)
        elif groups and inside(unit.name, groups[-1][0].name):
            groups[-1].append(unit)
        else:
            groups.append([unit])
    return LayerGroups(tuple(around), tuple(map(tuple, groups)))


def prefetch_targets(plan: ShardingPlan) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """Return, for each unit, the units whose all-gathers it starts in forward, and those in backward, in this order.

    Units that are not named keep FSDP2's default. In backward that default would prefetch, so every unit is named there. A unit
    that should start no other one is given itself, which is gathered by then.
    """
    options, parts = plan.options, layer_groups(plan.shared)
    forward: dict[str, tuple[str, ...]] = {}
    backward: dict[str, tuple[str, ...]] = {}
    if options.prefetch_forward is not None:
        ahead = options.prefetch_forward
        forward[ROOT] = _names(parts.turns[:ahead])
        for index, turn in enumerate(parts.turns):
            forward[turn[0].name] = _names(parts.turns[index + 1 : index + 1 + ahead])
    if (behind := _ahead_in_backward(plan)) is not None:
        order = [[unit for unit in reversed(turn) if unit.gathers_in_backward] for turn in reversed(parts.turns)]
        backward = {unit.name: (unit.name,) for unit in plan.fsdp_units}
        backward[ROOT] = _names(order[:behind]) or (ROOT,)
        for index, turn in enumerate(reversed(parts.turns)):
            backward[turn[0].name] = _names(order[index + 1 : index + 1 + behind]) or (turn[0].name,)
    return {name: names for name, names in forward.items() if names}, backward


def _ahead_in_backward(plan: ShardingPlan) -> int | None:
    """Return how many turns ahead units are gathered in backward; ``None``: FSDP2 decides.

    FSDP2 remembers the latest forward and prefetches the unit before it there. Under a schedule of a pipeline the first of
    several forwards has its backward first, so it would gather units for nothing.
    """
    chosen = plan.options.prefetch_backward
    return 1 if chosen is None and plan.stages else chosen


def _names(turns: Iterable[Sequence[UnitRow]]) -> tuple[str, ...]:
    return tuple(unit.name for turn in turns for unit in turn)


def prefetch_actions(plan: ShardingPlan) -> Iterator[Prefetch]:
    """Yield the prefetching that the options ask for."""
    forward, backward = prefetch_targets(plan)
    for name in dict.fromkeys((*forward, *backward)):
        yield Prefetch(name, forward.get(name, ()), backward.get(name, ()))


def gathered_peak(plan: ShardingPlan) -> int:
    """Return the peak bytes of gathered parameters that a rank holds in a forward and backward."""
    return plan.shared.once(_gathered_peak, plan.options.prefetch_forward, _ahead_in_backward(plan))


def _gathered_peak(rows: PlanRows, before: int | None, behind: int | None) -> int:
    """Find it; ``before`` and ``behind`` say how many turns ahead units are gathered, in forward and in backward."""
    parts = layer_groups(rows)
    order = parts.turns

    def size(units: Iterable[UnitRow]) -> int:
        return sum(rows.ways_of(unit).gathered_bytes for unit in units)

    def ahead(turn: int, step: int, said: int | None) -> Sequence[UnitRow]:
        # By default FSDP2 gathers one unit ahead: the outer unit of a turn, not those inside it.
        if said is None:
            return order[turn + step][:1] if 0 <= turn + step < len(order) else ()
        nearest = order[turn + 1 : turn + 1 + said] if step > 0 else order[max(0, turn - said) : turn]
        return [unit for other in nearest for unit in other]

    # In forward, what stays gathered of earlier turns is held, too. In backward it still is, and so are the deferred units of
    # later turns.
    deferred = [unit for turn in order for unit in turn if unit.sync is SyncPolicy.DEFER]
    stayed, kept = set[UnitRow](), set(deferred)
    stayed_bytes, kept_bytes = 0, size(deferred)
    peak = 0
    for index, turn in enumerate(order):
        peak = max(peak, stayed_bytes + size({*turn, *ahead(index, 1, before)} - stayed))
        peak = max(peak, kept_bytes + size({*turn, *ahead(index, -1, behind)} - kept))
        for unit in turn:
            if unit.sync is SyncPolicy.DEFER or not unit.reshard_after_forward:
                stayed_bytes += size([unit])
                kept_bytes += size({unit} - kept)
                stayed.add(unit)
                kept.add(unit)
    return size(parts.around) + peak


def check_prefetch(draft: Draft) -> Found[None]:
    """Refuse prefetching that would have no effect."""
    options, layout, problems = draft.options, draft.layout, Problems()
    chosen = {"prefetch_forward": options.prefetch_forward, "prefetch_backward": options.prefetch_backward}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    if layout.size("dp_shard_cp") == 1 and layout.replicated:
        problems += [
            Refusal("fsdp.prefetch", f"{name}={value}: with dp_shard=1 and replicas nothing is gathered; leave it out")
            for name, value in chosen.items()
        ]
    elif "prefetch_backward" in chosen:
        text = f"prefetch_backward={options.prefetch_backward}"
        if options.reshard_after_forward is False:
            problems.add(
                "fsdp.prefetch",
                f"{text}: reshard_after_forward=False leaves nothing to gather in backward; leave one of them out",
            )
        if all(draft.policies.get(name) is SyncPolicy.DEFER for name in draft.units):
            problems.add(
                "fsdp.prefetch",
                f"{text} and sync=defer: nothing is gathered in backward; legal with it are reshard_each and reduce_each",
            )
    return Found(None, problems)

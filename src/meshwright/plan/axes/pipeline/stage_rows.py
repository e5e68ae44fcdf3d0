"""The part of a plan that some stages have: its rows, and its program."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from meshwright.once import once_for_each
from meshwright.plan.axes.data.prefetch import prefetch_actions
from meshwright.plan.axes.data.units import gathered_in_backward
from meshwright.plan.axes.pipeline.stage_plan import elsewhere, first_trained, own_stages
from meshwright.plan.given.names import holder_of, nearest
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.result.arrangement import ArrangedRows
from meshwright.plan.result.plan_rows import PlanRows
from meshwright.plan.result.program import Action, Cut, Freeze, JoinTwins, Pack, PartTwins, Prefetch, Slice, Wrap
from meshwright.plan.result.sharding_plan import ROOT, ShardingPlan, UnitRow

__all__ = ["on_stages", "rows_on_stages"]

T = TypeVar("T")


def _gathered_in_backward(plan: PlanRows, stage: int, units: Sequence[UnitRow]) -> Collection[str]:
    """Return the units of a stage whose parameters its backward needs. Stages without one before them begin as a model does."""
    if (first := first_trained(plan)) != stage:
        return {unit.name for unit in units} if first < stage else ()
    rows = [plan.parameters[place] for place in plan.arrangement.of_stages.get(stage, ())]
    return gathered_in_backward([unit.name for unit in units], rows, implicit=False)


def on_stages(plan: ShardingPlan, stages: Collection[int]) -> ShardingPlan:
    """Return the part of a plan that some stages have. The program of a single stage begins with cutting the model."""
    return _with_program(plan, rows_on_stages(plan, stages), stages) if plan.stages else plan


def rows_on_stages(plan: ShardingPlan, stages: Collection[int]) -> ShardingPlan:
    """Return the same without a program, for prices: it has the rows alone. What was asked before is not made again."""
    return plan.once(_rows_of_stages, tuple(stages)) if plan.stages else plan


def _rows_of_stages(plan: ShardingPlan, stages: tuple[int, ...]) -> ShardingPlan:
    assert plan.cut is not None  # a plan without its cut is refused: its rows do not say what is where
    rows = plan.shared.once(_part, stages)
    part = replace(
        plan,
        options=plan.options if len(plan.stages) - 1 in stages else plan.once(_options_without_loss),
        layers=rows.layers,
        parameters=rows.parameters,
        units=rows.units,
        tensor_parallel=rows.tensor_parallel,
        experts=rows.experts,
        attentions=rows.attentions,
        mixers=rows.mixers,
        program=(),
    )
    vars(part)["shared"] = rows  # what was found of them before, too
    return part


def _part(rows: PlanRows, stages: tuple[int, ...]) -> PlanRows:
    """Return the rows that some stages have."""
    there, needed = frozenset(stages), _needed_stages(own_stages(rows))

    def here(modules: Sequence[Any]) -> Any:
        """Return the rows of the modules that these stages have."""
        return tuple(_rows_there(modules, _places_of_modules(modules, needed), there))

    places, arrangement = rows.arrangement.on_stages(stages)
    parameters = ArrangedRows.of(arrangement, [rows.parameters[place] for place in places])
    names = {name for row in parameters for name in (row.name, *row.aliases)}
    inside = {unit.name for unit in here(rows.units)}
    own = [unit for unit in rows.units if unit.name in inside or unit.name == ROOT or not names.isdisjoint(unit.parameters)]
    in_backward = {name for stage in stages for name in _gathered_in_backward(rows, stage, own)}
    inner = len(rows.stages) - 1 not in stages  # its outputs are hidden states, and not those of the model

    def on_stage(unit: UnitRow) -> UnitRow:
        values: dict[str, Any] = {
            "parameters": tuple(name for name in unit.parameters if name in names),
            "gathers_in_backward": unit.name in in_backward,
            "output_dtype": None if inner and unit.name == ROOT else unit.output_dtype,
        }
        others = {name: value for name, value in values.items() if getattr(unit, name) != value}
        return replace(unit, **others) if others else unit

    return PlanRows(
        layers=here(rows.layers),
        parameters=parameters,
        units=tuple(map(on_stage, own)),
        tensor_parallel=here(rows.tensor_parallel),
        experts=here(rows.experts),
        attentions=here(rows.attentions),
        mixers=here(rows.mixers),
        stages=rows.stages,
        cut=None,
    )


def _options_without_loss(plan: ShardingPlan) -> ParallelOptions:
    return replace(plan.options, objective_gathers=0, objective_reductions=0, objective_sums=0)


def _rows_there(rows: Sequence[T], places: Mapping[frozenset[int], Sequence[int]], stages: frozenset[int]) -> list[T]:
    """Return, in their order, the rows of which some stages have all stages that they need; ``places`` are those of all."""
    found = {place for needed, own in places.items() if needed <= stages for place in own}
    return [rows[place] for place in sorted(found)]


class _NeededStages(dict[str, frozenset[int]]):
    """For each module, the stages that a part of a plan must have to have it too: its own, and those of what is around it."""

    def __init__(self, own: Mapping[str, frozenset[int]]) -> None:
        super().__init__({"": frozenset()})
        self.own = own

    def __missing__(self, module: str) -> frozenset[int]:
        around = self[holder_of(module)]
        own = self.own.get(module)
        self[module] = found = around if own is None else own | around
        return found


@once_for_each
def _needed_stages(own: dict[str, frozenset[int]]) -> _NeededStages:
    return _NeededStages(own)


@once_for_each
def _places_of_modules(rows: Sequence[Any], needed: _NeededStages) -> dict[frozenset[int], list[int]]:
    """Return the places of the rows of modules, or of their names, by the stages that they need."""
    places: dict[frozenset[int], list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(needed[row if isinstance(row, str) else row.name], []).append(place)
    return places


def _with_program(plan: ShardingPlan, part: ShardingPlan, stages: Collection[int]) -> ShardingPlan:
    """Return the part of a plan that some stages have with its program."""
    cut = plan.cut
    assert cut is not None
    others = frozenset(elsewhere(plan, stages))
    names = {name for row in part.parameters for name in (row.name, *row.aliases)}
    kept = {unit.name: unit for unit in part.units}

    def here(module: str) -> bool:
        return module not in others and not nearest(module, others)

    def of(action: Action) -> Iterable[Action]:
        if isinstance(action, Cut):
            if len(stages) == 1 or cut.passes > 1:
                own = {layer for stage in stages for layer in plan.stages[stage].layers}
                begin = min(index for index, (name, *_) in enumerate(cut.order) if name in own)
                yield replace(cut, begin=begin, end=begin + len(own))
        elif isinstance(action, Slice | Pack):
            if set(action.names) & names:
                yield action
        elif isinstance(action, Freeze):
            yield replace(action, parameters=tuple(name for name in action.parameters if name in names))
        elif isinstance(action, PartTwins | JoinTwins):
            own_pairs = tuple(pair for pair in action.parameters if pair[0] in names)
            if isinstance(action, JoinTwins):
                yield replace(action, parameters=own_pairs, units=tuple(pair for pair in action.units if pair[0] in kept))
            else:
                yield replace(action, parameters=own_pairs)
        elif isinstance(action, Wrap):
            if action.unit in kept:
                yield replace(action, row=kept[action.unit], dims=tuple(pair for pair in action.dims if pair[0] in names))
        elif here(getattr(action, "module", "")):
            yield action

    prefetches = [index for index, action in enumerate(plan.program) if isinstance(action, Prefetch)]
    begin, end = (prefetches[0], prefetches[-1] + 1) if prefetches else (len(plan.program),) * 2
    before, after = (
        tuple(kept_action for action in actions for kept_action in of(action))
        for actions in (plan.program[:begin], plan.program[end:])
    )
    return replace(part, program=(*before, *prefetch_actions(part), *after))

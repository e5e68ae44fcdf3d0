"""The part of a plan that some stages have: its rows, and its program."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from meshwright.plan.axes.data.prefetch import prefetch_actions
from meshwright.plan.axes.data.units import gathered_in_backward
from meshwright.plan.axes.pipeline.stage_plan import elsewhere, first_trained
from meshwright.plan.given.names import holders_of, nearest
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.result.program import Action, Cut, Freeze, JoinTwins, Pack, PartTwins, Prefetch, Slice, Wrap
from meshwright.plan.result.sharding_plan import ROOT, ShardingPlan, UnitRow

__all__ = ["on_stages", "rows_on_stages"]


def _gathered_in_backward(plan: ShardingPlan, stage: int, units: Sequence[UnitRow]) -> Collection[str]:
    """Return the units of a stage whose parameters its backward needs. Stages without one before them begin as a model does."""
    if (first := first_trained(plan)) != stage:
        return {unit.name for unit in units} if first < stage else ()
    rows = [row for row in plan.parameters if stage in row.stages]
    return gathered_in_backward([unit.name for unit in units], rows, implicit=False)


def on_stages(plan: ShardingPlan, stages: Collection[int]) -> ShardingPlan:
    """Return the part of a plan that some stages have. The program of a single stage begins with cutting the model."""
    return _with_program(plan, rows_on_stages(plan, stages), stages) if plan.stages else plan


def rows_on_stages(plan: ShardingPlan, stages: Collection[int]) -> ShardingPlan:
    """Return the same without a program, for prices: it has the rows alone. What was asked before is not made again."""
    return plan.once(_rows_of_stages, tuple(stages)) if plan.stages else plan


def _rows_of_stages(plan: ShardingPlan, stages: tuple[int, ...]) -> ShardingPlan:
    needed, there = plan.once(_needed_stages), frozenset(stages)

    def here(module: str) -> bool:
        return needed[module] <= there

    held = plan.once(_parameters_of_stages)
    places = sorted({place for stage in stages for place in held.get(stage, ())})
    parameters = tuple(plan.parameters[place] for place in places)
    names = {name for row in parameters for name in (row.name, *row.aliases)}
    own = [unit for unit in plan.units if unit.name == ROOT or here(unit.name) or not names.isdisjoint(unit.parameters)]
    in_backward = {name for stage in stages for name in _gathered_in_backward(plan, stage, own)}
    inner = len(plan.stages) - 1 not in stages  # its outputs are hidden states, and not those of the model

    def on_stage(unit: UnitRow) -> UnitRow:
        values: dict[str, Any] = {
            "parameters": tuple(name for name in unit.parameters if name in names),
            "gathers_in_backward": unit.name in in_backward,
            "output_dtype": None if inner and unit.name == ROOT else unit.output_dtype,
        }
        others = {name: value for name, value in values.items() if getattr(unit, name) != value}
        return replace(unit, **others) if others else unit

    return replace(
        plan,
        options=plan.once(_options_without_loss) if inner else plan.options,
        layers=tuple(name for name in plan.layers if here(name)),
        parameters=parameters,
        units=tuple(map(on_stage, own)),
        tensor_parallel=tuple(row for row in plan.tensor_parallel if here(row.module)),
        experts=tuple(row for row in plan.experts if here(row.module)),
        attentions=tuple(row for row in plan.attentions if here(row.module)),
        mixers=tuple(row for row in plan.mixers if here(row.module)),
        program=(),
    )


def _options_without_loss(plan: ShardingPlan) -> ParallelOptions:
    return replace(plan.options, objective_gathers=0, objective_reductions=0, objective_sums=0)


def _needed_stages(plan: ShardingPlan) -> dict[str, frozenset[int]]:
    """Return for each module with a row the stages that a part of the plan must have to have it too."""
    own: dict[str, set[int]] = {}
    for stage in range(len(plan.stages)):
        for name in elsewhere(plan, [other for other in range(len(plan.stages)) if other != stage]):
            own.setdefault(name, set()).add(stage)
    rows: list[Any] = [*plan.tensor_parallel, *plan.experts, *plan.attentions, *plan.mixers]
    modules = dict.fromkeys((*(unit.name for unit in plan.units), *plan.layers, *(row.module for row in rows)))
    around = {module: [own[name] for name in (module, *holders_of(module)) if name in own] for module in modules}
    return {module: frozenset[int]().union(*stages) for module, stages in around.items()}


def _parameters_of_stages(plan: ShardingPlan) -> dict[int, list[int]]:
    """Return the places of the rows of the parameters that each stage has."""
    places: dict[int, list[int]] = {}
    for place, row in enumerate(plan.parameters):
        for stage in row.stages:
            places.setdefault(stage, []).append(place)
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

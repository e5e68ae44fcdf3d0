"""Pipeline stages: where a model is cut, which rank has which stage, and what it sends.

The plan is made for the whole model. What belongs to some stages is kept of it then
(:func:`~meshwright.plan.axes.pipeline.stage_rows.on_stages`), so that everything that stages must agree on (slices of the
sequence at a cut, tied weights, dtypes, decay) is decided once.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from math import prod

from meshwright.errors import Problems, coded, number_of
from meshwright.once import once_for_each
from meshwright.plan.axes.pipeline.carried_slices import carried_on_slices
from meshwright.plan.axes.pipeline.schedule_checks import halving_problems, schedule_problems
from meshwright.plan.axes.pipeline.where_to_cut import costs_of_layers, least_cuts
from meshwright.plan.draft import Draft, Found, Stages
from meshwright.plan.given.closed_choices import PipelineSchedule
from meshwright.plan.given.cut_points import StageFacts, entering_shape
from meshwright.plan.given.names import nearest, within
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.result.plan_rows import PlanRows
from meshwright.plan.result.program import Cut
from meshwright.plan.result.rows import StageRow
from meshwright.plan.result.sharding_plan import ShardingPlan, itemsize

__all__ = [
    "crossing_bytes",
    "crossing_dtype",
    "crossing_shape",
    "elsewhere",
    "first_trained",
    "own_stages",
    "parts_of_rank",
    "passes_of",
    "pipeline_counts",
    "pipeline_messages",
    "resolve_stages",
    "stages_of_rank",
    "stages_with",
]


def cut_of(facts: StageFacts, begin: int, end: int) -> Cut:
    """Return the action that makes a stage of the layers from ``begin`` to ``end`` of a model."""
    tied = [name for name, sides in facts.used.items() if len(sides) > 1]
    return Cut(
        facts.body,
        tuple((layer.name, *layer.argument, layer.returned) for layer in facts.layers),
        begin,
        end,
        tuple((module.name, module.features, module.lookup, module.sizes) for module in facts.leading),
        tuple(tied),
        facts.trailing,
        facts.hidden,
        facts.after,
        facts.idle,
        facts.carried,
        facts.blank,
        facts.passes,
        facts.canvas,
    )


def resolve_stages(draft: Draft) -> Found[Stages]:
    """Choose the stages; there are none if `pp` is 1."""
    options, pp, problems, none = draft.options, draft.layout.size("pp"), Problems(), Stages()
    if pp == 1:
        default = ParallelOptions()
        for name in ("pipeline_schedule", "stages_per_rank", "pipeline_cuts", "runs_per_step"):
            if (chosen := getattr(options, name)) != (legal := getattr(default, name)):
                problems.add("pp.option", f"{name}={chosen}: needs pp > 1; the legal value is {legal or 'none'}")
        return Found(none, problems)
    facts = draft.model.traces.stages(draft.layers)
    if facts is None:
        problems.add("pp.unknown", f"pp={pp}: where {draft.spec.family} can be cut is unknown (traces of its ParallelSpec)")
        return Found(none, problems)
    if facts.problems:
        around = (f"pp={pp}: {draft.spec.family}: ", "; the legal value of pp is 1")
        problems.extend(coded(problem, "pp.cut").within(*around) for problem in facts.problems)
        return Found(none, problems)
    if facts.passes > 1:
        return _several_passes(draft, facts)
    if draft.spec.twins:
        problems.add("pp.twice", f"pp={pp}: {draft.spec.family} has a stack of layers that runs twice; the legal value is 1")
        return Found(none, problems)
    carried = carried_on_slices(draft, facts)
    facts = replace(facts, carried=carried.value)
    problems.extend(carried.problems)
    schedule = options.pipeline_schedule
    each = options.stages_per_rank or (1 if schedule.single else 2)
    count, layers = pp * each, [layer.name for layer in facts.layers]
    problems.extend(schedule_problems(options, pp, each))
    if count > len(layers):
        problems.add(
            "pp.layers",
            f"pp={pp}, stages_per_rank={each}: {number_of(count, 'stage')}, but {number_of(len(layers), 'layer')} make at most "
            f"{number_of(len(layers), 'stage')}",
        )
    cuts = options.pipeline_cuts
    legal = tuple(index for index in range(1, len(layers)) if index not in facts.uncut)
    if problems:
        pass
    elif count - 1 > len(legal):
        why = "; ".join(dict.fromkeys(facts.uncut.values()))
        problems.add(
            "pp.reads_more",
            f"pp={pp}, stages_per_rank={each}: {number_of(count, 'stage')}, but the model can be cut before "
            f"{number_of(len(legal), 'layer')} only ({why})",
        )
    elif inside := [cut for cut in cuts if cut in facts.uncut]:
        problems.add("pp.cuts", f"pipeline_cuts={list(cuts)}: {facts.uncut[inside[0]]}; legal are {', '.join(map(str, legal))}")
    if cuts and (len(cuts) != count - 1 or list(cuts) != sorted({*cuts} & {*range(1, len(layers))})):
        problems.add(
            "pp.cuts",
            f"pipeline_cuts={list(cuts)}: {count} stages need {count - 1} ascending numbers from 1 to {len(layers) - 1}",
        )
    if draft.problems or problems:
        return Found(none, problems)
    costs, sizes = costs_of_layers(draft, layers, facts.used, {row.module: row.experts for row in draft.experts})
    begins = (0, *(cuts or least_cuts(tuple(costs), tuple(sizes), count, legal)))
    total = sum(costs)
    rows = tuple(
        StageRow(index, _rank_of(index, pp, schedule), tuple(layers[begin:end]), sum(costs[begin:end]) / total)
        for index, (begin, end) in enumerate(zip(begins, (*begins[1:], len(layers)), strict=True))
    )
    stages = _stages(draft, facts, rows)
    problems.extend(halving_problems(draft, stages))
    return Found(stages, problems)


def _several_passes(draft: Draft, facts: StageFacts) -> Found[Stages]:
    """Choose the stages of stacks that share their layers: a rank has one stage in each pass, with the same parameters."""
    options, pp, passes, problems = draft.options, draft.layout.size("pp"), facts.passes, Problems()
    layers = [layer.name for layer in facts.layers]
    numbers = len(layers) // 2
    if options.pipeline_schedule is not PipelineSchedule.INTERLEAVED:
        problems.add(
            "pp.twice",
            f"pipeline_schedule={options.pipeline_schedule}: the stacks of {draft.spec.family} run {passes} times in all, so "
            f"each rank has {passes} stages; legal is {PipelineSchedule.INTERLEAVED}",
        )
    if options.stages_per_rank not in (None, passes):
        problems.add(
            "pp.stages_per_rank",
            f"stages_per_rank={options.stages_per_rank}: each rank has a stage in each of {passes} passes; legal is {passes}",
        )
    if options.pipeline_cuts:
        problems.add(
            "pp.cuts", f"pipeline_cuts={list(options.pipeline_cuts)}: stacks that share layers are cut evenly; legal is none"
        )
    if pp > numbers:
        problems.add("pp.layers", f"pp={pp}: {number_of(numbers, 'layer')} make at most {number_of(numbers, 'stage')}")
    if not problems:
        problems.extend(schedule_problems(options, pp, passes))
    if draft.problems or problems:
        return Found(Stages(), problems)
    costs, sizes = costs_of_layers(draft, layers, facts.used, {row.module: row.experts for row in draft.experts})
    legal = tuple(index for index in range(1, len(layers)) if index not in facts.uncut)
    begins = (0, *least_cuts(tuple(costs), tuple(sizes), pp, legal))
    ends, total = (*begins[1:], len(layers)), sum(costs) * passes
    rows = tuple(
        StageRow(number * pp + rank, rank, tuple(layers[begin + min(number, 1) : end : 2]), sum(costs[begin:end]) / total)
        for number in range(passes)
        for rank, (begin, end) in enumerate(zip(begins, ends, strict=True))
    )
    return Found(_stages(draft, facts, rows), problems)


def _stages(draft: Draft, facts: StageFacts, rows: tuple[StageRow, ...]) -> Stages:
    """Return the stages of some rows, with the stages that hold each parameter.

    Layers that share parameters and run several times are on one rank. The first stage of the rank holds them.
    """
    place = {layer: row.rank if facts.passes > 1 else row.index for row in rows for layer in row.layers}
    holding: dict[str, tuple[int, ...]] = {}
    for parameter in draft.parameters:
        sides = facts.used.get(parameter.name)
        if sides is None:
            holding[parameter.name] = (place[nearest(parameter.name, place)],)
        else:
            holding[parameter.name] = tuple(0 if side == "first" else len(rows) - 1 for side in sides)
    return Stages(rows, cut_of(facts, 0, len(facts.layers)), holding)


def _rank_of(stage: int, pp: int, schedule: PipelineSchedule) -> int:
    return 2 * pp - 1 - stage if schedule.is_v_shaped and stage >= pp else stage % pp


# -- what a stage has --------------------------------------------------------------------------------------------------------


def crossing_bytes(plan: ShardingPlan, stage: int) -> int:
    """Return the bytes that enter a stage, in a microbatch of ``options.tokens`` tokens."""
    return plan.once(_crossing_bytes, stage)


def _crossing_bytes(plan: ShardingPlan, stage: int) -> int:
    tokens, pp = (plan.options.tokens or 0) * plan.layout.size("cp"), plan.layout.size("pp")
    cut = plan.cut
    assert cut is not None
    if cut.passes > 1 and stage == pp:  # nothing but a number goes from the first pass to the second
        return itemsize(crossing_dtype(plan))
    if cut.passes > 1 and stage > pp and cut.canvas is not None:
        tokens = tokens * cut.canvas[0] // cut.canvas[1]
    return prod(crossing_shape(plan, stage, 1, tokens)) * itemsize(crossing_dtype(plan))


def crossing_dtype(plan: ShardingPlan) -> str:
    """Return the dtype of the hidden state that is sent at a cut: that of compute."""
    return plan.options.param_dtype or next(row.dtype for row in plan.parameters)


def elsewhere(plan: ShardingPlan | PlanRows, stages: Collection[int]) -> tuple[str, ...]:
    """Return the names of the layers, and of the modules before and after them, that some stages do not run."""
    there = frozenset(stages)
    return tuple(name for name, own in own_stages(plan).items() if not own <= there)


def own_stages(plan: ShardingPlan | PlanRows) -> dict[str, frozenset[int]]:
    """Return the stages that run each layer, and each module before and after layers; empty if there are no stages."""
    return {} if plan.cut is None else _own_stages(plan.stages, plan.cut)


@once_for_each
def _own_stages(stages: tuple[StageRow, ...], cut: Cut) -> dict[str, frozenset[int]]:
    found: dict[str, frozenset[int]] = {}
    pairs = [(layer, row.index) for row in stages for layer in row.layers]
    pairs += [(name, 0) for name in (*(module for module, *_ in cut.leading), *cut.idle)]
    pairs += [(name, len(stages) - 1) for name in cut.trailing]
    for name, stage in pairs:
        found[name] = found.get(name, frozenset()) | {stage}
    return found


def first_trained(plan: ShardingPlan | PlanRows) -> int:
    """Return the first stage with a trained parameter; the number of stages if there is none."""
    return plan.first_trained_stage


def stages_with(plan: ShardingPlan, name: str) -> tuple[int, ...]:
    """Return the stages that have a module or a parameter; none if the plan has no stages, or every stage has it."""
    cut = plan.cut
    if cut is None:
        return ()
    for parameter in plan.parameters:
        if name in (parameter.name, *parameter.aliases):
            return parameter.stages
    last = len(plan.stages) - 1
    leading = within(name, [*(module for module, *_ in cut.leading), *cut.idle])
    trailing = within(name, cut.trailing)
    inside = [row.index for row in plan.stages if within(name, row.layers)]
    return tuple(dict.fromkeys([*([0] if leading else []), *inside, *([last] if trailing else [])]))


def pipeline_messages(plan: ShardingPlan, rank: int) -> tuple[int, int | None]:
    """Return the number of messages that a rank of `pp` sends in an optimizer step, and their bytes (``None``: unknown)."""
    if not plan.stages:
        return 0, 0
    owner, own = [row.rank for row in plan.stages], stages_of_rank(plan, rank)
    cuts = [stage + 1 for stage in own if stage + 1 < len(owner) and owner[stage] != owner[stage + 1]]  # forward
    cuts += [stage for stage in own if stage > 0 and owner[stage] != owner[stage - 1]]  # backward
    crossings = plan.options.microbatches * len(cuts)
    # Of a tied weight on two ranks, each sends its gradient to the other.
    tied = [row for row in plan.parameters if row.copies and row.trainable and len({stage in own for stage in row.stages}) > 1]
    if plan.options.tokens is None:
        return crossings + len(tied), None
    size = plan.options.microbatches * sum(crossing_bytes(plan, stage) for stage in cuts)
    size += sum(row.bytes_per_rank for row in tied)
    return crossings + len(tied), size


def pipeline_counts(plan: ShardingPlan, rank: int) -> Counter[str]:
    """Return the messages and collectives over `pp` of one optimizer step on a rank of `pp`, by kind."""
    return Counter({"send": pipeline_messages(plan, rank)[0], "all_reduce": 1} if plan.stages else {})


def passes_of(plan: ShardingPlan) -> int:
    """Return how often a microbatch goes through all ranks of `pp`."""
    return 1 if plan.cut is None else plan.cut.passes


def parts_of_rank(plan: ShardingPlan, rank: int) -> tuple[tuple[int, ...], ...]:
    """Return the stages of a rank, those together that one model runs."""
    own = stages_of_rank(plan, rank)
    return (own,) if passes_of(plan) > 1 else tuple((stage,) for stage in own)


def stages_of_rank(plan: ShardingPlan | PlanRows, rank: int) -> tuple[int, ...]:
    """Return the stages of a rank of `pp`; without a pipeline, the one that is the whole model."""
    return tuple(row.index for row in plan.stages if row.rank == rank) or (0,)


def crossing_shape(plan: ShardingPlan, stage: int, rows: int, length: int) -> tuple[int, ...]:
    """Return the shape of what enters a stage on a rank, for some rows of whole sequences: the hidden state, with what is
    carried.

    With sequence parallel, each rank of `tp` sends its slice of the sequence.
    """
    cut = plan.cut
    assert cut is not None
    slices = plan.layout.size("cp") * (plan.layout.size("tp") if plan.options.sequence_parallel else 1)
    begin = [name for name, *_ in cut.order].index(plan.stages[stage].layers[0])
    return entering_shape(cut.sizes, cut.carried, begin, rows, length // slices)

"""What a schedule of a pipeline needs: numbers of stages and microbatches, and a backward that it can halve."""

from meshwright.errors import Problems, number_of
from meshwright.plan.draft import Draft, Stages
from meshwright.plan.given.closed_choices import ActivationCheckpointing
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.result.rows import StageRow

__all__ = ["halving_problems", "schedule_problems"]


def schedule_problems(options: ParallelOptions, pp: int, each: int) -> Problems:
    """Return what a schedule does not take of the options, with so many ranks and stages on each."""
    schedule, runs, microbatches = options.pipeline_schedule, options.runs_per_step, options.microbatches
    problems = Problems()
    single = schedule.single
    if each != (1 if single else 2) and (single or schedule.is_v_shaped):
        problems.add(
            "pp.stages_per_rank", f"stages_per_rank={each}: pipeline_schedule={schedule} has {1 if single else 2} on each rank"
        )
    elif not single and each < 2:
        problems.add("pp.stages_per_rank", f"stages_per_rank={each}: pipeline_schedule={schedule} needs at least 2")
    if runs < 1 or microbatches % runs:
        legal = ", ".join(str(number) for number in range(1, microbatches + 1) if microbatches % number == 0)
        problems.add(
            "pp.microbatches",
            f"runs_per_step={runs}: {number_of(microbatches, 'microbatch')} cannot be divided by {runs}; legal are {legal}",
        )
    elif not schedule.takes(pp, microbatches // runs):
        numbers = [str(number) for number in range(1, 4 * pp * each + 1) if schedule.takes(pp, number)]
        problems.add(
            "pp.microbatches",
            f"pipeline_schedule={schedule}: a run has {number_of(microbatches // runs, 'microbatch')} (global_batch_size over "
            f"microbatch_size, data ranks and runs_per_step); with pp={pp} legal are {', '.join(numbers[:8])}, ...",
        )
    if schedule.splits and options.compile:
        problems.add(
            "pp.split_backward",
            f"compile=True: pipeline_schedule={schedule} splits backward, which torch cannot do with compiled layers",
        )
    modes = {options.activation_checkpointing, *options.activation_checkpointing_layers.values()}
    if schedule.splits and modes != {ActivationCheckpointing.NONE}:
        problems.add(
            "pp.split_backward",
            f"activation_checkpointing: pipeline_schedule={schedule} splits backward, and each half would recompute; legal are "
            "activation_checkpointing=none, and gpipe, 1f1b, interleaved_1f1b",
        )
    return problems


def halving_problems(draft: Draft, stages: Stages) -> Problems:
    """Return why a schedule that splits backward cannot halve that of a stage.

    The first stage, and the first with a trained parameter, run both halves at once.
    """
    schedule, problems = draft.options.pipeline_schedule, Problems()
    first = min((stages.holding[name][0] for name in draft.trained), default=0)
    halved = stages.rows[first + 1 :]
    if not schedule.splits or not halved:
        return problems

    def fits(begin: StageRow, end: StageRow) -> bool:
        return draft.model.traces.halves_backward(draft.layers, draft.trained, begin.layers[0], end.layers[-1])

    if not fits(halved[0], halved[-1]):  # all of them as one stage: then some of them may still fit
        for row in halved:
            if not fits(row, row):
                problems.add(
                    "pp.split_backward",
                    f"pipeline_schedule={schedule} splits backward, and of stage {row.index} the half for weights needs what "
                    "the half for inputs has freed: a weight is used again on what it was used for, with others in between; "
                    "legal are gpipe, 1f1b, interleaved_1f1b",
                )
                break
    return problems

"""The order in which the ranks of a pipeline take their turns.

Orders are those of torch's schedules. torch gives none for ``gpipe``, and for ``1f1b`` one that its own code does not follow on
the last rank, so these two are written out as ``torch.distributed.pipelining.schedules`` runs them.

The orders of the others are read from schedules over stages without a model. ``get_schedule_ops`` of torch does the same with
mocks, but it is private, so only `distributed/_torch_compat` may import it, which this room may not. A test compares the two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from types import SimpleNamespace
from typing import Any

from meshwright.errors import UnsupportedError
from meshwright.plan.given.closed_choices import PipelineSchedule

__all__ = ["TORCH_SCHEDULES", "Phase", "ScheduledOp", "awaited", "order_of"]

TORCH_SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}
"""The class of each schedule in ``torch.distributed.pipelining.schedules``."""


class Phase(StrEnum):
    """What a stage does with a microbatch. The values are those of torch."""

    FORWARD = "F"
    BACKWARD = "B"
    """Both halves of backward at once."""
    INPUT = "I"
    """The half of backward for inputs, which the stage before waits for."""
    WEIGHT = "W"
    """The half of backward for weights."""


@dataclass(frozen=True)
class ScheduledOp:
    """One forward, backward, or half of a backward, of one microbatch on one stage."""

    phase: Phase
    stage: int
    microbatch: int


@cache
def order_of(schedule: PipelineSchedule, pp: int, each: int, microbatches: int) -> tuple[tuple[ScheduledOp, ...], ...]:
    """Return the turns of every rank.

    Args:
        schedule: the schedule.
        pp: number of ranks.
        each: number of stages on a rank.
        microbatches: number of microbatches in a run.

    Raises:
        UnsupportedError: this torch does not have the schedule.
    """
    if schedule.single:
        warmup = [microbatches if schedule is PipelineSchedule.GPIPE else min(microbatches, pp - rank) for rank in range(pp)]
        return tuple(_filled_and_drained(rank, ahead, microbatches) for rank, ahead in enumerate(warmup))
    from torch import nn
    from torch.distributed.pipelining import schedules

    kind = getattr(schedules, TORCH_SCHEDULES[schedule], None)
    if kind is None:
        raise UnsupportedError("torch.version", f"pipeline_schedule={schedule}: this torch has no {TORCH_SCHEDULES[schedule]}")
    count = pp * each
    own = (0, count - 1) if schedule.is_v_shaped else range(0, count, pp)
    stages = [
        SimpleNamespace(
            stage_index=index,
            num_stages=count,
            group_size=pp,
            group_rank=0,
            is_first=index == 0,
            is_last=index == count - 1,
            submod=nn.Identity(),
        )
        for index in own
    ]
    order: Mapping[int, Sequence[Any]] = kind(stages, microbatches, loss_fn=lambda loss, target: loss).pipeline_order
    return tuple(
        tuple(
            ScheduledOp(Phase(action.computation_type.value), action.stage_index, action.microbatch_index)
            for slot in order[rank]
            if slot is not None
            for action in (slot.sub_actions or (slot,))  # dualpipe_v pairs a forward with a backward; torch runs them in turn
        )
        for rank in range(pp)
    )


def _filled_and_drained(rank: int, ahead: int, microbatches: int) -> tuple[ScheduledOp, ...]:
    """Some forwards, then a backward and a forward in turn, then the other backwards."""
    turns = [ScheduledOp(Phase.FORWARD, rank, index) for index in range(ahead)]
    for index in range(microbatches):
        turns.append(ScheduledOp(Phase.BACKWARD, rank, index))
        if index + ahead < microbatches:
            turns.append(ScheduledOp(Phase.FORWARD, rank, index + ahead))
    return tuple(turns)


def awaited(turn: ScheduledOp, last: int) -> list[ScheduledOp]:
    """Return the turns that a turn waits for: what it gets from them, or what they leave on its own stage.

    A backward of both halves counts as its half for inputs, which is what others wait for.

    Args:
        turn: the turn.
        last: index of the last stage.
    """
    stage, microbatch = turn.stage, turn.microbatch
    if turn.phase is Phase.FORWARD:
        return [ScheduledOp(Phase.FORWARD, stage - 1, microbatch)] if stage else []
    if turn.phase is Phase.WEIGHT:
        return [ScheduledOp(Phase.INPUT, stage, microbatch)]
    return [
        ScheduledOp(Phase.FORWARD, stage, microbatch),
        *([ScheduledOp(Phase.INPUT, stage + 1, microbatch)] if stage < last else []),
    ]

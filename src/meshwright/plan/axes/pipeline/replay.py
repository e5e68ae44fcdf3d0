"""The order of a pipeline schedule, replayed in time: how long ranks wait, and how many microbatches are alive.

Orders are those of torch's schedules. torch gives none for ``gpipe``, and for ``1f1b`` one that its own code does not follow on
the last rank, so these two are written out as ``torch.distributed.pipelining.schedules`` runs them.

The orders of the others are read from schedules over stages without a model. ``get_schedule_ops`` of torch does the same with
mocks, but it is private, so only `distributed/_torch_compat` may import it, which this room may not. A test compares the two.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from meshwright.errors import UnsupportedError
from meshwright.plan.axes.pipeline.stage_plan import crossing_bytes, first_trained, passes_of
from meshwright.plan.given.closed_choices import ActivationCheckpointing, PipelineSchedule
from meshwright.plan.result.sharding_plan import ShardingPlan

__all__ = [
    "TORCH_SCHEDULES",
    "Phase",
    "Replay",
    "ScheduledOp",
    "Span",
    "awaited",
    "order_of",
    "receive_buffer_bytes",
    "receive_buffers",
    "replay",
    "replay_of_plan",
]

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


@dataclass(frozen=True)
class Span:
    """A turn in time. The unit of time is a forward through the whole model."""

    turn: ScheduledOp
    begin: float
    end: float


@dataclass(frozen=True)
class Replay:
    """A run of a schedule in time.

    Attributes:
        spans: for each rank of `pp`, its turns in order.
        length: duration of the run, in forwards through the whole model.
        idle: for each rank, the share of the run in which it computes nothing.
        alive: for each rank, the most microbatches whose activations it holds at once, as if each went through all of its
            stages: one of two stages counts a half.
    """

    spans: tuple[tuple[Span, ...], ...]
    length: float
    idle: tuple[float, ...]
    alive: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The mean share of the run in which ranks wait."""
        return sum(self.idle) / len(self.idle)


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


def replay(
    order: Sequence[Sequence[ScheduledOp]],
    cost: Callable[[ScheduledOp], float],
    message: float = 0.0,
    *,
    asked_late: bool = False,
) -> Replay:
    """Run the turns of every rank as early as its own order and the other stages allow.

    Args:
        order: the turns of each rank.
        cost: duration of a turn.
        message: duration of a message from one rank to another.
        asked_late: whether a rank asks for a message only when its turn before has ended, so that it waits for all of it.

    Raises:
        ValueError: the ranks wait for each other.
    """
    last = max(turn.stage for turns in order for turn in turns)
    rank_of = {turn.stage: rank for rank, turns in enumerate(order) for turn in turns}
    done: dict[ScheduledOp, float] = {}
    spans: list[list[Span]] = [[] for _ in order]
    moved = True
    while moved:
        moved = False
        for rank, (turns, made) in enumerate(zip(order, spans, strict=True)):
            while len(made) < len(turns):
                turn = turns[len(made)]
                before = awaited(turn, last)
                if any(other not in done for other in before):
                    break
                sent = [done[other] for other in before if rank_of[other.stage] != rank]
                free = max([made[-1].end if made else 0.0, *(done[other] for other in before)])
                begin = free + message if asked_late and sent else max([free, *(end + message for end in sent)])
                made.append(Span(turn, begin, begin + cost(turn)))
                # What follows waits for a gradient of inputs, whether or not those of weights are made with it.
                key = ScheduledOp(Phase.INPUT, turn.stage, turn.microbatch) if turn.phase is Phase.BACKWARD else turn
                done[key] = made[-1].end
                moved = True
    if any(len(made) < len(turns) for turns, made in zip(order, spans, strict=True)):
        raise ValueError("the ranks wait for each other")
    length = max(made[-1].end for made in spans)
    return Replay(
        tuple(map(tuple, spans)),
        length,
        tuple(1 - sum(span.end - span.begin for span in made) / length for made in spans),
        tuple(_most_alive(turns) / len({turn.stage for turn in turns}) for turns in order),
    )


def _most_alive(turns: Sequence[ScheduledOp]) -> int:
    return max(accumulate({Phase.FORWARD: 1, Phase.INPUT: 0}.get(turn.phase, -1) for turn in turns))


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


def replay_of_plan(plan: ShardingPlan, *, even: bool = False, message: float = 0.0) -> Replay:
    """Replay one run of the plan's schedule.

    torch's schedules of one stage a rank ask for each message when they have started the turn before; the others ask for it
    while earlier turns run.

    Each half of backward takes as long as forward. Full activation checkpointing adds a forward to the backward. No gradient
    flows into stages before the first one with a trained parameter. That stage, and stage 0, have no half for inputs: torch
    runs their whole backward in the turn for weights.

    Args:
        plan: a plan with stages.
        even: let all stages take equal time, instead of the work that the plan gives them.
        message: duration of a message, in forwards through the whole model.
    """
    options, stages = plan.options, len(plan.stages)
    pp = plan.layout.size("pp")
    again = sum(unit.activation_checkpointing is ActivationCheckpointing.FULL for unit in plan.units if unit.kind == "layer")
    recomputed = again / max(1, len(plan.layers))
    parts = {Phase.FORWARD: 1.0, Phase.BACKWARD: 2 + recomputed, Phase.INPUT: 1.0, Phase.WEIGHT: 1.0}
    costs = [1 / stages if even else row.cost for row in plan.stages]
    first, without = (
        first_trained(plan),
        (passes_of(plan) - 1) * pp,
    )  # stages up to there have no gradient, but for the first pass

    def cost(turn: ScheduledOp) -> float:
        part = parts[turn.phase]
        if turn.phase is not Phase.FORWARD and (turn.stage < first or pp <= turn.stage < without):
            part = 0.0
        elif turn.stage == first and turn.phase in (Phase.INPUT, Phase.WEIGHT):
            part = 0.0 if turn.phase is Phase.INPUT else parts[Phase.BACKWARD]
        return part * costs[turn.stage]

    order = order_of(options.pipeline_schedule, pp, stages // pp, options.microbatches // options.runs_per_step)
    return replay(order, cost, message, asked_late=options.pipeline_schedule.single)


def receive_buffers(plan: ShardingPlan, rank: int) -> int:
    """Return the number of hidden states that torch's stages of a rank of `pp` have room for, all through the run.

    A stage has one for each microbatch of a run from the stage before, and one for each gradient from the stage after.
    """
    return len(_sides(plan, rank)) * (plan.options.microbatches // plan.options.runs_per_step)


def receive_buffer_bytes(plan: ShardingPlan, rank: int) -> int:
    """Return their bytes."""
    each = sum(crossing_bytes(plan, stage) for stage in _sides(plan, rank))
    return each * (plan.options.microbatches // plan.options.runs_per_step)


def _sides(plan: ShardingPlan, rank: int) -> list[int]:
    """Return the stages that send what a rank receives, and those that it sends what it receives a gradient of."""
    last, own = len(plan.stages) - 1, [row.index for row in plan.stages if row.rank == rank]
    return [*(stage - 1 for stage in own if stage > 0), *(stage for stage in own if stage < last)]

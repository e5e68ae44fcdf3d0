"""The order of a pipeline schedule, replayed in time: how long ranks wait, and how many microbatches are alive.

Orders are those of torch's schedules. torch gives none for ``gpipe``, and for ``1f1b`` one that its own code does not follow on
the last rank, so these two are written out as ``torch.distributed.pipelining.schedules`` runs them.

The orders of the others are read from schedules over stages without a model. ``get_schedule_ops`` of torch does the same with
mocks, but it is private, so only `distributed/_torch_compat` may import it, which this room may not. A test compares the two.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from meshwright.errors import UnsupportedError
from meshwright.plan.axes.pipeline.stage_plan import first_trained
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
        turns: for each rank of `pp`, its turns in order.
        times: when each of them begins and ends.
        length: duration of the run, in forwards through the whole model.
        idle: for each rank, the share of the run in which it computes nothing.
        alive: for each rank, the most microbatches whose activations it holds at once, as if each went through all of its
            stages: one of two stages counts a half.
    """

    turns: Sequence[Sequence[ScheduledOp]]
    times: tuple[tuple[tuple[float, float], ...], ...]
    length: float
    idle: tuple[float, ...]
    alive: tuple[float, ...]

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """For each rank of `pp`, its turns in time."""
        return tuple(
            tuple(Span(turn, begin, end) for turn, (begin, end) in zip(turns, times, strict=True))
            for turns, times in zip(self.turns, self.times, strict=True)
        )

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


@dataclass(frozen=True)
class _Step:
    """A turn, in an order in which each comes after all that it waits for.

    Attributes:
        rank: whose turn it is.
        kind: number of its phase and stage, in order of their first turn.
        own: numbers of the steps of the same rank that it waits for.
        sent: numbers of those of other ranks.
    """

    rank: int
    kind: int
    own: tuple[int, ...]
    sent: tuple[int, ...]


@dataclass(frozen=True)
class _Walk:
    """What a replay takes from an order, whatever turns cost.

    Attributes:
        order: the turns of each rank.
        steps: all of them, in an order that they can be run in.
        kinds: a turn of each phase and stage.
        alive: for each rank, the most microbatches that it holds at once (:class:`Replay`).
    """

    order: Sequence[Sequence[ScheduledOp]]
    steps: tuple[_Step, ...]
    kinds: tuple[ScheduledOp, ...]
    alive: tuple[float, ...]

    @classmethod
    def of(cls, order: Sequence[Sequence[ScheduledOp]]) -> "_Walk":
        """Find it.

        Raises:
            ValueError: the ranks wait for each other.
        """
        last = max(turn.stage for turns in order for turn in turns)
        rank_of = {turn.stage: rank for rank, turns in enumerate(order) for turn in turns}
        done: dict[ScheduledOp, int] = {}
        kinds: dict[tuple[Phase, int], tuple[int, ScheduledOp]] = {}
        steps: list[_Step] = []
        next_of, moved = [0] * len(order), True
        while moved:
            moved = False
            for rank, turns in enumerate(order):
                while next_of[rank] < len(turns):
                    turn = turns[next_of[rank]]
                    before = awaited(turn, last)
                    if any(other not in done for other in before):
                        break
                    own, sent = (
                        tuple(done[other] for other in before if (rank_of[other.stage] == rank) is here)
                        for here in (True, False)
                    )
                    # What follows waits for a gradient of inputs, whether or not those of weights are made with it.
                    made = ScheduledOp(Phase.INPUT, turn.stage, turn.microbatch) if turn.phase is Phase.BACKWARD else turn
                    done[made] = len(steps)
                    kind, _ = kinds.setdefault((turn.phase, turn.stage), (len(kinds), turn))
                    steps.append(_Step(rank, kind, own, sent))
                    next_of[rank] += 1
                    moved = True
        if len(steps) < sum(map(len, order)):
            raise ValueError("the ranks wait for each other")
        alive = (_most_alive(turns) / len({turn.stage for turn in turns}) for turns in order)
        return cls(order, tuple(steps), tuple(turn for _, turn in kinds.values()), tuple(alive))

    def run(self, cost: Callable[[ScheduledOp], float], message: float, *, asked_late: bool) -> Replay:
        """Run it; see :func:`replay`."""
        costs = [cost(turn) for turn in self.kinds]
        free_at = [0.0] * len(self.order)
        times: list[list[tuple[float, float]]] = [[] for _ in self.order]
        ends: list[float] = []
        for step in self.steps:
            free = begin = max([free_at[step.rank], *(ends[number] for number in (*step.own, *step.sent))])
            if step.sent:
                begin = free + message if asked_late else max(free, *(ends[number] + message for number in step.sent))
            end = begin + costs[step.kind]
            ends.append(end)
            free_at[step.rank] = end
            times[step.rank].append((begin, end))
        length = max(free_at)
        idle = (1 - sum(end - begin for begin, end in own) / length for own in times)
        return Replay(self.order, tuple(map(tuple, times)), length, tuple(idle), self.alive)


@cache
def _walk_of(schedule: PipelineSchedule, pp: int, each: int, microbatches: int) -> _Walk:
    return _Walk.of(order_of(schedule, pp, each, microbatches))


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
        cost: duration of a turn, which all microbatches share: it is asked once for each phase of a stage.
        message: duration of a message from one rank to another.
        asked_late: whether a rank asks for a message only when its turn before has ended, so that it waits for all of it.

    Raises:
        ValueError: the ranks wait for each other.
    """
    return _Walk.of(order).run(cost, message, asked_late=asked_late)


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
    first = first_trained(plan)

    def cost(turn: ScheduledOp) -> float:
        part = parts[turn.phase]
        if turn.phase is not Phase.FORWARD and turn.stage < first:
            part = 0.0
        elif turn.stage == first and turn.phase in (Phase.INPUT, Phase.WEIGHT):
            part = 0.0 if turn.phase is Phase.INPUT else parts[Phase.BACKWARD]
        return part * costs[turn.stage]

    walk = _walk_of(options.pipeline_schedule, pp, stages // pp, options.microbatches // options.runs_per_step)
    return walk.run(cost, message, asked_late=options.pipeline_schedule.single)


def receive_buffers(plan: ShardingPlan, rank: int) -> int:
    """Return the number of hidden states that torch's stages of a rank of `pp` have room for, all through the run.

    A stage has one for each microbatch of a run from the stage before, and one for each gradient from the stage after.
    """
    last = len(plan.stages) - 1
    sides = sum((row.index > 0) + (row.index < last) for row in plan.stages if row.rank == rank)
    return sides * (plan.options.microbatches // plan.options.runs_per_step)

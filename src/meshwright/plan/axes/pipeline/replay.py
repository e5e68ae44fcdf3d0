"""The order of a pipeline schedule, replayed in time: how long ranks wait, and how many microbatches are alive."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import NamedTuple

from meshwright.plan.axes.pipeline.schedule_turns import Phase, ScheduledOp, awaited, order_of
from meshwright.plan.axes.pipeline.stage_plan import crossing_bytes, first_trained, passes_of
from meshwright.plan.given.closed_choices import ActivationCheckpointing, PipelineSchedule
from meshwright.plan.result.sharding_plan import ShardingPlan

__all__ = ["Replay", "Span", "even_replay", "receive_buffer_bytes", "receive_buffers", "replay", "replay_of_plan"]


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
        ranks: whose turns there are, in an order in which each comes after all that it waits for.
        begins: when each of these begins.
        ends: when it ends.
        length: duration of the run, in forwards through the whole model.
        idle: for each rank, the share of the run in which it computes nothing.
        alive: for each rank, the most microbatches whose activations it holds at once, as if each went through all of its
            stages: one of two stages counts a half.
    """

    turns: Sequence[Sequence[ScheduledOp]]
    ranks: Sequence[int]
    begins: Sequence[float]
    ends: Sequence[float]
    length: float
    idle: tuple[float, ...]
    alive: tuple[float, ...]

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """For each rank of `pp`, its turns in time."""
        left, found = [iter(turns) for turns in self.turns], [list[Span]() for _ in self.turns]
        for rank, begin, end in zip(self.ranks, self.begins, self.ends, strict=True):
            found[rank].append(Span(next(left[rank]), begin, end))
        return tuple(map(tuple, found))

    @property
    def bubble(self) -> float:
        """The mean share of the run in which ranks wait."""
        return sum(self.idle) / len(self.idle)


class _Step(NamedTuple):
    """A turn, in an order in which each comes after all that it waits for.

    Attributes:
        rank: whose turn it is.
        kind: number of its phase and stage, in order of their first turn.
        sent: number of the step of another rank that it waits for; -1: none. Those of its own rank are over before it.
    """

    rank: int
    kind: int
    sent: int


@dataclass(frozen=True)
class _Walk:
    """What a replay takes from an order, whatever turns cost.

    Attributes:
        order: the turns of each rank.
        steps: all of them, in an order that they can be run in.
        kinds: a turn of each phase and stage.
        numbers: for each of these, whose turns they are, and how many there are.
        alive: for each rank, the most microbatches that it holds at once (:class:`Replay`).
    """

    order: Sequence[Sequence[ScheduledOp]]
    steps: tuple[_Step, ...]
    kinds: tuple[ScheduledOp, ...]
    numbers: tuple[tuple[int, int], ...]
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
                    sent = next((done[other] for other in before if rank_of[other.stage] != rank), -1)
                    # What follows waits for a gradient of inputs, whether or not those of weights are made with it.
                    made = ScheduledOp(Phase.INPUT, turn.stage, turn.microbatch) if turn.phase is Phase.BACKWARD else turn
                    done[made] = len(steps)
                    kind, _ = kinds.setdefault((turn.phase, turn.stage), (len(kinds), turn))
                    steps.append(_Step(rank, kind, sent))
                    next_of[rank] += 1
                    moved = True
        if len(steps) < sum(map(len, order)):
            raise ValueError("the ranks wait for each other")
        alive = (_most_alive(turns) / len({turn.stage for turn in turns}) for turns in order)
        of_kinds = Counter(step.kind for step in steps)
        numbers = tuple((rank_of[turn.stage], of_kinds[kind]) for kind, turn in kinds.values())
        return cls(order, tuple(steps), tuple(turn for _, turn in kinds.values()), numbers, tuple(alive))

    def run(self, cost: Callable[[ScheduledOp], float], message: float, *, asked_late: bool) -> Replay:
        """Run it; see :func:`replay`."""
        costs = [cost(turn) for turn in self.kinds]
        free_at = [0.0] * len(self.order)
        begins: list[float] = []
        ends: list[float] = []
        for rank, kind, sent in self.steps:
            begin = free_at[rank]
            if sent >= 0:
                there = ends[sent]
                if asked_late:
                    begin = max(begin, there) + message
                elif there + message > begin:
                    begin = there + message
            end = free_at[rank] = begin + costs[kind]
            begins.append(begin)
            ends.append(end)
        length, busy = max(free_at), [0.0] * len(self.order)
        for (rank, number), seconds in zip(self.numbers, costs, strict=True):
            busy[rank] += number * seconds
        idle = tuple(1 - own / length for own in busy)
        return Replay(self.order, [step.rank for step in self.steps], begins, ends, length, idle, self.alive)


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


def replay_of_plan(plan: ShardingPlan, *, even: bool = False, message: float = 0.0, seconds: Sequence[float] = ()) -> Replay:
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
        seconds: of each stage, how long all turns of a microbatch take. Then the unit of time is a second.
    """
    options, stages = plan.options, len(plan.stages)
    pp = plan.layout.size("pp")
    again = sum(unit.activation_checkpointing is ActivationCheckpointing.FULL for unit in plan.units if unit.kind == "layer")
    recomputed = again / max(1, len(plan.layers))
    forward_only = {*range(first_trained(plan)), *range(pp, (passes_of(plan) - 1) * pp)}
    forwards = [1 / stages if even else row.cost for row in plan.stages]
    if seconds:
        forwards = [time / (1 if stage in forward_only else 3 + recomputed) for stage, time in enumerate(seconds)]
    cost = _cost_of_turns(forwards, recomputed, forward_only, first_trained(plan))
    walk = _walk_of(options.pipeline_schedule, pp, stages // pp, options.microbatches // options.runs_per_step)
    return walk.run(cost, message, asked_late=options.pipeline_schedule.single)


def _cost_of_turns(
    of_stages: Sequence[float], recomputed: float, forward_only: Collection[int] = (), first: int = 0
) -> Callable[[ScheduledOp], float]:
    """Return the duration of a turn.

    Args:
        of_stages: a forward of each stage.
        recomputed: the share of forward that backward does again.
        forward_only: stages without a gradient: those before `first`, and of passes between the first and the last one.
        first: the first stage with a trained parameter.
    """
    parts = {Phase.FORWARD: 1.0, Phase.BACKWARD: 2 + recomputed, Phase.INPUT: 1.0, Phase.WEIGHT: 1.0}

    def cost(turn: ScheduledOp) -> float:
        part = parts[turn.phase]
        if turn.phase is not Phase.FORWARD and turn.stage in forward_only:
            part = 0.0
        elif turn.stage == first and turn.phase in (Phase.INPUT, Phase.WEIGHT):
            part = 0.0 if turn.phase is Phase.INPUT else parts[Phase.BACKWARD]
        return part * of_stages[turn.stage]

    return cost


@cache
def even_replay(schedule: PipelineSchedule, pp: int, each: int, microbatches: int, recomputed: float = 0.0) -> Replay:
    """Replay a schedule of stages that take equal time and are all trained; see :func:`replay_of_plan`.

    Args:
        schedule: the schedule.
        pp: number of ranks.
        each: number of stages on a rank.
        microbatches: number of microbatches in a run.
        recomputed: the share of forward that backward does again.
    """
    cost = _cost_of_turns([1 / (pp * each)] * (pp * each), recomputed)
    return _walk_of(schedule, pp, each, microbatches).run(cost, 0.0, asked_late=schedule.single)


def receive_buffers(plan: ShardingPlan, rank: int) -> int:
    """Return the number of hidden states that torch's stages of a rank of `pp` have room for, all through the run.

    A stage has one for each microbatch of a run from the stage before, and one for each gradient from the stage after.
    """
    return len(_buffered_cuts(plan, rank)) * (plan.options.microbatches // plan.options.runs_per_step)


def receive_buffer_bytes(plan: ShardingPlan, rank: int) -> int:
    """Return the bytes of those, in microbatches of ``options.tokens`` tokens."""
    each = plan.options.microbatches // plan.options.runs_per_step
    return each * sum(crossing_bytes(plan, stage) for stage in _buffered_cuts(plan, rank))


def _buffered_cuts(plan: ShardingPlan, rank: int) -> list[int]:
    """The stages after the cuts at both ends of each stage of a rank."""
    own = [row.index for row in plan.stages if row.rank == rank]
    return [cut for stage in own for cut in (stage, stage + 1) if 0 < cut < len(plan.stages)]

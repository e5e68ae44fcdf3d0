"""What a rank of a pipeline holds when it takes a turn: microbatches in flight, gradients that wait, and what it has sent."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from meshwright.plan.axes.pipeline.schedule_turns import Phase, ScheduledOp, order_of
from meshwright.plan.given.closed_choices import PipelineSchedule
from meshwright.plan.result.sharding_plan import ShardingPlan

__all__ = ["HeldTurn", "held_turns", "turns_of_rank"]

_MAKE_GRADIENTS = (Phase.BACKWARD, Phase.WEIGHT)


@dataclass(frozen=True)
class HeldTurn:
    """A turn of a rank, whichever microbatch it is of. Numbers are of each stage of the rank, in order; this turn counts.

    Attributes:
        phase: what it is.
        stage: whose turn it is.
        last: whether it is the last one of its stage that makes gradients.
        begun: whether an earlier turn of the stage made gradients.
        over: whether the last turn of the stage that makes gradients is over.
        alive: microbatches whose activations the rank holds.
        halved: of those, the microbatches of which only the half of backward for inputs is over.
        left: outputs of other microbatches, which torch holds until the run is over, because it waits for all sends then.
        returned: gradients of inputs, which it holds as long.
    """

    phase: Phase
    stage: int
    last: bool
    begun: tuple[bool, ...]
    over: tuple[bool, ...]
    alive: tuple[int, ...]
    halved: tuple[int, ...]
    left: tuple[int, ...]
    returned: tuple[int, ...]

    def __le__(self, other: "HeldTurn") -> bool:
        """Whether another turn of the same kind holds as much of everything."""
        pairs = ((self.alive, other.alive), (self.halved, other.halved), (self.left, other.left))
        return all(a <= b for own, more in (*pairs, (self.returned, other.returned)) for a, b in zip(own, more, strict=True))


def held_turns(turns: Sequence[ScheduledOp], *, first: bool = True, final: bool = True) -> Iterator[HeldTurn]:
    """Yield what a rank holds at each of its turns of a run, in order.

    Args:
        turns: the turns.
        first: whether the run is the first one of a step: later ones begin with gradients.
        final: whether it is the last one, which reduces them.
    """
    own = sorted({turn.stage for turn in turns})
    ends = {turn.stage: number for number, turn in enumerate(turns) if turn.phase in _MAKE_GRADIENTS}
    alive, halved, forwards, returned = (dict.fromkeys(own, 0) for _ in range(4))
    begun, over = dict.fromkeys(own, not first), dict.fromkeys(own, False)
    for number, turn in enumerate(turns):
        stage, phase = turn.stage, turn.phase
        alive[stage] += phase is Phase.FORWARD
        forwards[stage] += phase is Phase.FORWARD
        halved[stage] += phase is Phase.INPUT
        returned[stage] += phase in (Phase.INPUT, Phase.BACKWARD)
        last = final and ends.get(stage) == number
        yield HeldTurn(
            phase,
            stage,
            last,
            begun=tuple(begun.values()),
            over=tuple(over.values()),
            alive=tuple(alive.values()),
            halved=tuple(halved.values()),
            left=tuple(forwards[one] - alive[one] for one in own),
            returned=tuple(returned.values()),
        )
        if phase in _MAKE_GRADIENTS:
            alive[stage] -= 1
            halved[stage] -= phase is Phase.WEIGHT
            begun[stage], over[stage] = True, last


def turns_of_rank(plan: ShardingPlan, rank: int) -> Sequence[HeldTurn]:
    """Return the turns of a step on a rank of `pp` without those that hold less of everything than another of their kind."""
    options, pp = plan.options, plan.layout.size("pp")
    runs, each = options.runs_per_step, len(plan.stages) // pp
    return _fullest(options.pipeline_schedule, pp, each, options.microbatches // runs, runs)[rank]


@cache
def _fullest(schedule: PipelineSchedule, pp: int, each: int, microbatches: int, runs: int) -> tuple[tuple[HeldTurn, ...], ...]:
    return tuple(tuple(_without_smaller(turns, runs)) for turns in order_of(schedule, pp, each, microbatches))


def _without_smaller(turns: Sequence[ScheduledOp], runs: int) -> Iterator[HeldTurn]:
    kinds: dict[tuple[object, ...], list[HeldTurn]] = {}
    for turn in reversed(list(held_turns(turns, first=runs == 1))):  # the last run holds the most
        kind = kinds.setdefault((turn.phase, turn.stage, turn.last, turn.begun, turn.over), [])
        if not any(turn <= other for other in kind):
            kind.append(turn)
    for kind in kinds.values():
        yield from (turn for turn in kind if not any(turn <= other for other in kind if other is not turn))

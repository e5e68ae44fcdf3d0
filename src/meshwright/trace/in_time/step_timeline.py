"""The forecast of a step in time: what each rank of a pipeline computes, sends and waits for, and when.

Nothing is forecast here. The parts of :func:`meshwright.trace.time.forecast_time` are laid out in the order in which the
replays of FSDP2 (:mod:`meshwright.trace.in_time.fsdp_replay`) and of the pipeline (:mod:`meshwright.trace.overlap`) have them,
and stretched to what the forecast says:

- What computes, and the collectives of ``tp``, ``cp`` and ``ep`` inside of layers, take as long as the forecast says of the
  slowest rank of ``pp``. Where in a layer a collective stands is not known: it is drawn behind the layer's compute.
- What the replay of FSDP2 does not hide is a wait. Hardware hides less than the replay (`Hardware.overlap`): this rest is drawn
  as compute that is slowed down while collectives run beside it.
- With a pipeline, turns begin when its replay says so. Waits of the slowest rank for its data ranks make its turns longer, and
  move those of the other ranks, which wait for theirs at the same time.

So the step ends when the forecast says, and for the slowest rank the events of each part add up to the part.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.plan.axes.data.prefetch import layer_groups
from meshwright.plan.axes.pipeline.schedule_turns import Phase, ScheduledOp, awaited
from meshwright.plan.axes.pipeline.stage_plan import stages_of_rank
from meshwright.plan.axes.pipeline.stage_rows import rows_on_stages
from meshwright.plan.cost.hardware import Hardware
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.trace.few_layers import Traces
from meshwright.trace.in_time.fsdp_replay import Recording
from meshwright.trace.in_time.turn_pieces import Piece, Turned, turn_pieces, turned
from meshwright.trace.layer_work import LayerWork, Rates, layers_on
from meshwright.trace.overlap import pipeline_times
from meshwright.trace.time import COMPUTE, TEACHER, StageTurns, TimeForecast, price_of, seconds_of_stages, stage_turns
from meshwright.train.start.setup import RunSetup

__all__ = ["LANES", "Event", "PhaseSpan", "RankTimeline", "StepTimeline", "step_timeline"]

LANES = ("compute", "fsdp", "replicas", "tp", "cp", "ep", "pp", "host")
"""Lanes of a rank: what computes and its waits, gathers and reductions over data ranks, all-reduces over replicas, the
collectives of the axes, messages of the pipeline, copies to the host and back."""

_NO_AXIS = (*COMPUTE, "bubble", "pp", "data ranks", "update", "host", TEACHER, "beyond")

MOST_PIECES = 60_000
"""Turns of layers, above which a microbatch on a stage is one piece."""


@dataclass(frozen=True)
class Event:
    """Something that takes time. Times are in seconds from the begin of the step.

    Attributes:
        lane: one of :data:`LANES`, or another axis.
        part: ``compute``, ``slowed`` (by collectives beside it), ``waits`` (for data ranks), ``all_gather``,
            ``reduce_scatter``, ``all_reduce``, ``tp``, ``cp``, ``ep``, ``message``, ``host``, ``update``, ``beyond``,
            ``teacher``.
        name: what it is of: a layer, a unit.
        phase: ``forward``, ``backward`` or empty.
        microbatch: its microbatch, counted from 0; -1: none.
        begin: when it begins.
        end: when it ends.
        seconds: how long it takes by itself; a collective that is drawn beside slowed compute takes longer.
    """

    lane: str
    part: str
    name: str
    phase: str
    microbatch: int
    begin: float
    end: float
    seconds: float


@dataclass(frozen=True)
class PhaseSpan:
    """When a microbatch is on a stage, in one direction: its compute, its waits, and its collectives."""

    stage: int
    microbatch: int
    phase: Phase
    begin: float
    end: float


@dataclass(frozen=True)
class RankTimeline:
    """A rank of `pp`; all ranks of its other axes are alike.

    Attributes:
        rank: its index.
        events: by lane, and in a lane by time.
        spans: its microbatches, by time.
    """

    rank: int
    events: tuple[Event, ...]
    spans: tuple[PhaseSpan, ...]

    def total(self, *parts: str, lane: str = "") -> float:
        """Return the seconds by themselves of the events of some parts, in one lane or in all."""
        return sum(event.seconds for event in self.events if event.part in parts and lane in ("", event.lane))


@dataclass(frozen=True)
class StepTimeline:
    """The forecast of a step in time.

    Attributes:
        seconds: duration of the step, which is that of the forecast.
        begin: when the first microbatch begins: after the pass of a teacher.
        end: when the last microbatch ends, and the update begins.
        ranks: those of `pp`.
        slowest: the one that the forecast is of.
    """

    seconds: float
    begin: float
    end: float
    ranks: tuple[RankTimeline, ...]
    slowest: int


@dataclass
class _Stage:
    """A stage of a rank: its turns, and the record of their replay."""

    turns: StageTurns
    recording: Recording = field(default_factory=Recording)
    contents: dict[tuple[int, bool], Turned] = field(default_factory=dict)


@dataclass(frozen=True)
class _Slot:
    """A turn in time, before waits for data ranks are added; ``length`` is what is busy."""

    stage: int
    microbatch: int
    phase: Phase
    begin: float
    length: float

    @property
    def end(self) -> float:
        return self.begin + self.length


def step_timeline(setup: RunSetup, hardware: Hardware, traces: Traces, forecast: TimeForecast) -> StepTimeline:
    """Lay out a forecast in time. No process group may exist.

    Args:
        setup: the run.
        hardware: its devices.
        traces: the trace that the forecast was made from.
        forecast: the forecast.
    """
    plan, parts = setup.plan, forecast.parts
    axes = {name: seconds for name, seconds in parts.items() if name not in _NO_AXIS and seconds > 0}
    busy = sum(parts.get(name, 0.0) for name in COMPUTE) + sum(axes.values())
    begin = parts.get(TEACHER, 0.0)
    whole, rates = LayerWork.of(traces), Rates.of(setup, hardware)
    layers = len(layers_on(plan, stages_of_rank(plan, forecast.rank)))
    inside = sum(axes.get(axis, 0.0) for axis in ("tp", "cp", "ep")) / plan.options.microbatches / max(1, layers)
    stages = {rank: _stages(plan, hardware, whole, rates, rank, inside) for rank in range(plan.layout.size("pp"))}
    seconds = seconds_of_stages(plan, whole, rates, inside) if plan.stages else []
    slots, messages = _slots(plan, forecast.rank, busy, seconds, hardware, stages)
    tail = {"host": parts.get("host", 0.0), "update": parts["update"], "beyond": parts["beyond"]}
    warp = _Warp.of(slots[forecast.rank], stages[forecast.rank])
    lean = _lean(slots[forecast.rank], stages[forecast.rank], sum(axes.values()))
    end = forecast.step_seconds - sum(tail.values())
    made = []
    for rank, own in slots.items():
        events: list[Event] = []
        spans: list[PhaseSpan] = []
        for slot in own:
            first, last = begin + warp(slot.begin), begin + warp(slot.end)
            spans.append(PhaseSpan(slot.stage, slot.microbatch, slot.phase, first, last))
            content = stages[rank][slot.stage].contents[slot.microbatch, slot.phase is Phase.FORWARD].of(slot.phase)
            fill = turn_pieces(content, slot.length, last - first, lean)
            events += _events(fill.pieces, slot, first, axes)
            events += [
                Event(
                    "replicas" if kind == "all_reduce" else "fsdp", kind, unit, _word(slot.phase), slot.microbatch,
                    first + early, first + late, seconds,
                )
                for kind, unit, early, late, seconds in fill.calls
            ]  # fmt: skip
        received = [(name, begin + warp(early), begin + warp(late), micro) for name, early, late, micro in messages[rank]]
        events += [Event("pp", "message", name, "", micro, first, last, last - first) for name, first, last, micro in received]
        events += _around(forecast, tail, end)
        order = {lane: place for place, lane in enumerate(LANES)}
        events.sort(key=lambda event: (order.get(event.lane, len(order)), event.begin))
        made.append(RankTimeline(rank, tuple(events), tuple(spans)))
    return StepTimeline(forecast.step_seconds, begin, end, tuple(made), forecast.rank)


def _stages(
    plan: ShardingPlan, hardware: Hardware, whole: LayerWork, rates: Rates, rank: int, inside: float
) -> dict[int, _Stage]:
    """Replay FSDP2 on the stages of a rank, whose layers wait for collectives ``inside`` of them."""
    own = rows_on_stages(plan, stages_of_rank(plan, rank))
    microbatches = plan.options.microbatches
    found = {}
    for index in stages_of_rank(plan, rank):
        stage = _Stage(stage_turns(plan, index, whole, rates, inside))
        exposed = stage.turns.exposed(hardware, stage.recording)
        fine = 2 * microbatches * len(own.layers) * plan.layout.size("pp") <= MOST_PIECES
        inside_of = {
            unit.name: stage.turns.waits / len(turn)
            for turn in layer_groups(stage.turns.plan.shared).turns
            for unit in turn
            if turn[0].name in stage.turns.turns
        }
        stage.contents = turned(stage.recording, exposed, inside_of, fine=fine)
        found[index] = stage
    return found


def _slots(
    plan: ShardingPlan,
    slowest: int,
    busy: float,
    seconds: Sequence[float],
    hardware: Hardware,
    stages: Mapping[int, Mapping[int, _Stage]],
) -> tuple[dict[int, list[_Slot]], dict[int, list[tuple[str, float, float, int]]]]:
    """Return the turns of each rank, and the messages that it receives: name, begin, end, microbatch."""
    if not plan.stages:
        contents = stages[0][0].contents
        scale = busy / sum(content.busy for content in contents.values())
        own, now = [], 0.0
        for (microbatch, forward), content in contents.items():
            phase = Phase.FORWARD if forward else Phase.BACKWARD
            own.append(_Slot(0, microbatch, phase, now, content.busy * scale))
            now = own[-1].end
        return {0: own}, {0: []}
    times = pipeline_times(plan, slowest, seconds, price_of(plan.layout, hardware))
    run, runs = times.run, plan.options.runs_per_step
    each, last = plan.options.microbatches // runs, len(plan.stages) - 1
    rank_of = {row.index: row.rank for row in plan.stages}
    ends = {}
    for spans in run.spans:
        for span in spans:
            turn = span.turn
            key = ScheduledOp(Phase.INPUT, turn.stage, turn.microbatch) if turn.phase is Phase.BACKWARD else turn
            ends[key] = span.end
    slots: dict[int, list[_Slot]] = {}
    messages: dict[int, list[tuple[str, float, float, int]]] = {}
    for rank, spans in enumerate(run.spans):
        slots[rank], messages[rank] = [], []
        for index in range(runs):
            later = index * run.length
            for span in spans:
                turn, micro = span.turn, index * each + span.turn.microbatch
                begin, length = span.begin, span.end - span.begin
                slots[rank].append(_Slot(turn.stage, micro, turn.phase, later + begin, length))
                for other in awaited(turn, last):
                    if rank_of[other.stage] != rank and times.message:
                        early = begin - times.message if plan.options.pipeline_schedule.single else ends[other]
                        name = f"from stage {other.stage}"
                        messages[rank].append((name, later + early, later + early + times.message, micro))
    return slots, messages


@dataclass(frozen=True)
class _Warp:
    """From time without waits for data ranks to time with those of the slowest rank."""

    before: tuple[float, ...]
    after: tuple[float, ...]

    @classmethod
    def of(cls, slots: Sequence[_Slot], stages: Mapping[int, _Stage]) -> "_Warp":
        before, after, added = [0.0], [0.0], 0.0
        for slot in slots:
            content = stages[slot.stage].contents[slot.microbatch, slot.phase is Phase.FORWARD].of(slot.phase)
            before += [slot.begin, slot.end]
            after += [slot.begin + added, slot.end + added + content.added]
            added += content.added
        return cls(tuple(before), tuple(after))

    def __call__(self, time: float) -> float:
        """Return a time with waits."""
        place = min(bisect_right(self.before, time), len(self.before) - 1)
        low, high = self.before[place - 1], self.before[place]
        if high <= low or time >= high:
            return self.after[place] + max(0.0, time - high)
        return self.after[place - 1] + (time - low) / (high - low) * (self.after[place] - self.after[place - 1])


def _lean(slots: Sequence[_Slot], stages: Mapping[int, _Stage], axes: float) -> float:
    """Return by what collectives inside of layers are scaled, so that those of the slowest rank add up to the forecast."""
    found = 0.0
    for slot in slots:
        content = stages[slot.stage].contents[slot.microbatch, slot.phase is Phase.FORWARD].of(slot.phase)
        found += content.inside * (slot.length / content.busy if content.busy else 0.0)
    return axes / found if found else 0.0


def _events(pieces: Sequence[Piece], slot: _Slot, begin: float, axes: Mapping[str, float]) -> Iterator[Event]:
    phase, micro, all_axes = _word(slot.phase), slot.microbatch, sum(axes.values())
    for piece in pieces:
        first, name = begin + piece.begin, piece.name or "embedding and norms"
        for part, seconds in (("compute", piece.compute), ("slowed", piece.slowed), ("waits", piece.waits)):
            if seconds > 0:
                yield Event("compute", part, name, phase, micro, first, first + seconds, seconds)
                first += seconds
        for axis, whole in axes.items():
            if piece.inside > 0:
                seconds = piece.inside * whole / all_axes
                yield Event(axis, axis, name, phase, micro, first, first + seconds, seconds)
                first += seconds


def _around(forecast: TimeForecast, tail: Mapping[str, float], end: float) -> Iterator[Event]:
    """Yield what stands before and after the microbatches."""
    now = 0.0
    for part, seconds in forecast.teacher.items():
        lane = part if part in LANES else "fsdp" if part == "data ranks" else "compute"
        if seconds > 0:
            yield Event(lane, TEACHER, part, "forward", -1, now, now + seconds, seconds)
            now += seconds
    now = end
    for part, seconds in tail.items():
        if seconds > 0:
            yield Event("host" if part == "host" else "compute", part, part, "", -1, now, now + seconds, seconds)
            now += seconds


def _word(phase: Phase) -> str:
    return "forward" if phase is Phase.FORWARD else "backward"

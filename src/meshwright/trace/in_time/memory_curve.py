"""What a rank holds in the course of a step: the moments of the forecast, at the times of the timeline.

Between two moments, what a rank holds is drawn as a line. Every microbatch is drawn as the fullest one of the trace, but the
first begins without gradients. So the highest point is the peak of the forecast.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.plan.axes.pipeline.held_turns import HeldTurn, held_turns
from meshwright.plan.axes.pipeline.schedule_turns import Phase, ScheduledOp
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.trace.few_layers import Traces
from meshwright.trace.held.memory import MemoryForecast, memory_moments
from meshwright.trace.held.stage_memory import StageMemory, TracedSizes
from meshwright.trace.in_time.fsdp_replay import HEAD
from meshwright.trace.in_time.step_timeline import RankTimeline, StepTimeline
from meshwright.trace.step import FORWARD, LOSS, UPDATE
from meshwright.train.start.setup import RunSetup

__all__ = ["MemoryPoint", "memory_curve"]

ON_HOST = ("parameters", "gradients", "optimizer")
"""What is in the host's memory with `cpu_offload`."""

STAYS = ("parameters", "optimizer", "buffers")
"""What a rank holds between two steps."""

MOST_POINTS = 2_000


@dataclass(frozen=True)
class MemoryPoint:
    """What a rank holds at a time of a step.

    Attributes:
        time: seconds from the begin of the step.
        moment: what it does then.
        parts: bytes by what they are for, as in :class:`~meshwright.trace.held.memory.MemoryForecast`.
    """

    time: float
    moment: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


def memory_curve(setup: RunSetup, traces: Traces, timeline: StepTimeline) -> dict[int, list[MemoryPoint]]:
    """Return what each rank of `pp` holds, by time. No process group may exist."""
    moments = {} if setup.plan.stages else {one.moment: one for one in memory_moments(setup, traces)}
    held = StageMemory.of_ranks(setup.plan, TracedSizes.of(traces)) if setup.plan.stages else []
    found = {}
    for rank in timeline.ranks:
        if held:
            points = _of_stages(held[rank.rank], rank, timeline)
        else:
            points = _of_layers(setup.plan, moments, rank, timeline)
        found[rank.rank] = [_on_device(point) for point in points] if setup.plan.options.cpu_offload else points
    return found


def _on_device(point: MemoryPoint) -> MemoryPoint:
    return MemoryPoint(point.time, point.moment, {**point.parts, **dict.fromkeys(ON_HOST, 0)})


def _only(parts: Mapping[str, int], kept: tuple[str, ...]) -> dict[str, int]:
    return {name: size if name in kept else 0 for name, size in parts.items()}


def _of_layers(
    plan: ShardingPlan, moments: Mapping[str, MemoryForecast], rank: RankTimeline, timeline: StepTimeline
) -> list[MemoryPoint]:
    layers = {name: place for place, name in enumerate(plan.layers)}
    backward = {
        layers[name] if name in layers else int(name.rpartition(" ")[2]): moment.parts
        for name, moment in moments.items()
        if name not in (FORWARD, LOSS, UPDATE)
    }
    forward, loss, update = (moments[name].parts for name in (FORWARD, LOSS, UPDATE))
    between = _only(forward, (*STAYS, "gathered", "gradients", "unsharded_gradients"))
    before = _only(forward, STAYS)
    fine = len(layers) * plan.options.microbatches <= MOST_POINTS
    # A step of many microbatches shows the moments that were traced, and the others as lines between them.
    places = sorted(range(len(layers)) if fine else backward, reverse=True)
    begins: dict[tuple[int, str, str], float] = {}
    for event in rank.events:
        if event.part == "compute":
            begins.setdefault((event.microbatch, event.phase, event.name), event.begin)
    points = [MemoryPoint(0.0, "begin", before)]
    for span in rank.spans:
        if span.phase is Phase.FORWARD:
            through = begins.get((span.microbatch, "forward", HEAD), span.end)
            points.append(MemoryPoint(span.begin, FORWARD, between if span.microbatch else before))
            points += [MemoryPoint(through, FORWARD, forward), MemoryPoint(span.end, LOSS, loss)]
            continue
        length = (span.end - span.begin) / max(1, len(layers))
        for place in places:
            even = span.begin + (len(layers) - 1 - place) * length
            time = begins.get((span.microbatch, "backward", plan.layers[place]), even)
            points.append(MemoryPoint(time, f"backward of layer {place}", _at(backward, place)))
        points.append(MemoryPoint(span.end, "backward", {**between, "gradients": backward[min(backward)]["gradients"]}))
    points += [MemoryPoint(timeline.end, UPDATE, update), MemoryPoint(timeline.seconds, UPDATE, update)]
    return points


def _at(known: Mapping[int, Mapping[str, int]], place: int) -> Mapping[str, int]:
    """Return the parts at a layer: as traced, or on the line between the two nearest layers that were."""
    if place in known:
        return known[place]
    low, high = max(one for one in known if one < place), min(one for one in known if one > place)
    share = (place - low) / (high - low)
    return {name: round(size + share * (known[high][name] - size)) for name, size in known[low].items()}


def _of_stages(held: StageMemory, rank: RankTimeline, timeline: StepTimeline) -> list[MemoryPoint]:
    points, words = [MemoryPoint(0.0, "begin", held.idle)], {Phase.FORWARD: "forward", Phase.BACKWARD: "backward"}
    runs = held.plan.options.runs_per_step
    each = held.plan.options.microbatches // runs
    turns: list[HeldTurn] = []
    for run in range(runs):
        own = [span for span in rank.spans if span.microbatch // each == run]
        ops = [ScheduledOp(span.phase, span.stage, span.microbatch) for span in own]
        turns += held_turns(ops, first=run == 0, final=run == runs - 1)
    for span, turn in zip(rank.spans, turns, strict=True):
        moment, parts = f"{words.get(span.phase, 'backward')} of microbatch {span.microbatch + 1}", held.at(turn)
        points += [MemoryPoint(span.begin, moment, parts), MemoryPoint(span.end, moment, parts)]
    update = [MemoryPoint(time, UPDATE, held.update) for time in (timeline.end, timeline.seconds)]
    return [*points, MemoryPoint(timeline.end, "waits for the other stages", points[-1].parts), *update]

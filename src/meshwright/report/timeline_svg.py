"""The timeline of a step: the ranks of a pipeline one below the other, and all lanes of the slowest rank.

An SVG has a path for each kind of event in a lane, in units of a thousandth of a thousandth of the step. The script reads the
begin and the end of each event from its path, and what it is from two numbers beside it: the place of its name in a list, and
its microbatch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from meshwright.plan.axes.pipeline.schedule_turns import Phase
from meshwright.plan.show.summary import seconds_text
from meshwright.report.markup import Section, attributes, figure, legend, table, tag, ticks
from meshwright.trace.in_time.step_timeline import LANES, Event, RankTimeline, StepTimeline

__all__ = ["timeline_section"]

WIDE = 1_000_000
"""Units of the width of a drawing."""

MOST_DETAIL, MOST_OVERVIEW = 4_500, 2_500
"""Events in the drawing of a rank, and of all ranks: more of them are merged, so that a page stays small."""

WORDS = {
    "forward": "forward",
    "backward": "backward",
    "slowed": "slowed down by collectives beside it",
    "waits": "waits for data ranks",
    "all_gather": "all-gather of parameters",
    "reduce_scatter": "reduce-scatter of gradients",
    "all_reduce": "all-reduce over replicas",
    "tp": "communication over tp",
    "cp": "communication over cp",
    "ep": "communication over ep",
    "message": "message of the pipeline",
    "host": "copies to the host and back",
    "update": "update of the optimizer",
    "beyond": "beyond all parts, as calibrated",
    "teacher": "pass of the teacher",
}
"""Kinds of events, which are classes of colours, and what they are."""


@dataclass(frozen=True)
class _Box:
    """An event as it is drawn, in units of the drawing."""

    kind: str
    name: str
    microbatch: int
    begin: int
    end: int
    count: int = 1


def timeline_section(timeline: StepTimeline) -> Section:
    """Return the part of a page with the timeline of a step."""
    slowest = timeline.ranks[timeline.slowest]
    names: dict[str, int] = {}
    body, rows = "", []
    if len(timeline.ranks) > 1:
        lanes = [(f"pp {rank.rank}", _microbatches(rank)) for rank in timeline.ranks]
        body += figure(
            _drawing("overview", lanes, timeline.seconds, names, MOST_OVERVIEW, "All ranks of pp, one below the other"),
            caption="All ranks of pp: each microbatch forward and backward, with all that it waits for on its stage. Gaps are "
            "waits for other stages.",
            alternative=_ranks_table(timeline),
            controls=_controls("overview"),
        )
    lanes = [(lane, [event for event in slowest.events if event.lane == lane]) for lane in _lanes(slowest)]
    title = f"All lanes of {'rank ' + str(slowest.rank) + ' of pp, the slowest' if len(timeline.ranks) > 1 else 'a rank'}"
    for lane, own in lanes:
        rows += _totals(lane, own, timeline.seconds)
    body += figure(
        _drawing("detail", lanes, timeline.seconds, names, MOST_DETAIL, title),
        caption=f"{title}. What stands below compute runs beside it; a gap in compute is a wait.",
        alternative=table(("lane", "what", "events", "seconds", "of the step"), rows, numeric=(2, 3, 4), caption=title),
        controls=_controls("detail"),
    )
    used = {_kind(event) for rank in timeline.ranks for event in rank.events}
    body += legend((kind, words) for kind, words in WORDS.items() if kind in used)
    lead = (
        f"The forecast, {seconds_text(timeline.seconds)}, in the order in which FSDP2 and the schedule run. Point at an event, "
        "or choose the drawing and use the arrow keys; + and - zoom."
    )
    data = {"seconds": timeline.seconds, "names": list(names), "words": WORDS}
    return Section("timeline", "A step in time", body, data, lead)


def _microbatches(rank: RankTimeline) -> list[Event]:
    """Return the microbatches of a rank, and what stands before and after them, for a drawing in which a rank has one lane."""
    spans = [
        Event(
            "compute",
            "compute",
            f"stage {span.stage}",
            "forward" if span.phase is Phase.FORWARD else "backward",
            span.microbatch,
            span.begin,
            span.end,
            span.end - span.begin,
        )
        for span in rank.spans
    ]
    return [*spans, *(event for event in rank.events if event.microbatch < 0)]


def _lanes(rank: RankTimeline) -> list[str]:
    found = dict.fromkeys(event.lane for event in rank.events)
    return sorted(found, key=lambda lane: LANES.index(lane) if lane in LANES else len(LANES))


def _kind(event: Event) -> str:
    return event.phase if event.part == "compute" else event.part if event.part in WORDS else "tp"


def _drawing(
    key: str, lanes: Sequence[tuple[str, Sequence[Event]]], seconds: float, names: dict[str, int], most: int, title: str
) -> str:
    """Return the drawing of some lanes, each with its events."""
    all_boxes = _merged([_boxes(events, seconds) for _, events in lanes], most)
    labels, drawings = [], []
    for (lane, _), boxes in zip(lanes, all_boxes, strict=True):
        labels.append(tag("li", lane))
        by_kind: dict[str, list[_Box]] = {}
        for box in boxes:
            by_kind.setdefault(box.kind, []).append(box)
        paths = "".join(_path(kind, own, names) for kind, own in by_kind.items())
        drawings.append(f'<g data-lane="{lane}">{paths}</g>')
    height = len(lanes)
    moved = "".join(f'<g transform="translate(0 {place})">{one}</g>' for place, one in enumerate(drawings))
    svg = tag(
        "svg",
        f"<title>{title}</title><desc>Time goes to the right, from the begin of a step to its end. The table below the drawing "
        f"has the sums.</desc>{moved}",
        viewBox=f"0 0 {WIDE} {height}",
        preserveAspectRatio="none",
        role="img",
        aria_label=title,
    )
    times = "".join(
        f'<span style="left:{100 * time / seconds:.3f}%">{seconds_text(time)}</span>' for time in ticks(seconds, 10)
    )
    inner = f'<div class="wide"><div class="ticks" aria-hidden="true">{times}</div>{svg}<div class="cursor"></div></div>'
    values = attributes(id=key, style=f"--lanes:{height}", class_="timeline", data_lanes=height)
    return (
        f'<div{values}><ul class="lanes" aria-hidden="true">{"".join(labels)}</ul>'
        f'<div class="pane" tabindex="0" role="application" aria-label="{title}: left and right step through the events of a '
        f'lane, up and down change the lane, plus and minus zoom" aria-describedby="{key}-readout">{inner}</div></div>'
        f'<p class="readout" id="{key}-readout" role="status" aria-live="polite">Point at an event.</p>'
    )


def _controls(key: str) -> str:
    buttons = "".join(
        f'<button type="button" data-zoom="{how}" data-of="{key}" aria-label="{words}">{text}</button>'
        for how, text, words in (("out", "−", "zoom out"), ("in", "+", "zoom in"), ("all", "whole step", "show the whole step"))
    )
    return f'<div class="controls" role="group" aria-label="zoom">{buttons}</div>'


def _boxes(events: Iterable[Event], seconds: float) -> list[_Box]:
    found = []
    for event in sorted(events, key=lambda event: event.begin):
        begin, end = (round(time / seconds * WIDE) for time in (event.begin, event.end))
        name = event.name if event.part not in ("update", "beyond", "host") else ""
        found.append(_Box(_kind(event), name, event.microbatch, begin, max(end, begin + 1)))
    return found


def _merged(lanes: list[list[_Box]], most: int) -> list[list[_Box]]:
    """Merge events that stand side by side and are short, until there are few enough; the longest of them is shown."""
    short = WIDE // 4_000
    while sum(map(len, lanes)) > most:
        lanes, short = [_merge(boxes, short) for boxes in lanes], short * 2
    return lanes


def _merge(boxes: Sequence[_Box], short: int) -> list[_Box]:
    found: list[_Box] = []
    for box in boxes:
        last = found[-1] if found else None
        if last is not None and box.begin - last.end < short / 4 and min(box.end, box.begin + short) - last.begin < short:
            longer = box if box.end - box.begin > last.end - last.begin else last
            found[-1] = replace(longer, begin=last.begin, end=max(last.end, box.end), count=last.count + box.count)
        else:
            found.append(box)
    return found


def _path(kind: str, boxes: Sequence[_Box], names: dict[str, int]) -> str:
    """Return events of a kind as one path, from the left to the right; what they are is beside it."""
    shapes, about, pen = [], [], 0
    for box in boxes:
        wide = box.end - box.begin
        shapes.append(f"m{box.begin - pen} 0h{wide}v.8h-{wide}z")
        pen = box.begin
        place = names.setdefault(box.name, len(names))
        about.append(f"{place}.{box.microbatch + 1}" + (f".{box.count}" if box.count > 1 else ""))
    return f'<path class="{kind}" d="M0 .1{"".join(shapes)}" data-about="{" ".join(about)}"/>'


def _totals(lane: str, events: Sequence[Event], whole: float) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for kind in dict.fromkeys(map(_kind, events)):
        own = [event for event in events if _kind(event) == kind]
        seconds = sum(event.seconds for event in own)
        rows.append((lane, WORDS[kind], f"{len(own):,}", seconds_text(seconds), f"{seconds / whole:.1%}"))
    return rows


def _ranks_table(timeline: StepTimeline) -> str:
    rows = []
    for rank in timeline.ranks:
        busy = rank.total("compute", "slowed", "update")
        sent = rank.total("tp", "cp", "ep")
        waits = timeline.seconds - busy - sent
        rows.append(
            (f"pp {rank.rank}", seconds_text(busy), seconds_text(sent), seconds_text(waits), f"{waits / timeline.seconds:.1%}")
        )
    columns = ("rank", "computes", "communicates inside of layers", "waits", "of the step")
    return table(columns, rows, numeric=(1, 2, 3, 4), caption="Ranks of pp in a step")

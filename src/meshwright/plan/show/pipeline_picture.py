"""A pipeline's schedule as a picture, for a terminal and as SVG: ranks down, time across, each phase in its colour."""

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.plan.axes.pipeline.replay import Replay, Span, replay_of_plan
from meshwright.plan.axes.pipeline.schedule_turns import Phase
from meshwright.plan.result.sharding_plan import ShardingPlan

__all__ = ["drawing", "timeline", "timeline_svg"]

_COLOURS = {
    Phase.FORWARD: ("#9cc4ea", "forward"),
    Phase.BACKWARD: ("#8fcf9f", "backward"),
    Phase.INPUT: ("#a7e0d3", "backward for inputs"),
    Phase.WEIGHT: ("#f3cf7a", "backward for weights"),
}
_IDLE = "#eeeeee"
_LATER = ("#6f9fce", "#5fae74", "#78bfae", "#d9ab45")
"""The colours of the same phases on every second stage of a rank."""

_LEFT, _TOP, _HEIGHT, _GAP, _UNIT = 70, 58, 26, 6, 26
"""Pixels of the SVG: margins, a rank's bar, the space between bars, and the width of an average forward of a stage."""


def timeline(plan: ShardingPlan, width: int = 120) -> RenderableType:
    """Return the schedule of a plan as lines of text.

    Args:
        plan: a plan with stages.
        width: number of characters of a line. A forward or backward is ``f``, ``b``, ``i`` (for inputs) or ``w`` (for weights)
            with the number of its microbatch, if that fits; a rank waits at ``·``.
    """
    run = replay_of_plan(plan)
    columns = max(10, width - 9)
    lines: list[RenderableType] = [Text(_title(plan, run), style="bold")]
    for rank, spans in enumerate(run.spans):
        line = Text(f"rank {rank:<3} ")
        reached = 0
        for span in spans:
            begin, end = (round(time / run.length * columns) for time in (span.begin, span.end))
            line.append("·" * (begin - reached), style="dim")
            letter = str(span.turn.phase).lower()
            label = f"{letter}{span.turn.microbatch + 1}"
            size = end - begin
            label = label.ljust(size, letter) if len(label) <= size else letter * size
            line.append(label, style=f"black on {_colour(span, spans)}")
            reached = end
        line.append("·" * (columns - reached), style="dim")
        lines.append(line)
    legend = Text()
    for phase in _phases(run):
        legend.append(f" {str(phase).lower()} ", style=f"black on {_COLOURS[phase][0]}")
        legend.append(f" {_COLOURS[phase][1]}   ")
    legend.append("· waits")
    return Group(*lines, legend)


def timeline_svg(plan: ShardingPlan) -> str:
    """Return the schedule of a plan as the text of an SVG file."""
    run = replay_of_plan(plan)
    return drawing(run, _title(plan, run), 1 / len(plan.stages))


def drawing(run: Replay, title: str, forward: float) -> str:
    """Return a run as the text of an SVG file.

    Args:
        run: the run.
        title: what is written above it.
        forward: duration of an average forward of a stage; the width follows from it.
    """
    scale = _UNIT / forward
    width, height = _LEFT + run.length * scale + 20, _TOP + len(run.spans) * (_HEIGHT + _GAP) + 34
    font = "font-family='sans-serif'"

    def parts() -> Iterator[str]:
        size = f"width='{width:.0f}' height='{height}'"
        yield f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:.0f} {height}' {size}>"
        yield f"<rect {size} fill='white'/>"
        yield f"<text x='14' y='26' {font} font-size='15'>{escape(title)}</text>"
        for rank, spans in enumerate(run.spans):
            top = _TOP + rank * (_HEIGHT + _GAP)
            yield f"<text x='14' y='{top + 18}' {font} font-size='13'>rank {rank}</text>"
            yield f"<rect x='{_LEFT}' y='{top}' width='{run.length * scale:.1f}' height='{_HEIGHT}' fill='{_IDLE}'/>"
            for span in spans:
                left, wide = _LEFT + span.begin * scale, (span.end - span.begin) * scale
                yield (
                    f"<rect x='{left:.1f}' y='{top}' width='{wide:.1f}' height='{_HEIGHT}' fill='{_colour(span, spans)}' "
                    f"stroke='#555' stroke-width='0.5'><title>{_words(span)}</title></rect>"
                )
                if wide >= 9 * len(number := str(span.turn.microbatch + 1)):
                    middle = f"x='{left + wide / 2:.1f}' y='{top + 17}' text-anchor='middle'"
                    yield f"<text {middle} {font} font-size='11'>{number}</text>"
        left, top = _LEFT, height - 16
        for phase in _phases(run):
            yield f"<rect x='{left}' y='{top - 11}' width='14' height='14' fill='{_COLOURS[phase][0]}' stroke='#555'/>"
            yield f"<text x='{left + 20}' y='{top}' {font} font-size='12'>{_COLOURS[phase][1]}</text>"
            left += 40 + 7 * len(_COLOURS[phase][1])
        yield "</svg>"

    return "\n".join(parts()) + "\n"


def _title(plan: ShardingPlan, run: Replay) -> str:
    options = plan.options
    return (
        f"{options.pipeline_schedule}: {plan.layout.size('pp')} ranks of pp, {len(plan.stages)} stages, "
        f"{options.microbatches // options.runs_per_step} microbatches in a run; idle {run.bubble:.1%}"
    )


def _phases(run: Replay) -> list[Phase]:
    used = {span.turn.phase for spans in run.spans for span in spans}
    return [phase for phase in Phase if phase in used]


def _colour(span: Span, spans: Sequence[Span]) -> str:
    """The colour of a phase; that of every second stage of a rank is darker."""
    own = sorted({other.turn.stage for other in spans})
    phase = span.turn.phase
    return _LATER[list(Phase).index(phase)] if own.index(span.turn.stage) % 2 else _COLOURS[phase][0]


def _words(span: Span) -> str:
    return f"stage {span.turn.stage}, {_COLOURS[span.turn.phase][1]} of microbatch {span.turn.microbatch + 1}"

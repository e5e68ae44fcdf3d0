"""What a rank holds in the course of a step, as areas on top of each other."""

from collections.abc import Mapping, Sequence

from meshwright.plan.show.summary import human_bytes, seconds_text
from meshwright.report.markup import Section, figure, legend, table, tag, ticks
from meshwright.trace.in_time.memory_curve import MemoryPoint
from meshwright.trace.verdict import Verdict

__all__ = ["memory_section"]

PARTS = (
    "parameters", "optimizer", "gradients", "gathered", "unsharded_gradients", "activations", "logits", "communication",
    "buffers", "update", "constant",
)  # fmt: skip
"""From the bottom to the top. The last one is what does not change: allocator, reserved, a teacher."""

MOST, WIDE, HIGH = 240, 1_000, 300
"""Points in time, and units of the drawing."""

CONSTANT = ("allocator", "reserved", "teacher")


def memory_section(points: Sequence[MemoryPoint], verdict: Verdict, seconds: float, rank: str) -> Section:
    """Return the part of a page with a rank's memory.

    Args:
        points: what the rank holds, by time.
        verdict: whether it fits; what it has beside these parts is drawn on top, always the same.
        seconds: duration of the step.
        rank: which rank it is, in words.
    """
    constant = sum(verdict.parts.get(name, 0) for name in CONSTANT)
    kept = _thinned(points, seconds)
    rows = [{**{name: point.parts.get(name, 0) for name in PARTS}, "constant": constant} for point in kept]
    used = [name for name in PARTS if any(row[name] for row in rows)]
    most = max(sum(row.values()) for row in rows)
    above = most < verdict.limit_bytes / 2  # the line of the device would press all of it to the ground
    top = 1.2 * most if above else 1.06 * max(most, verdict.limit_bytes)
    paths = "".join(_area(kept, rows, used[: place + 1], seconds, top, name) for place, name in reversed(list(enumerate(used))))
    limit = HIGH - HIGH * verdict.limit_bytes / top
    title = f"Memory of {rank} in a step, by what it is for"
    svg = tag(
        "svg",
        f"<title>{title}</title><desc>The peak is {human_bytes(verdict.peak_bytes)}, {verdict.moment}; the device has "
        f"{human_bytes(verdict.limit_bytes)}.</desc>{paths}"
        + ("" if above else f'<line class="limit" x1="0" x2="{WIDE}" y1="{limit:.1f}" y2="{limit:.1f}"/>'),
        viewBox=f"0 0 {WIDE} {HIGH}",
        preserveAspectRatio="none",
        role="img",
        aria_label=title,
    )
    side = "".join(f'<span style="bottom:{100 * size / top:.2f}%">{human_bytes(size)}</span>' for size in _scale(top))
    below = "".join(f'<span style="left:{100 * time / seconds:.3f}%">{seconds_text(time)}</span>' for time in ticks(seconds, 6))
    drawing = (
        f'<div class="chart" id="memory-chart"><div class="side" aria-hidden="true">{side}</div>'
        f'<div class="pane" tabindex="0" role="application" aria-describedby="memory-chart-readout" '
        f'aria-label="{title}: left and right go through time">'
        f'<div class="wide">{svg}<div class="cursor"></div>'
        f'<span class="limit-label" style="top:{0 if above else 100 - 100 * verdict.limit_bytes / top:.2f}%">'
        f"{human_bytes(verdict.limit_bytes)} of the device{', above the drawing' if above else ''}</span></div>"
        f'<div class="ticks" aria-hidden="true">{below}</div></div></div>'
        '<p class="readout" id="memory-chart-readout" role="status" aria-live="polite">Point at a time.</p>'
    )
    words = {"constant": "allocator, reserved" + (", teacher" if verdict.parts.get("teacher") else "")}
    shown = {name: words.get(name, name.replace("_", " ")) for name in used}
    data = {
        "times": [round(point.time, 9) for point in kept],
        "moments": [point.moment for point in kept],
        "names": [shown[name] for name in used],
        "bytes": [[row[name] for row in rows] for name in used],
    }
    body = figure(
        drawing + legend((f"m-{name}", shown[name]) for name in reversed(used)),
        caption=f"{title}. The device has {human_bytes(verdict.limit_bytes)}.",
        alternative=_moments(points, constant, [name for name in used if name != "constant"], seconds),
    )
    lead = f"The peak is {human_bytes(verdict.peak_bytes)}, {verdict.moment}. Each microbatch is drawn as the fullest one."
    return Section("memory", "Memory over a step", body, data, lead)


def _thinned(points: Sequence[MemoryPoint], seconds: float) -> list[MemoryPoint]:
    """Return the points, or of each short time the one that holds the least and the one that holds the most."""
    if len(points) <= MOST:
        return list(points)
    bins: dict[int, list[MemoryPoint]] = {}
    for point in points:
        bins.setdefault(int(point.time / seconds * MOST / 2), []).append(point)
    found = []
    for own in bins.values():
        least, most = (choose(own, key=lambda point: point.total) for choose in (min, max))
        found += sorted({id(least): least, id(most): most}.values(), key=lambda point: point.time)
    return found


def _area(
    points: Sequence[MemoryPoint],
    rows: Sequence[Mapping[str, int]],
    below: Sequence[str],
    seconds: float,
    top: float,
    name: str,
) -> str:
    """Return the area from the bottom to the sum of some parts; areas above it are drawn before."""
    edge = []
    for point, row in zip(points, rows, strict=True):
        y = HIGH - HIGH * sum(row[part] for part in below) / top
        edge.append(f"{point.time / seconds * WIDE:.1f} {y:.1f}")
    return f'<path class="m-{name}" d="M0 {HIGH}L{"L".join(edge)}L{WIDE} {HIGH}z"/>'


def _scale(top: float) -> list[int]:
    """Return some round sizes up to the top."""
    step = 2**10
    while top / step > 6:
        step *= 2
    return [step * number for number in range(int(top / step) + 1)]


def _moments(points: Sequence[MemoryPoint], constant: int, used: Sequence[str], seconds: float) -> str:
    """Return the fullest point of each moment as a table."""
    fullest: dict[str, MemoryPoint] = {}
    for point in points:
        if point.moment not in fullest or point.total > fullest[point.moment].total:
            fullest[point.moment] = point
    chosen = sorted(fullest.values(), key=lambda point: -point.total)[:40]
    rows = [
        (point.moment, seconds_text(point.time), *(human_bytes(point.parts.get(name, 0)) for name in used),
         human_bytes(point.total + constant))
        for point in sorted(chosen, key=lambda point: point.time)
    ]  # fmt: skip
    columns = ("moment", "time", *(name.replace("_", " ") for name in used), "together, with what is constant")
    caption = f"Moments of a step of {seconds_text(seconds)}"
    return table(columns, rows, caption=caption, numeric=range(1, len(columns)))

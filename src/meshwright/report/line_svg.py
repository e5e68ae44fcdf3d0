"""Values by step, as lines."""

from collections.abc import Callable, Mapping, Sequence
from math import ceil, log
from typing import Any

from meshwright.report.markup import legend, table, tag, ticks
from meshwright.report.run_metrics import Series

__all__ = ["line_chart"]

WIDE, HIGH = 1_000, 260

MOST = 500
"""Points of a line; of more, each stands for some steps in a row, with the last value of them."""


def line_chart(
    key: str, title: str, lines: Mapping[str, Series], words: Callable[[float], str], form: str = "plain"
) -> tuple[str, dict[str, Any]]:
    """Return a chart, and what the script needs of it.

    Args:
        key: its id.
        title: what it shows.
        lines: name to values; the first one is drawn whole, the others with dots.
        words: writes a value.
        form: how the script writes one: ``plain``, ``bytes`` or ``seconds``.
    """
    lines = {name: _thinned(series) for name, series in lines.items()}
    at = sorted({step for series in lines.values() for step in series.steps})
    values = [value for series in lines.values() for value in series.values]
    low, high = min(values), max(values)
    free = 0.08 * (high - low) or 0.08 * abs(high) or 1.0
    bottom, top = (max(0.0, low - free) if low >= 0 else low - free), high + free
    first, last = at[0], max(at[-1], at[0] + 1)

    def place(step: float, value: float) -> str:
        return f"{(step - first) / (last - first) * WIDE:.1f} {HIGH - (value - bottom) / (top - bottom) * HIGH:.1f}"

    paths = "".join(
        f'<path class="line l{number % 5}" d="M{"L".join(map(place, series.steps, series.values))}"/>'
        for number, series in enumerate(lines.values())
    )
    svg = tag(
        "svg",
        f"<title>{title}</title><desc>From step {at[0]:,} to step {at[-1]:,}, between {words(low)} and {words(high)}.</desc>"
        + paths,
        viewBox=f"0 0 {WIDE} {HIGH}",
        preserveAspectRatio="none",
        role="img",
        aria_label=title,
    )
    unit = 1024.0 ** int(log(high, 1024)) if form == "bytes" and high >= 1 else 1.0
    each = ([*ticks((top - bottom) / unit, 5), 0.0][1] or 1.0) * unit
    shown = [each * number for number in range(ceil(bottom / each), ceil(top / each))]
    heights = [100 * (value - bottom) / (top - bottom) for value in shown]
    side = "".join(f'<span style="bottom:{y:.2f}%">{words(value)}</span>' for y, value in zip(heights, shown, strict=True))
    steps = [step for step in map(int, ticks(last, 6)) if step >= first]
    below = "".join(f'<span style="left:{100 * (step - first) / (last - first):.2f}%">{step:,}</span>' for step in steps)
    drawing = (
        f'<div class="chart" id="{key}"><div class="side" aria-hidden="true">{side}</div>'
        f'<div class="pane" tabindex="0" role="application" aria-describedby="{key}-readout" '
        f'aria-label="{title}: left and right go through steps"><div class="wide">{svg}<div class="cursor"></div></div>'
        f'<div class="ticks" aria-hidden="true">{below}</div></div></div>'
        f'<p class="readout" id="{key}-readout" role="status" aria-live="polite">Point at a step.</p>'
    )
    rows = [(f"{step:,}", *(_at(series, step, words) for series in lines.values())) for step in _some(at, 24)]
    alternative = table(("step", *lines), rows, numeric=range(1, len(lines) + 1), caption=title)
    below_it = legend((f"l{number % 5}", name) for number, name in enumerate(lines)) if len(lines) > 1 else ""
    body = (
        f"<figure><h3>{title}</h3>{drawing}{below_it}<figcaption class='unseen'>{title}, by step</figcaption>"
        f"<details class='alternative'><summary>The same as a table</summary>{alternative}</details></figure>"
    )
    by_step = [dict(zip(series.steps, series.values, strict=True)) for series in lines.values()]
    data = {
        "by": "step",
        "at": at,
        "format": form,
        "lines": [{"name": name, "values": [own.get(step) for step in at]} for name, own in zip(lines, by_step, strict=True)],
    }
    return body, data


def _thinned(series: Series) -> Series:
    each = -(-len(series.steps) // MOST)
    if each == 1:
        return series
    return Series(tuple(reversed(series.steps[::-1][::each])), tuple(reversed(series.values[::-1][::each])))


def _some(steps: Sequence[int], number: int) -> list[int]:
    each = -(-len(steps) // number)
    return list(reversed(steps[::-1][::each]))


def _at(series: Series, step: int, words: Callable[[float], str]) -> str:
    own = dict(zip(series.steps, series.values, strict=True))
    return words(own[step]) if step in own else ""

"""The candidates of a search: a scatter of speed and memory, and a table that sorts and filters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from meshwright.plan.show.summary import human_bytes, seconds_text
from meshwright.report.markup import Section, legend, tag

__all__ = ["candidates_section"]

WIDE, HIGH, EDGE = 1_000, 420, 18
"""Units of the drawing, and of its free edge."""

_KINDS = (
    ("own", "as the run has it"),
    ("best", "nothing is faster in less memory"),
    ("other", "fits"),
    ("not", "does not fit"),
)

_COLUMNS = ("layout", "tokens/s", "step", "peak", "fits", "front", "limits", "proven")
_NUMERIC = ("tokens/s", "step", "peak")


def candidates_section(rows: Sequence[Mapping[str, Any]], *, limit_bytes: int = 0, note: str = "") -> Section:
    """Return the part of a page with the candidates of a search.

    Args:
        rows: a candidate each. ``name``; ``overrides`` (text to paste); ``tokens_per_second`` (of all devices);
            ``step_seconds``; ``peak_bytes``; ``fits``; ``pareto`` (whether none is faster in less memory); ``limits`` (what
            limits it, in words); ``proven`` (whether, or in words). ``own``: whether it is the layout of the run; may be left
            out.
        limit_bytes: memory of a device, which is drawn as a line; 0: unknown.
        note: a sentence below the heading.
    """
    if not rows:
        return Section("candidates", "Candidates", tag("p", "No candidate was found."), {}, note)
    fast, full = _Range.of([row["tokens_per_second"] for row in rows]), _Range.of([row["peak_bytes"] for row in rows])
    points, lines = [], []
    # Those that are drawn last lie on top: the run's own, and the best ones.
    for place, row in sorted(enumerate(rows), key=lambda item: -[kind for kind, _ in _KINDS].index(_kind(item[1]))):
        x, y = _place(row, fast, full)
        radius = {"own": 8, "best": 6.5}.get(_kind(row), 4.5)
        points.append(f'<circle class="{_kind(row)}" data-row="{place}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>')
    best = sorted((row for row in rows if row["pareto"] and row["fits"]), key=lambda row: row["peak_bytes"])
    front = " ".join(f"{x:.1f},{y:.1f}" for x, y in (_place(row, fast, full) for row in best))
    limit = EDGE + (WIDE - 2 * EDGE) * full.share(limit_bytes)
    shown = limit_bytes > 0 and EDGE <= limit <= WIDE - EDGE
    title = "Tokens a second over the peak of memory"
    svg = tag(
        "svg",
        f"<title>{title}</title><desc>{len(rows)} candidates, {sum(bool(row['fits']) for row in rows)} of which fit. The table "
        "below has them all.</desc>"
        + (f'<line class="limit" x1="{limit:.1f}" x2="{limit:.1f}" y1="0" y2="{HIGH}"/>' if shown else "")
        + (f'<polyline class="front" points="{front}"/>' if front else "")
        + "".join(points),
        viewBox=f"0 0 {WIDE} {HIGH}",
        role="img",
        aria_label=title,
    )
    for place, row in enumerate(rows):
        lines.append(_line(place, row))
    heads = "".join(
        f'<th scope="col"{" class=n" if words in _NUMERIC else ""} aria-sort="none">'
        f'<button type="button" data-sort="{column}">{words}</button></th>'
        for column, words in enumerate(_COLUMNS)
    )
    body = (
        '<div class="controls" role="group" aria-label="filter">'
        '<label>contains <input type="search" id="candidate-text" placeholder="tp=8"></label>'
        '<label><input type="checkbox" data-only="fits"> fits</label>'
        '<label><input type="checkbox" data-only="pareto"> on the front</label>'
        '<label><input type="checkbox" data-only="proven"> proven</label>'
        '<output id="candidate-count" aria-live="polite"></output></div>'
        f'<div class="scatter" id="candidate-plot"><span class="axis up">{_three(fast.high)} tokens/s</span>'
        f'<span class="axis low">{_three(fast.low)}, {human_bytes(full.low)}</span>{svg}'
        f'<span class="axis right">peak of memory: {human_bytes(full.high)}</span></div>'
        '<p class="readout" id="candidate-readout" role="status" aria-live="polite">Point at a candidate.</p>'
        + legend((f"c-{kind}", words) for kind, words in _KINDS)
        + '<div class="scroll" tabindex="0" role="region" aria-label="candidates"><table id="candidate-table">'
        f"<caption>Candidates. The names of the columns sort.</caption><thead><tr>{heads}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )
    return Section("candidates", "Candidates", body, {"count": len(rows)}, note)


@dataclass(frozen=True)
class _Range:
    """The values of an edge of the drawing."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "_Range":
        low, high = min(values), max(values)
        free = 0.1 * (high - low) or 0.1 * high
        return cls(max(0.0, low - free), high + free)

    def share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5


def _place(row: Mapping[str, Any], fast: _Range, full: _Range) -> tuple[float, float]:
    x = EDGE + (WIDE - 2 * EDGE) * full.share(row["peak_bytes"])
    return x, HIGH - EDGE - (HIGH - 2 * EDGE) * fast.share(row["tokens_per_second"])


def _three(value: float) -> str:
    return f"{float(f'{value:.3g}'):,.10g}"


def _kind(row: Mapping[str, Any]) -> str:
    return "own" if row.get("own") else "not" if not row["fits"] else "best" if row["pareto"] else "other"


def _line(place: int, row: Mapping[str, Any]) -> str:
    """Return the row of a candidate. Its overrides unfold; the script reads what it filters by from its attributes."""
    proven = row["proven"] if isinstance(row["proven"], str) else "proven" if row["proven"] else "unproven"
    only = [
        name
        for name, holds in (("fits", row["fits"]), ("pareto", row["pareto"]), ("proven", proven.startswith("proven")))
        if holds
    ]
    own = " (as it is)" if row.get("own") else ""
    overrides = f"<details><summary>overrides</summary><code>{escape(str(row['overrides']))}</code></details>"
    cells = (
        (f'<td class="n" data-key="{row["tokens_per_second"]}">{_three(row["tokens_per_second"])}</td>'),
        (f'<td class="n" data-key="{row["step_seconds"]}">{seconds_text(row["step_seconds"])}</td>'),
        (f'<td class="n" data-key="{row["peak_bytes"]}">{human_bytes(row["peak_bytes"])}</td>'),
        f"<td>{'yes' if row['fits'] else 'no'}</td>",
        f"<td>{'yes' if row['pareto'] else ''}</td>",
        f"<td>{escape(str(row['limits']))}</td>",
        f"<td>{escape(proven)}</td>",
    )
    name = f'<th scope="row">{escape(str(row["name"]))}{own}{overrides if row["overrides"] else ""}</th>'
    return f'<tr data-row="{place}" data-is="{" ".join(only)}" class="{_kind(row)}">{name}{"".join(cells)}</tr>'

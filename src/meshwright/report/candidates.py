"""The candidates of a search: a scatter of speed and memory, and a table that sorts and filters."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from meshwright.plan.show.summary import human_bytes
from meshwright.report.markup import Section, legend, seconds_text, tag, two_digits

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
    fastest = max(row["tokens_per_second"] for row in rows) * 1.05
    fullest = max(limit_bytes, *(row["peak_bytes"] for row in rows)) * 1.05
    points, lines = [], []
    # Those that are drawn last lie on top: the run's own, and the best ones.
    for place, row in sorted(enumerate(rows), key=lambda item: -[kind for kind, _ in _KINDS].index(_kind(item[1]))):
        x = EDGE + (WIDE - 2 * EDGE) * row["peak_bytes"] / fullest
        y = HIGH - EDGE - (HIGH - 2 * EDGE) * row["tokens_per_second"] / fastest
        radius = {"own": 8, "best": 6.5}.get(_kind(row), 4.5)
        points.append(f'<circle class="{_kind(row)}" data-row="{place}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>')
    best = sorted((row for row in rows if row["pareto"] and row["fits"]), key=lambda row: row["peak_bytes"])
    front = " ".join(
        f"{EDGE + (WIDE - 2 * EDGE) * row['peak_bytes'] / fullest:.1f},"
        f"{HIGH - EDGE - (HIGH - 2 * EDGE) * row['tokens_per_second'] / fastest:.1f}"
        for row in best
    )
    limit = EDGE + (WIDE - 2 * EDGE) * limit_bytes / fullest
    title = "Tokens a second over the peak of memory"
    svg = tag(
        "svg",
        f"<title>{title}</title><desc>{len(rows)} candidates, {sum(bool(row['fits']) for row in rows)} of which fit. The table "
        "below has them all.</desc>"
        + (f'<line class="limit" x1="{limit:.1f}" x2="{limit:.1f}" y1="0" y2="{HIGH}"/>' if limit_bytes else "")
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
        f'<div class="scatter" id="candidate-plot"><span class="axis up">{two_digits(fastest / 1.05)} tokens/s</span>{svg}'
        f'<span class="axis right">peak of memory, up to {human_bytes(fullest / 1.05)}</span></div>'
        '<p class="readout" id="candidate-readout" role="status" aria-live="polite">Point at a candidate.</p>'
        + legend((f"c-{kind}", words) for kind, words in _KINDS)
        + '<div class="scroll" tabindex="0" role="region" aria-label="candidates"><table id="candidate-table">'
        f"<caption>Candidates. The names of the columns sort.</caption><thead><tr>{heads}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )
    return Section("candidates", "Candidates", body, {"count": len(rows)}, note)


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
        (f'<td class="n" data-key="{row["tokens_per_second"]}">{two_digits(row["tokens_per_second"])}</td>'),
        (f'<td class="n" data-key="{row["step_seconds"]}">{seconds_text(row["step_seconds"], 2)}</td>'),
        (f'<td class="n" data-key="{row["peak_bytes"]}">{human_bytes(row["peak_bytes"])}</td>'),
        f"<td>{'yes' if row['fits'] else 'no'}</td>",
        f"<td>{'yes' if row['pareto'] else ''}</td>",
        f"<td>{escape(str(row['limits']))}</td>",
        f"<td>{escape(proven)}</td>",
    )
    name = f'<th scope="row">{escape(str(row["name"]))}{own}{overrides if row["overrides"] else ""}</th>'
    return f'<tr data-row="{place}" data-is="{" ".join(only)}" class="{_kind(row)}">{name}{"".join(cells)}</tr>'

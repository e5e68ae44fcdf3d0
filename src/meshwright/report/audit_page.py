"""The page about an audit: its verdict, what it compared, and how far each gradient is from its tolerance."""

import math
from collections.abc import Sequence
from html import escape

from rich.table import Table

from meshwright.audit.compare import Row
from meshwright.audit.report import AuditReport
from meshwright.errors import number_of
from meshwright.plan.show.summary import human_bytes
from meshwright.report.markup import Section, cards, figure, listed, of_rich, table, tag
from meshwright.report.page import page

__all__ = ["audit_page", "failed_page"]

WIDE, HIGH = 1_000, 260

MOST_ROWS = 600
"""Comparisons in the table: the worst of them."""


def audit_page(report: AuditReport, title: str) -> str:
    """Return the page about an audit.

    Args:
        report: its outcome.
        title: what the run is called.
    """
    about = f"{report.family}, {number_of(report.world_size, 'rank')} ({report.layout}), {report.dtype}"
    gradients = [row for row in report.rows if row.what == "gradient"]
    figures = cards(
        [
            ("layout", "PASS" if report.passed else "FAIL", "computes what one process does" if report.passed else
             number_of(len(report.findings), "finding"), "good" if report.passed else "bad"),
            ("worst gradient", _number(report.worst_gradient), f"of {len(gradients):,}, relative error", ""),
            ("compared", f"{len(report.rows):,}", f"and {len(report.borders):,} at borders of modules", ""),
            ("steps", str(report.steps), number_of(report.microbatches, "microbatch"), ""),
            ("took", f"{report.seconds:.0f} s", "", ""),
        ]
    )  # fmt: skip
    kind = "proof" if report.passed else "proof fail"
    findings = listed((f"{finding.kind}: {finding.message}" for finding in report.findings), "refused")
    tables = [of_rich(one) for one in report.explain().renderables if isinstance(one, Table)]
    sections = [
        Section("verdict", "Verdict", figures + tag("p", escape(report.verdict), class_=kind) + findings),
        *([_errors(gradients)] if gradients else []),
        Section("checks", "Checks", "".join(reversed(tables))),
        _comparisons(report.rows),
        Section("collectives", "Collectives", _collectives(report)),
    ]
    return page(f"Audit of {title}", about, sections)


def failed_page(title: str, problems: Sequence[str]) -> str:
    """Return the page about an audit that did not end: ranks hung or failed."""
    body = tag("p", "The audit did not end.", class_="proof fail") + listed(problems, "refused")
    return page(f"Audit of {title}", "no verdict", [Section("verdict", "Verdict", body)])


def _number(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else "missing"


def _errors(rows: Sequence[Row]) -> Section:
    """Return the part with the error of each gradient, in the order of the model, on a scale of powers of ten."""
    low = min((math.log10(row.error) for row in rows if 0 < row.error < math.inf), default=-16.0)
    high = max(math.log10(max(row.tolerance for row in rows)), *(_power(row, low) for row in rows))
    bottom, top = math.floor(low) - 0.5, math.ceil(high) + 0.5

    def height(power: float) -> float:
        return HIGH - (power - bottom) / (top - bottom) * HIGH

    dots = []
    for place, row in enumerate(rows):
        x, y = (place + 0.5) / len(rows) * WIDE, height(_power(row, bottom + 0.2, top - 0.2))
        kind = "l2" if row.passed else "FAIL"
        dots.append(f'<rect class="dot {kind}" x="{x:.1f}" y="{y - 2:.1f}" width="4" height="4"/>')
    tolerance = max(row.tolerance for row in rows)
    line = height(math.log10(tolerance))
    title = "Error of each gradient, in the order of the model"
    svg = tag(
        "svg",
        f"<title>{title}</title><desc>{len(rows)} gradients; the worst error is {_number(max(row.error for row in rows))}, the "
        f'tolerance {tolerance:.0e}.</desc><line class="limit" x1="0" x2="{WIDE}" y1="{line:.1f}" y2="{line:.1f}"/>'
        + "".join(dots),
        viewBox=f"0 0 {WIDE} {HIGH}",
        preserveAspectRatio="none",
        role="img",
        aria_label=title,
    )
    powers = range(math.ceil(bottom), math.floor(top) + 1, max(1, round((top - bottom) / 6)))
    side = "".join(f'<span style="bottom:{100 - 100 * height(power) / HIGH:.1f}%">1e{power}</span>' for power in powers)
    drawing = (
        f'<div class="chart"><div class="side" aria-hidden="true">{side}</div><div class="pane"><div class="wide">{svg}'
        f'<span class="limit-label" style="top:{100 * line / HIGH:.1f}%">tolerance {tolerance:.0e}</span></div></div></div>'
    )
    worst = sorted(rows, key=lambda row: -row.severity if not math.isnan(row.severity) else -math.inf)[:20]
    lines = [(row.name, _number(row.error), f"{row.tolerance:.0e}", "yes" if row.passed else "no") for row in worst]
    alternative = table(("gradient", "error", "tolerance", "passed"), lines, numeric=(1, 2), caption="The worst gradients")
    lead = "Relative to the largest entry of the gradient of one process."
    return Section("errors", "Errors of gradients", figure(drawing, caption=f"{title}.", alternative=alternative), {}, lead)


def _power(row: Row, least: float, most: float = math.inf) -> float:
    """Return the power of ten of an error, inside of what is drawn."""
    if math.isnan(row.error) or row.error == math.inf:
        return most if most < math.inf else least
    return min(most, max(least, math.log10(row.error))) if row.error > 0 else least


def _comparisons(rows: Sequence[Row]) -> Section:
    shown = sorted(rows, key=lambda row: (row.passed, -(row.error if math.isfinite(row.error) else 1e99)))[:MOST_ROWS]
    heads = ("name", "what", "unit", "placements", "error", "ratio", "tolerance", "passed")
    cells = "".join(
        f'<th scope="col"{" class=n" if name in ("error", "ratio", "tolerance") else ""} aria-sort="none">'
        f'<button type="button">{name}</button></th>'
        for name in heads
    )
    lines = "".join(_comparison(row) for row in shown)
    more = len(rows) - len(shown)
    body = (
        f"<details><summary>{len(shown):,} comparisons, the worst first</summary>"
        '<div class="scroll" tabindex="0" role="region" aria-label="comparisons"><table class="plain">'
        f"<caption>The names of the columns sort.</caption><thead><tr>{cells}</tr></thead>"
        f"<tbody>{lines}</tbody></table></div></details>"
        + (tag("p", f"... and {more:,} with smaller errors.", class_="note") if more else "")
    )
    return Section("comparisons", "Comparisons", body)


def _comparison(row: Row) -> str:
    error = "missing" if row.missing else _number(row.error)
    ratio = "" if math.isnan(row.ratio) else f"{row.ratio:.6f}"
    kind = "" if row.passed else ' class="FAIL"'
    key = row.error if math.isfinite(row.error) else 1e99
    return (
        f'<tr><th scope="row">{escape(row.name)}</th><td>{escape(row.what)}</td><td>{escape(row.unit)}</td>'
        f'<td>{escape(row.placements)}</td><td class="n" data-key="{key}">{error}</td><td class="n">{ratio}</td>'
        f'<td class="n">{row.tolerance:.0e}</td><td{kind}>{"yes" if row.passed else "no"}</td></tr>'
    )


def _collectives(report: AuditReport) -> str:
    rows = [
        (axis, kind, f"{count:,}", human_bytes(report.bytes.get(axis, {}).get(kind, 0)))
        for axis, of in report.counts.items()
        for kind, count in of.items()
    ]
    if not rows:
        return tag("p", "None were counted.")
    return table(
        ("axis", "kind", "calls", "bytes"), rows, numeric=(2, 3), caption="Of rank 0, in the microbatches of the first step"
    )

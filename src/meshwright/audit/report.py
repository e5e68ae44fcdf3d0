"""The outcome of an audit: for people a table and a verdict, for programs JSON."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from meshwright.audit.borders import BorderRow
from meshwright.audit.causes.diagnose import Finding
from meshwright.audit.compare import Row
from meshwright.errors import number_of
from meshwright.shrink.small_config import Change
from meshwright.train.proofs.claim import Claim

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

__all__ = ["AuditReport", "Check"]

WORST = 8
"""Number of rows in the table of parameters."""


@dataclass(frozen=True)
class Check:
    """One line of the summary: what was compared, how much of it, and the result."""

    what: str
    compared: str
    worst: str
    passed: bool


@dataclass(frozen=True)
class AuditReport:
    """The outcome of an audit.

    Attributes:
        family: name of the model's family.
        layout: the layout, in words.
        world_size: number of ranks.
        dtype: dtype of compute.
        steps: number of optimizer steps that were compared.
        microbatches: number of microbatches of a rank in a step.
        changes: changes that the audit made to the configuration.
        losses: loss of each step, as rank 0 reports it.
        norms: norm of the gradient in each step, before clipping, as rank 0 reports it.
        counts: axis (``dp``: the axes of FSDP) to the number of collectives by kind, of rank 0 in the microbatches of the first
            step.
        bytes: the bytes of these collectives, in the same form.
        rows: all comparisons.
        borders: comparisons of inputs and outputs of modules and of their gradients, each on the rank with the largest error.
        checks: the lines of the summary.
        findings: what is wrong, causes first; empty: nothing.
        seconds: duration.
        claim: what the report is a proof of, if the audit passed.
    """

    family: str
    layout: str
    world_size: int
    dtype: str
    steps: int
    microbatches: int
    changes: tuple[Change, ...]
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    counts: dict[str, dict[str, int]]
    bytes: dict[str, dict[str, int]]
    rows: tuple[Row, ...]
    borders: tuple[BorderRow, ...]
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]
    seconds: float
    claim: Claim

    @property
    def passed(self) -> bool:
        """Return whether the layout computes what one process does."""
        return not self.findings

    @property
    def worst_gradient(self) -> float:
        """Return the largest error of a gradient."""
        return max((row.error for row in self.rows if row.what == "gradient"), default=math.inf)

    @property
    def verdict(self) -> str:
        """Return the verdict in one line."""
        where = f"{self.family}, {number_of(self.world_size, 'rank')} ({self.layout}), {self.dtype}"
        if self.findings:
            more = f" (and {len(self.findings) - 1} more)" if len(self.findings) > 1 else ""
            return f"FAIL: {self.findings[0].message}{more}"
        gradients = sum(row.what == "gradient" for row in self.rows)
        return f"PASS: {where}: {gradients} gradients as in one process, the worst off by {self.worst_gradient:.1e}"

    def to_json(self) -> str:
        """Return everything as JSON. Numbers that are not finite become null."""
        content = {"passed": self.passed, "verdict": self.verdict, "worst_gradient": self.worst_gradient, **asdict(self)}
        passed = [*(row.passed for row in self.rows), *(row.passed for row in self.borders)]
        for item, fine in zip([*content["rows"], *content["borders"]], passed, strict=True):
            item["passed"] = fine
        return json.dumps(_finite(content), indent=1, default=str)

    def _repr_html_(self) -> str:
        from meshwright.terminal import html

        return f"{html(self.explain())}<p><b>{_plain(self.verdict)}</b></p>"

    def explain(self) -> "Group":
        """Return the changes, the worst comparisons, the summary and the findings for rich to print; without the verdict."""
        from rich.console import Group

        parts: list[Any] = []
        if self.changes:
            parts.append(_changes(self.changes))
        parts.append(_worst(self.rows))
        if not all(row.passed for row in self.borders):
            parts.append(_borders(self.borders))
        parts.append(_checks(self))
        parts.extend(f"[red]{finding.kind}[/red]  {_plain(finding.message)}" for finding in self.findings)
        return Group(*parts)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _table(title: str, columns: Sequence[str]) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in ("error", "ratio", "tolerance") else "left", overflow="fold")
    return table


def _changes(changes: Sequence[Change]) -> "Table":
    table = _table("Changed for the audit", ["key", "before", "after", "why"])
    for change in changes:
        table.add_row(*(_plain(str(item)) for item in (change.key, _short(change.before), _short(change.after), change.why)))
    return table


def _short(value: Any, most: int = 40) -> str:
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _worst(rows: Sequence[Row]) -> "Table":
    """Return a table of the comparisons nearest to their tolerance, or furthest beyond it."""
    table = _table("Worst comparisons", ["", "what", "name", "unit", "placements", "error", "ratio", "tolerance"])
    judged = [row for row in rows if row.what not in ("initial value", "step") or not row.passed]
    for row in sorted(judged, key=lambda row: (row.passed, -_sortable(row.severity)))[:WORST]:
        mark = "[green]ok[/green]" if row.passed else "[red]FAIL[/red]"
        error = "missing" if row.missing else f"{row.error:.1e}"
        ratio = "" if math.isnan(row.ratio) else f"{row.ratio:.6f}"
        place = _plain(row.placements)
        table.add_row(mark, row.what, row.name, _plain(row.unit), place, error, ratio, f"{row.tolerance:.0e}")
    return table


def _borders(rows: Sequence[BorderRow]) -> "Table":
    """Return a table of the comparisons around the first border that is wrong."""
    table = _table(
        "Borders of modules, around the first that is wrong", ["", "what", "of", "module", "rank", "error", "tolerance"]
    )
    first = next(index for index, row in enumerate(rows) if not row.passed)
    for row in rows[max(0, first - WORST // 2) : first + WORST // 2]:
        mark = "[green]ok[/green]" if row.passed else "[red]FAIL[/red]"
        kind = "gradient" if row.point.gradient else "value"
        place = f"{row.point.side}{_plain(row.point.place)}"
        table.add_row(mark, kind, place, row.point.module, str(row.rank), f"{row.error:.1e}", f"{row.tolerance:.0e}")
    return table


def _sortable(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _checks(report: AuditReport) -> "Table":
    table = _table("Checks", ["", "what", "compared", "worst"])
    for check in report.checks:
        mark = "[green]ok[/green]" if check.passed else "[red]FAIL[/red]"
        table.add_row(mark, check.what, _plain(check.compared), _plain(check.worst))
    return table


def row_checks(rows: Sequence[Row], steps: int) -> Iterator[Check]:
    """Yield a line of the summary for each kind of comparison."""
    plural = {
        "initial value": "values before the first step",
        "gradient": "gradients of the first step",
        "parameter": f"movement of parameters in {number_of(steps, 'step')}",
        "buffer": f"buffers after each of {number_of(steps, 'step')}",
    }
    for what in dict.fromkeys(row.what for row in rows):
        same_kind = [row for row in rows if row.what == what]
        worst = max(same_kind, key=lambda row: _sortable(row.error))
        name = plural.get(what, f"optimizer state {what} after {number_of(steps, 'step')}")
        yield Check(name, str(len(same_kind)), f"{worst.error:.1e} {worst.name}", all(row.passed for row in same_kind))

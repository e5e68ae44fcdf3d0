"""Tables for the terminal and for docs/measurements.md, with what is needed to make them again."""

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

__all__ = ["Bound", "Table", "publish"]


@dataclass
class Table:
    """Rows of text under a title; the first column is left-aligned, the others hold numbers."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: Sequence[str] = ()

    def for_terminal(self) -> RichTable:
        """As rich prints it."""
        table = RichTable(title=self.title, title_justify="left", caption="\n".join(self.notes), caption_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="right" if index else "left", no_wrap=not index)
        for row in self.rows:
            table.add_row(*row)
        return table

    def for_markdown(self) -> str:
        """As GitHub renders it."""
        lines = [f"### {self.title}", "", _row(self.columns), _row(["---", *["---:"] * (len(self.columns) - 1)])]
        lines += [_row(row) for row in self.rows]
        lines += ["", *(f"{note}  " for note in self.notes)] if self.notes else []
        return "\n".join(lines)


@dataclass(frozen=True)
class Bound:
    """A promise: a value that must not exceed a limit."""

    what: str
    value: float
    limit: float
    unit: str = ""
    below: bool = False
    """Whether the limit itself is too much."""

    @property
    def held(self) -> bool:
        return self.value < self.limit if self.below else self.value <= self.limit

    def __str__(self) -> str:
        relation = "<" if self.below else "<="
        verdict = "ok" if self.held else "FAILED"
        return f"{verdict}: {self.what}: {self.value:.3f}{self.unit} {relation} {self.limit:.3f}{self.unit}"


def publish(tables: Sequence[Table], bounds: Sequence[Bound], markdown: Path | None, *, check: bool) -> int:
    """Print tables and bounds, write them down if wished; the exit code: 1 if ``check`` and a bound failed."""
    console = Console(width=None if sys.stdout.isatty() else 180)
    for table in tables:
        console.print(table.for_terminal())
    for bound in bounds:
        console.print(str(bound), style=None if bound.held else "red", highlight=False)
    if markdown is not None:
        parts = ["\n".join(_circumstances()), *(table.for_markdown() for table in tables)]
        parts.append("\n".join(f"- {bound}" for bound in bounds))
        markdown.write_text("\n\n".join(parts) + "\n")
        console.print(f"written: {markdown}", highlight=False)
    return int(check and not all(bound.held for bound in bounds))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _circumstances() -> list[str]:
    """Command, date, versions and machine."""
    script = Path(sys.argv[0])
    command = " ".join(["python", f"benchmarks/{script.name}", *sys.argv[1:]])
    versions = ", ".join(f"{name} {_version(name)}" for name in ("meshwright", "torch", "transformers", "accelerate"))
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return [
        f"`{command}`  ",
        f"{date}; Python {platform.python_version()}, {versions}  ",
        f"{_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}",
    ]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())

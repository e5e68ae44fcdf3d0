"""Prints what ended a command: in full where it can be read at a glance, else its beginning and where the rest is."""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from meshwright.errors import OTHER, Refusal
from meshwright.files import honour_umask

__all__ = ["MOST_LINES", "show_problems"]

MOST_LINES = 40
"""Lines of a message that are printed whole."""
SHOWN = 30
"""Lines of a longer message that are printed; the rest is in a file."""


def show_problems(problems: Sequence[Refusal], *, kind: str = "error: ", whole: bool = False) -> None:
    """Print messages to standard error, each with its code behind it.

    Args:
        problems: the messages; each may have several lines.
        kind: what each of them starts with; empty: they are no errors, and have no codes.
        whole: print them in full, however long they are.
    """
    lines = "\n".join(f"{kind}{problem}{_code(problem) if kind else ''}" for problem in problems).split("\n")
    if whole or len(lines) <= MOST_LINES:
        print("\n".join(lines), file=sys.stderr)
        return
    print("\n".join(lines[:SHOWN]), file=sys.stderr)
    file = _written(lines)
    where = f"all {len(lines):,} lines are in {file}" if file is not None else "--debug prints all"
    print(f"... and {len(lines) - SHOWN:,} more lines; {where}", file=sys.stderr)


def _code(problem: Refusal) -> str:
    return f" [{problem.code}]" if problem.code != OTHER else ""


def _written(lines: Sequence[str]) -> Path | None:
    """Write lines to a file that others may read too; ``None``: it cannot be written."""
    try:
        handle, name = tempfile.mkstemp(prefix="meshwright-error-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write("\n".join(lines) + "\n")
        honour_umask(Path(name))
    except OSError:
        return None
    return Path(name)

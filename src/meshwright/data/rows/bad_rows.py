"""Rows that cannot be used: collected while a source is read, and judged together at its end, by `data.bad_rows`."""

import re
from collections.abc import Sequence

from meshwright.data.data_config import DataConfig
from meshwright.errors import DataError, Refusal, number_of

__all__ = ["BadRows", "judge"]

EXAMPLES = 3
"""Largest number of bad rows of a kind that are listed; the others are only counted."""

KINDS = 8
"""Largest number of kinds that are listed."""

LONGEST = 400
"""Largest number of characters of a listed problem."""

_SOURCE = re.compile(r"^.*?(:\d+|, row \d+): ")
_VALUE = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\d[\d,]*")


class BadRows:
    """Counts the rows of a source, and keeps the problems of the first bad ones of each kind.

    Attributes:
        rows: number of rows read so far, with bad ones; a text file counts as one row.
        bad: number of rows that cannot be used.
        too_long: number of those that are only longer than a sequence.
        long_line: what to do about these, in one line.
        alike: number of pairs whose answers are the same, so that there is nothing to prefer; they are left out.
        mapped_away: number of rows for which `data.map` returned nothing.
        unread: columns of the rows that are not read.
    """

    def __init__(self) -> None:
        self.rows = self.bad = self.too_long = self.mapped_away = self.alike = 0
        self.long_line = ""
        self.unread: dict[str, None] = {}
        self._kinds: dict[str, list[str]] = {}
        self._counts: dict[str, int] = {}

    def add(self, error: DataError) -> None:
        """Record a bad row; its error names file and line."""
        self.bad += 1
        # Quotations of the row must be printable: no line breaks, no half of a character.
        line = " ".join(str(error).split()).encode("utf-8", "backslashreplace").decode()
        kind = _kind(line)
        if kind not in self._kinds and len(self._kinds) >= KINDS:
            kind = ""
        self._counts[kind] = self._counts.get(kind, 0) + 1
        examples = self._kinds.setdefault(kind, [])
        if kind and len(examples) < EXAMPLES:
            examples.append(line if len(line) <= LONGEST else f"{line[:LONGEST]} ...")

    @property
    def lines(self) -> list[str]:
        """What is wrong with the bad rows: a line about those that are too long, then examples of each other kind."""
        lines = [self.long_line] if self.long_line else []
        for kind, examples in self._kinds.items():
            lines += examples
            more = self._counts[kind] - len(examples)
            if more:
                lines.append(f"... and {number_of(more, 'row')} more {'with this' if kind else 'with other problems'}")
        return lines

    def judge(self, config: DataConfig) -> None:
        """Call :func:`judge` with what was recorded."""
        judge(config, self.rows, self.bad, self.too_long, self.lines)


def _kind(line: str) -> str:
    """Return a problem without its row and its values, so that rows with the same problem have the same kind."""
    words = re.split(r"[(;]", _SOURCE.sub("", line, count=1), maxsplit=1)[0]
    return _VALUE.sub("*", words) or "?"


def judge(config: DataConfig, rows: int, bad: int, too_long: int, lines: Sequence[str]) -> None:
    """Accept bad rows, or stop the run.

    Args:
        config: its `bad_rows` and `bad_rows_limit` decide.
        rows: total number of rows that were read.
        bad: number of bad rows among them.
        too_long: number of bad rows that are only longer than a sequence.
        lines: what is wrong with the bad rows (:attr:`BadRows.lines`).

    Raises:
        DataError: one problem that counts the bad rows, and one for each line. If the rows are only too long, the line about
            them alone.
    """
    if bad == 0 or (config.bad_rows == "skip" and bad <= config.bad_rows_limit * rows):
        return
    limit = f"data.bad_rows_limit={config.bad_rows_limit:g}"
    count = f"data: {bad:,} of {rows:,} rows cannot be used"
    if config.bad_rows == "skip":
        head = [
            Refusal(
                "data.bad_rows",
                f"{count}, a share of {bad / rows:.3g}; {limit} is the most that data.bad_rows='skip' leaves out",
            )
        ]
    elif bad == too_long:
        head = []
    else:
        head = [
            Refusal(
                "data.bad_rows",
                f"{count}, and data.bad_rows is 'stop'; correct them, or set 'skip', which leaves out at most a share of "
                f"{limit}",
            )
        ]
    raise DataError([*head, *(Refusal("data.bad_rows", line) for line in lines)])

"""Rows that cannot be used: collected while a source is read, and judged together at its end, by `data.bad_rows`."""

from collections.abc import Sequence

from meshwright.data.config import DataConfig
from meshwright.errors import DataError

__all__ = ["BadRows", "judge"]

SHOWN = 20
"""Largest number of bad rows that are listed; the others are only counted."""

LONGEST = 400
"""Largest number of characters of a listed problem."""


class BadRows:
    """Counts the rows of a source, and keeps the problems of the first bad ones.

    Attributes:
        rows: number of rows read so far, with bad ones; a text file counts as one row.
        bad: number of rows that cannot be used.
        shown: problems of the first bad rows, with file and line.
    """

    def __init__(self) -> None:
        self.rows = self.bad = 0
        self.shown: list[str] = []

    def add(self, error: DataError) -> None:
        """Record a bad row; its error names file and line."""
        self.bad += 1
        if len(self.shown) < SHOWN:
            # Quotations of the row must be printable: no line breaks, no half of a character.
            line = " ".join(str(error).split()).encode("utf-8", "backslashreplace").decode()
            self.shown.append(line if len(line) <= LONGEST else f"{line[:LONGEST]} ...")

    def judge(self, config: DataConfig) -> None:
        """Call :func:`judge` with what was recorded."""
        judge(config, self.rows, self.bad, self.shown)


def judge(config: DataConfig, rows: int, bad: int, shown: Sequence[str]) -> None:
    """Accept bad rows, or stop the run.

    Args:
        config: its `bad_rows` and `bad_rows_limit` decide.
        rows: total number of rows that were read.
        bad: number of bad rows among them.
        shown: problems of the first bad rows.

    Raises:
        DataError: one problem that counts the bad rows, and one for each that is shown.
    """
    if bad == 0 or (config.bad_rows == "skip" and bad <= config.bad_rows_limit * rows):
        return
    limit = f"data.bad_rows_limit={config.bad_rows_limit:g}"
    count = f"data: {bad:,} of {rows:,} rows cannot be used"
    if config.bad_rows == "stop":
        head = f"{count}, and data.bad_rows is 'stop'; correct them, or set 'skip', which leaves out at most a share of {limit}"
    else:
        head = f"{count}, a share of {bad / rows:.3g}; {limit} is the most that data.bad_rows='skip' leaves out"
    rest = [f"... and {bad - len(shown):,} more bad rows"] if bad > len(shown) else []
    raise DataError([head, *shown, *rest])

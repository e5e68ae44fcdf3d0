"""Where commands print: a terminal has a width, a file or a pipe has none."""

import os
import sys
from typing import TextIO

from rich.console import Console

__all__ = ["console"]

ANY_WIDTH = 10_000
"""Characters of a line where nothing limits them: tables then have the width of their content."""


def console(file: TextIO | None = None, *, quiet: bool = False, soft_wrap: bool = False) -> Console:
    """Return a console whose lines are as long as a terminal or the environment variable ``COLUMNS`` says, else of any length.

    Args:
        file: where it prints; ``None``: standard output.
        quiet: print nothing.
        soft_wrap: leave the breaking of lines to the terminal.
    """
    file = sys.stdout if file is None else file
    limited = file.isatty() or os.environ.get("COLUMNS", "").isdigit()
    # No emoji: the name of a part, my_parts:Notes, may have the code of one.
    width = None if limited else ANY_WIDTH
    return Console(file=file, width=width, quiet=quiet, soft_wrap=soft_wrap, emoji=False)

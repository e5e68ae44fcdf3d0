"""Where commands print: a terminal has a width, a file or a pipe has none, and a notebook shows tables as HTML."""

import os
import sys
from html import escape
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

__all__ = ["console", "html"]

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


def html(shown: RenderableType) -> str:
    """Return tables and lines as HTML, for a notebook."""
    if isinstance(shown, Group):
        return "\n".join(map(html, shown.renderables))
    if not isinstance(shown, Table):
        return f"<div>{_words(shown)}</div>"
    caption = f"<caption>{_words(shown.title)}</caption>" if shown.title else ""
    heads = "".join(f"<th>{_words(column.header)}</th>" for column in shown.columns) if shown.show_header else ""
    sides = [f' style="text-align: {column.justify}"' for column in shown.columns]
    rows = zip(*(column.cells for column in shown.columns), strict=True)
    body = "".join(
        "<tr>" + "".join(f"<td{side}>{_words(cell)}</td>" for side, cell in zip(sides, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<table>{caption}{f'<tr>{heads}</tr>' if heads else ''}{body}</table>"


def _words(shown: RenderableType) -> str:
    text = shown if isinstance(shown, Text) else Text.from_markup(str(shown))
    return escape(text.plain)

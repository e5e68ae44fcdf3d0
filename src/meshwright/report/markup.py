"""Pieces of HTML: elements with escaped text, tables, figures with a title, a description and a table in their place."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, log10
from typing import Any

from rich.table import Table
from rich.text import Text

__all__ = [
    "Section",
    "attributes",
    "cards",
    "figure",
    "legend",
    "listed",
    "of_rich",
    "table",
    "tag",
    "ticks",
]


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        key: its anchor.
        heading: what stands above it.
        body: its HTML.
        data: what the script needs of it, as values that JSON can hold.
        lead: a sentence below the heading.
    """

    key: str
    heading: str
    body: str
    data: Mapping[str, Any] = field(default_factory=dict)
    lead: str = ""


def attributes(**values: Any) -> str:
    """Return attributes of an element; ``_`` stands for ``-``, and ``None`` and ``False`` for no attribute."""
    parts = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        name = name.rstrip("_").replace("_", "-")
        parts.append(f" {name}" if value is True else f' {name}="{escape(str(value))}"')
    return "".join(parts)


def tag(name: str, content: str = "", **values: Any) -> str:
    """Return an element around HTML."""
    return f"<{name}{attributes(**values)}>{content}</{name}>"


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, caption: str = "", numeric: Sequence[int] = (), **values: Any
) -> str:
    """Return a table with a row of headings; the first cell of each row is its heading.

    Args:
        columns: headings; an empty one is for the reader of the screen alone.
        rows: cells as text, or as ``(text, number to sort by)``.
        caption: what the table is of.
        numeric: columns whose cells stand at the right.
        values: attributes.
    """
    head = "".join(
        tag("th", escape(name) or '<span class="unseen">value</span>', scope="col", class_="n" if place in numeric else None)
        for place, name in enumerate(columns)
    )
    body = []
    for row in rows:
        cells = []
        for place, cell in enumerate(row):
            text, key = cell if isinstance(cell, tuple) else (cell, None)
            kind = "th" if place == 0 else "td"
            cells.append(
                tag(
                    kind,
                    escape(str(text)),
                    scope="row" if place == 0 else None,
                    class_="n" if place in numeric else None,
                    data_key=key,
                )
            )
        body.append(tag("tr", "".join(cells)))
    title = tag("caption", escape(caption)) if caption else ""
    inner = f"{title}<thead>{tag('tr', head)}</thead><tbody>{''.join(body)}</tbody>"
    return tag("div", tag("table", inner, **values), class_="scroll", tabindex=0, role="region", aria_label=caption or "table")


def of_rich(given: Table, caption: str = "") -> str:
    """Return a table of the terminal as HTML, with its caption below it."""
    columns = list(given.columns)
    heads = [Text.from_markup(str(column.header)).plain for column in columns]
    rows = zip(*([_plain(cell) for cell in column.cells] for column in columns), strict=True)
    numeric = [place for place, column in enumerate(columns) if column.justify == "right"]
    title = caption or (_plain(given.title) if given.title else "")
    note = tag("p", escape(_plain(given.caption)), class_="note") if given.caption else ""
    if not any(heads):
        heads = ["of", *["value", "about it"][: len(columns) - 1]]
        return table(heads, rows, caption=title, numeric=numeric, class_="plain headless") + note
    return table(heads, rows, caption=title, numeric=numeric, class_="plain") + note


def _plain(cell: Any) -> str:
    return Text.from_markup(cell).plain if isinstance(cell, str) else cell.plain if isinstance(cell, Text) else str(cell)


def cards(values: Iterable[tuple[str, str, str, str]]) -> str:
    """Return key figures: name, figure, a line below it, and a class (``good``, ``bad`` or empty)."""
    return tag(
        "dl",
        "".join(
            tag(
                "div",
                f"<dt>{escape(name)}</dt><dd>{escape(figure)}</dd>"
                + (f'<dd class="about">{escape(about)}</dd>' if about else ""),
                class_=f"card {kind}".strip(),
            )
            for name, figure, about, kind in values
        ),
        class_="cards",
    )


def figure(drawing: str, *, caption: str, alternative: str, controls: str = "", key: str = "") -> str:
    """Return a figure: controls, a drawing, what it shows, and the same as a table that unfolds.

    Args:
        drawing: HTML of the drawing.
        caption: a sentence about it.
        alternative: a table with the same content.
        controls: what changes it.
        key: its id.
    """
    unfolding = f"<details class='alternative'><summary>The same as a table</summary>{alternative}</details>"
    return tag("figure", f"{controls}{drawing}<figcaption>{escape(caption)}</figcaption>{unfolding}", id=key or None)


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return the meaning of colours: class of a colour, and what it stands for."""
    items = "".join(f'<li><span class="key {kind}" aria-hidden="true"></span>{escape(words)}</li>' for kind, words in entries)
    return f'<ul class="legend" aria-label="colours">{items}</ul>'


def listed(lines: Iterable[str], kind: str = "") -> str:
    """Return lines as a list; empty if there are none."""
    items = "".join(tag("li", escape(line)) for line in lines)
    return tag("ul", items, class_=kind or None) if items else ""


def ticks(most: float, number: int) -> list[float]:
    """Return round values from 0 on and below ``most``, at most so many: multiples of 1, 2 or 5 and a power of ten."""
    if most <= 0:
        return [0.0]
    power = 10 ** floor(log10(most / number))
    step = next(power * one for one in (1, 2, 5, 10) if most / (power * one) <= number)
    return [step * place for place in range(ceil(most / step))]

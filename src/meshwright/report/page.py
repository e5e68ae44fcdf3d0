"""A page: one HTML file with its style and its script in it. A policy in it forbids the browser to ask the network."""

import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

import meshwright
from meshwright.report.markup import Section, tag

__all__ = ["page"]

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)


def page(title: str, about: str, sections: Sequence[Section], top: str = "") -> str:
    """Return a page.

    Args:
        title: what it is about.
        about: a line below the title.
        sections: its parts.
        top: HTML above them.
    """
    room = resources.files("meshwright") / "report"
    style, script = ((room / name).read_text(encoding="utf-8") for name in ("style.css", "script.js"))
    links = "".join(f'<li><a href="#{one.key}">{escape(one.heading)}</a></li>' for one in sections)
    parts = "".join(
        tag(
            "section",
            f'<h2 id="{one.key}-heading">{escape(one.heading)}</h2>'
            + (tag("p", escape(one.lead), class_="lead") if one.lead else "")
            + one.body,
            id=one.key,
            aria_labelledby=f"{one.key}-heading",
        )
        for one in sections
    )
    data = {one.key: dict(one.data) for one in sections if one.data}
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n<style>\n{style}</style>\n</head>\n<body>\n'
        '<a class="skip" href="#content">to the content</a>\n'
        f"<header><h1>{escape(title)}</h1><p>{escape(about)}</p></header>\n"
        f'<nav aria-label="parts of the page"><ul>{links}</ul></nav>\n'
        f'<main id="content">{top}{parts}</main>\n'
        f"<footer><p>Written by Meshwright {escape(meshwright.__version__)}. This file asks the network for nothing.</p>"
        "</footer>\n"
        f'<script type="application/json" id="data">{_embedded(data)}</script>\n<script>\n'
        f"{script}</script>\n</body>\n</html>\n"
    )


def _embedded(value: Any) -> str:
    """Return JSON that may stand inside of an element: no text in it can end it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")

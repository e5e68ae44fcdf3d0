"""A document: what a row is to be trained on, before it becomes tokens."""

from dataclasses import dataclass, field
from typing import Any

from meshwright.data.rows.row_values import Values

__all__ = ["Document"]


@dataclass(frozen=True, slots=True)
class Document:
    """One document: either a text or the messages of a chat."""

    text: str | None
    messages: list[dict[str, Any]] | None
    source: str
    """File and line, or data set and row, for messages to the user."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """For a chat: tools, documents and other arguments of the chat template."""
    values: Values = field(default_factory=dict)
    """Of the columns that reach the batch."""
    second: list[dict[str, Any]] | None = None
    """The messages of the second document of a pair."""
    answer: int = 0
    """Of a document with a prompt: the place in its messages where its answer begins."""

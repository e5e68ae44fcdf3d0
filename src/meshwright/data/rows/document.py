"""A document: what a row is to be trained on, before it becomes tokens."""

from dataclasses import dataclass, field
from typing import Any, Literal

from meshwright.data.rows.row_values import Values

__all__ = ["Document", "Rewarded", "Tokens", "Words"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a document."""

    ids: list[int]
    mask: list[bool] | None
    """Which of them are learned; ``None``: all."""
    tokenizer: str | None
    """Digest of the vocabulary that they are ids of (:func:`~meshwright.data.tokenizer.vocabulary_digest`), if it is known."""
    first: int = 0
    """Of a pair, how many of them are those of its first document; 0: they are of one document."""


@dataclass(frozen=True, slots=True)
class Words:
    """Words, and the class of each."""

    words: list[str]
    labels: list[int]


@dataclass(frozen=True, slots=True)
class Rewarded:
    """The reward of a rollout, and the name of the group of rollouts that it is compared with."""

    group: str | int
    reward: float


@dataclass(frozen=True, slots=True)
class Document:
    """One document: a text, the messages of a chat, or tokens."""

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
    tokens: "Tokens | None" = None
    """Its tokens, if the row has them."""
    words: Words | None = None
    """Its words, if each has a label."""
    rewarded: Rewarded | None = None
    """Of a rollout, if its advantage is to be computed."""

    @property
    def kind(self) -> Literal["text", "chat"]:
        """Whether all tokens are learned, or only some, which are not to be parted from those before them."""
        whole = self.messages is None if self.tokens is None else self.tokens.mask is None
        return "text" if whole else "chat"

"""The columns of the formats of rows. `formats.py` reads them."""

from dataclasses import dataclass

__all__ = ["EXTRAS", "FORMATS", "Format"]

EXTRAS = ("tools", "documents", "chat_template_kwargs")
"""Columns that any chat may have: arguments of the chat template."""


@dataclass(frozen=True)
class Format:
    """The columns of a format, by the names that `data.columns` maps."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    """Keys of each message, not of the row."""
    extra: tuple[str, ...] = EXTRAS
    """Columns for the chat template."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names that may be mapped."""
        return self.required + self.optional + self.within + self.extra

    @property
    def dispensable(self) -> tuple[str, ...]:
        """Names of the columns that a row need not have: `null` leaves them out."""
        return self.optional + self.extra


FORMATS = {
    "text": Format(("text",), extra=()),
    "messages": Format(("messages",), within=("role", "content", "weight")),
    "sharegpt": Format(("conversations",), ("system",), within=("from", "value", "weight")),
    "alpaca": Format(("instruction", "output"), ("input", "system")),
    "prompt_completion": Format(("prompt", "completion"), ("system",)),
}

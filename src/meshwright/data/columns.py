"""The columns of the formats of rows. `formats.py` reads them."""

from dataclasses import dataclass

__all__ = ["FORMATS", "Format"]


@dataclass(frozen=True)
class Format:
    """The columns of a format, by the names that `data.columns` maps."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    """Keys of each message, not of the row."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names that may be mapped."""
        return self.required + self.optional + self.within


FORMATS = {
    "text": Format(("text",)),
    "messages": Format(("messages",), within=("role", "content")),
    "sharegpt": Format(("conversations",), ("system",), within=("from", "value")),
    "alpaca": Format(("instruction", "output"), ("input", "system")),
    "prompt_completion": Format(("prompt", "completion"), ("system",)),
}

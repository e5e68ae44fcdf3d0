"""The columns of rows: those of the formats, which `formats.py` reads, and those that reach the batch as tensors."""

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["EXTRAS", "FORMATS", "TAKEN", "Format", "TensorColumn"]

EXTRAS = ("tools", "documents", "chat_template_kwargs")
"""Columns that any chat may have: arguments of the chat template."""


TAKEN = frozenset(
    {
        *("input_ids", "labels", "position_ids", "attention_mask", "inputs_embeds", "prefix", "routed"),
        *("documents", "document_marks", "document_exists"),
    }
)
"""Keys that a batch has, or may have, for other purposes."""


class TensorColumn(BaseModel):
    """A column that reaches the batch as a tensor."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    per: Literal["token", "document"]
    width: int | None = Field(default=None, ge=1, le=2**20)
    dtype: Literal["float32", "int64"] = "float32"
    column: str | None = Field(default=None, min_length=1)


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

"""The columns of rows: those of the formats, which `formats.py` reads, and those that reach the batch as tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["EXTRAS", "FORMATS", "MEMBER", "PLAIN", "ROUTED_EXPERTS", "TAKEN", "Format", "TensorColumn"]

EXTRAS = ("tools", "documents", "chat_template_kwargs")
"""Columns that any chat may have: arguments of the chat template."""


TAKEN = frozenset(
    {
        *("input_ids", "labels", "position_ids", "attention_mask", "inputs_embeds", "prefix", "routed"),
        *("documents", "document_marks", "document_exists", "member"),
    }
)
"""Keys that a batch has, or may have, for other purposes."""

MEMBER = "member"
"""Key of the place of a document in its pair, [B, D]: 1 or 2; 0 for a document alone. The second follows the first."""


ROUTED_EXPERTS = "routed_experts"
"""Name of the column with the experts that each token went to, which routers then choose in training."""


class TensorColumn(BaseModel):
    """A column that reaches the batch as a tensor."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    per: Literal["token", "input", "document"]
    width: int | None = Field(default=None, ge=1, le=2**20)
    dtype: Literal["float32", "int64"] = "float32"
    column: str | None = Field(default=None, min_length=1)

    @property
    def absent(self) -> int:
        """What stands where there is no value: 0, but -1 for numbers of an input, of which 0 may be one."""
        return -1 if self.per == "input" and self.dtype == "int64" else 0


@dataclass(frozen=True)
class Format:
    """The columns of a format, by the names that `data.columns` maps."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    """Keys of each message, not of the row."""
    extra: tuple[str, ...] = EXTRAS
    """Columns for the chat template."""
    values: Mapping[str, TensorColumn] = field(default_factory=dict)
    """Those of its columns that reach the batch, by their names there."""
    pairs: bool = False
    """Whether a row is two documents, which stay together in a sequence."""
    whole: bool = False
    """Whether a row has numbers for a document as it stands: its tokens are those of the text or chat, up to the last."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names that may be mapped."""
        return self.required + self.optional + self.within + self.extra

    def columns(self, column: Callable[[str], str]) -> dict[str, TensorColumn]:
        """Return the columns that reach the batch, with their names in a row, which a function says."""
        return {name: one.model_copy(update={"column": column(name)}) for name, one in self.values.items()}

    @property
    def dispensable(self) -> tuple[str, ...]:
        """Names of the columns that a row need not have: `null` leaves them out."""
        return self.optional + self.extra


LABEL = TensorColumn(per="document")
"""Whether an answer is desirable: 1 or 0, or true or false."""

SCORE = TensorColumn(per="document")
"""How good an answer is."""

FORMATS = {
    "text": Format(("text",), extra=()),
    "messages": Format(("messages",), within=("role", "content", "weight")),
    "sharegpt": Format(("conversations",), ("system",), within=("from", "value", "weight")),
    "alpaca": Format(("instruction", "output"), ("input", "system")),
    "prompt_completion": Format(("prompt", "completion"), ("system",)),
    "tokens": Format(("input_ids",), ("loss_mask", "tokenizer"), extra=()),
    "preference": Format(("chosen", "rejected"), ("prompt", "system"), ("role", "content"), pairs=True),
    "token_pairs": Format(("chosen_ids", "rejected_ids", "chosen_mask", "rejected_mask"), ("tokenizer",), extra=(), pairs=True),
    "unpaired_preference": Format(
        ("prompt", "completion", "label"), ("system",), ("role", "content"), values={"label": LABEL}, pairs=True
    ),
    "rollout": Format(
        ("prompt_ids", "completion_ids", "old_log_probs"),
        ("advantages", "reward", "group", "completion_mask"),
        extra=(),
        values={"old_log_probs": TensorColumn(per="token"), "advantages": TensorColumn(per="token")},
    ),
    "labeled_words": Format(
        ("words", "labels"), extra=(), values={"word_labels": TensorColumn(per="token", dtype="int64")}, whole=True
    ),
    "labeled": Format(("label",), ("text", "messages"), ("role", "content"), whole=True),
    "scored": Format(
        ("score",), ("messages", "prompt", "completion", "system"), ("role", "content"), values={"score": SCORE}, whole=True
    ),
}
"""Name to columns. Those of :data:`PLAIN` are for any objective; the others for one that says so."""

PLAIN = ("text", "messages", "sharegpt", "alpaca", "prompt_completion", "tokens")

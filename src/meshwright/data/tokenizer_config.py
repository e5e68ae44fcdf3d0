"""The tokenizer of a run, as a schema. It is light to import: pydantic only."""

from pydantic import BaseModel, ConfigDict, Field, model_validator

from meshwright.paths import PathText

__all__ = ["TokenizerConfig"]


class TokenizerConfig(BaseModel):
    """Which tokenizer, or how large a one to train."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    path: PathText | None = Field(
        default=None,
        description="Directory or hub name of a tokenizer. Not given: the model's own, if it has one, otherwise one "
        "is trained.",
    )
    vocab_size: int | None = Field(
        default=None,
        ge=261,
        description="Train a byte-level BPE with this many tokens on the corpus. At least 261 (bytes, special tokens).",
    )
    chat_template: str | None = Field(
        default=None, description="Jinja template for chats, or a file that holds one. It replaces the tokenizer's own."
    )

    @model_validator(mode="after")
    def _check(self) -> "TokenizerConfig":
        if self.path is not None and self.vocab_size is not None:
            raise ValueError(
                f"tokenizer.path={self.path!r} and tokenizer.vocab_size={self.vocab_size} exclude each other: "
                "vocab_size trains a new tokenizer; remove one"
            )
        return self

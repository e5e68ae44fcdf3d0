"""The kinds of optimizers that are ours, and the options of each, which stand in ``optimizer.with``."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from meshwright.train.schema.parallel_config import Section

__all__ = ["ADAMW", "KEYS", "QUANTIZED", "SCHEMAS", "Kind", "options_of"]

ADAMW: Literal["adamw"] = "adamw"

Kind = Literal["adamw", "adamw8bit", "adamw4bit", "adamwfp8", "adafactor", "lion", "sgd"]

QUANTIZED = ("adamw8bit", "adamw4bit", "adamwfp8")
"""Kinds of torchao."""

_Share = Annotated[float, Field(ge=0, lt=1)]


class _None(Section):
    """A kind whose options are keys of ``optimizer``."""


class AdafactorOptions(Section):
    """Adafactor (Shazeer and Stern 2018, arXiv 1804.04235, algorithm 4, with relative steps); names and defaults of torch."""

    beta2_decay: float = Field(default=-0.8, le=0, description="Power of the step in the decay of the second moment.")
    eps: tuple[float | None, float] = Field(
        default=(None, 1e-3), description="Least square of a gradient (null: that of the dtype), and least size of a parameter."
    )
    d: float = Field(default=1.0, ge=1, description="Largest root mean square of an update before the rate.")


class QuantizedOptions(Section):
    """AdamW of torchao with moments in blocks of 8 bits (Dettmers et al. 2021, arXiv 2110.02861) or fp8."""

    block_size: int = Field(default=256, ge=16, description="Numbers of a shard that share a scale.")
    bf16_stochastic_round: bool = Field(default=False, description="Round parameters in bf16 up or down by chance.")


class FourBitOptions(QuantizedOptions):
    """The same with blocks of 4 bits (Li et al. 2023, arXiv 2309.01507)."""

    block_size: int = Field(default=128, ge=16, description="Numbers of a shard that share a scale.")


class LionOptions(Section):
    """Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2)."""

    betas: tuple[_Share, _Share] = Field(default=(0.9, 0.99), description="Of the update, and of the moment.")


class SgdOptions(Section):
    """Stochastic gradient descent, as torch.optim.SGD; decay is added to the gradient."""

    momentum: float = Field(default=0.0, ge=0, lt=1)
    nesterov: bool = False


SCHEMAS: dict[str, type[Section]] = {
    ADAMW: _None,
    **dict.fromkeys(QUANTIZED, QuantizedOptions),
    "adamw4bit": FourBitOptions,
    "adafactor": AdafactorOptions,
    "lion": LionOptions,
    "sgd": SgdOptions,
}
"""The options of each kind."""

KEYS: dict[str, tuple[str, ...]] = {ADAMW: ("betas", "eps", "fused"), **dict.fromkeys(QUANTIZED, ("betas", "eps"))}
"""The keys of ``optimizer`` that only some kinds have."""


def options_of(where: str, kind: str, arguments: Mapping[str, Any]) -> Section:
    """Return the options of a kind, checked.

    Args:
        where: the key of the configuration.
        kind: one of :data:`SCHEMAS`.
        arguments: the options that are set.

    Raises:
        ValueError: all that is wrong, with the legal names.
    """
    try:
        return SCHEMAS[kind].model_validate(arguments)
    except ValidationError as error:
        legal = ", ".join(SCHEMAS[kind].model_fields) or f"none; {', '.join(KEYS.get(kind, ()))} stand beside kind"
        found = [(".".join(map(str, item["loc"])), item) for item in error.errors()]
        said = [
            f"{where}.with.{key}: unknown option of kind={kind}; leave it out; legal here: {legal}"
            if item["type"] == "extra_forbidden"
            else f"{where}.with.{key}={item['input']!r}: {item['msg'][0].lower()}{item['msg'][1:]}"
            for key, item in found
        ]
        raise ValueError("; ".join(said)) from None

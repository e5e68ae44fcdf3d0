"""The kinds of optimizers that are ours, and the options of each, which stand in ``optimizer.with``."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from meshwright.train.schema.parallel_config import Section

__all__ = ["ADAMW", "KEYS", "MUON", "QUANTIZED", "SCHEMAS", "Kind", "options_of"]

ADAMW: Literal["adamw"] = "adamw"

MUON: Literal["muon"] = "muon"

Kind = Literal["adamw", "adamw8bit", "adamw4bit", "adamwfp8", "adafactor", "lion", "muon", "sgd"]

QUANTIZED = ("adamw8bit", "adamw4bit", "adamwfp8")
"""Kinds of torchao."""

_Share = Annotated[float, Field(ge=0, lt=1)]


class _None(Section):
    """A kind whose options are keys of ``optimizer``."""


class AdafactorOptions(Section):
    """Adafactor (Shazeer and Stern 2018, arXiv 1804.04235, algorithm 4, with relative steps); names and defaults of torch."""

    beta2_decay: float = Field(default=-0.8, le=0, description="Power of the step in the decay of the second moment.")
    eps: tuple[Annotated[float, Field(gt=0)] | None, Annotated[float, Field(ge=0)]] = Field(
        default=(None, 1e-3), description="Least square of a gradient (null: that of the dtype), and least size of a parameter."
    )
    d: float = Field(default=1.0, ge=1, description="Largest root mean square of an update before the rate.")


class QuantizedOptions(Section):
    """AdamW of torchao with moments in blocks of 8 bits (Dettmers et al. 2021, arXiv 2110.02861) or fp8."""

    block_size: int = Field(default=256, ge=16, description="Numbers of a shard that share a scale.")
    bf16_stochastic_round: bool = Field(default=False, description="Round parameters in bf16 up or down by chance.")


class FourBitOptions(QuantizedOptions):
    """The same with blocks of 4 bits (Li et al. 2023, arXiv 2309.01507)."""

    block_size: int = Field(default=128, ge=16, multiple_of=2, description="Numbers of a shard that share a scale.")


class LionOptions(Section):
    """Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2)."""

    betas: tuple[_Share, _Share] = Field(default=(0.9, 0.99), description="Of the update, and of the moment.")


class MuonOptions(Section):
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/), with the names of torch.optim.Muon.

    It updates the matrices inside of layers. The rest is updated by AdamW, with the keys of ``optimizer``.
    """

    momentum: float = Field(default=0.95, ge=0, lt=1)
    nesterov: bool = True
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = Field(
        default="match_rms_adamw",
        description="Factor of the rate of a matrix. match_rms_adamw: updates are as large as those of AdamW, so that one "
        "rate is for both (arXiv 2502.16982). original: the root of rows / columns, where that is above 1.",
    )
    ns_steps: int = Field(default=5, ge=1, lt=100, description="Steps of Newton-Schulz.")
    ns_coefficients: tuple[float, float, float] = Field(default=(3.4445, -4.7750, 2.0315), description="Of Newton-Schulz.")
    eps: float = Field(default=1e-7, gt=0, description="The least number that a matrix is divided by.")
    dtype: Literal["bfloat16", "float32", "float64"] = Field(
        default="bfloat16", description="In which matrices are exchanged and orthogonalised."
    )
    by_head: bool = Field(default=False, description="Queries, keys and values of each head are a matrix.")
    bucket: int = Field(default=2**25, ge=1, description="Elements of the matrices that are exchanged at once, for each rank.")


class SgdOptions(Section):
    """Stochastic gradient descent, as torch.optim.SGD; decay is added to the gradient."""

    momentum: float = Field(default=0.0, ge=0, lt=1)
    nesterov: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov=true: needs a momentum above 0")
        return self


SCHEMAS: dict[str, type[Section]] = {
    ADAMW: _None,
    **dict.fromkeys(QUANTIZED, QuantizedOptions),
    "adamw4bit": FourBitOptions,
    "adafactor": AdafactorOptions,
    "lion": LionOptions,
    "muon": MuonOptions,
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
        found = [(".".join(map(str, ("with", *item["loc"]))), item) for item in error.errors()]
        said = [
            f"{where}.{key}: unknown option of kind={kind}; leave it out; legal here: {legal}"
            if item["type"] == "extra_forbidden"
            else f"{where}.{key}: {item['ctx']['error']}"
            if item["type"] == "value_error"
            else f"{where}.{key}={item['input']!r}: {item['msg'][0].lower()}{item['msg'][1:]}"
            for key, item in found
        ]
        raise ValueError("; ".join(said)) from None

"""Changes of a configuration: other values, as overrides have them, and what must go with them."""

from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.layout import AXES, divisors
from meshwright.plan.given.closed_choices import ActivationCheckpointing
from meshwright.train.config import RunConfig
from meshwright.train.schema.parallel_config import ParallelConfig

__all__ = [
    "KEPT_FIRST",
    "OF_AXES",
    "Overrides",
    "filled",
    "least_factor",
    "override_text",
    "value_of",
    "with_values",
    "without_axis",
]

Overrides = Sequence[tuple[str, Any]]
"""Keys of the configuration with their values."""

KEPT_FIRST = (
    ActivationCheckpointing.NONE,
    ActivationCheckpointing.SELECTIVE,
    ActivationCheckpointing.SUBMODULE,
    ActivationCheckpointing.FULL,
)
"""Modes of recomputation, from the one that keeps most and repeats nothing."""

OF_AXES = {
    "pp": ("pipeline.schedule", "pipeline.stages_per_rank", "pipeline.cuts", "pipeline.runs_per_step"),
    "tp": ("sequence_parallel", "loss_parallel", "tp_plan"),
    "cp": ("context_parallel", "context_balance", "context_recompute"),
}
"""Axis to the keys of `parallel` that a plan refuses where the axis is 1, unless they have their defaults."""


def without_axis(parallel: ParallelConfig, axis: str) -> Iterator[tuple[str, Any]]:
    """Yield what must be set back where an axis is 1: keys of the configuration, with their defaults."""
    for key in OF_AXES[axis]:
        default = value_of(type(parallel)(), key)
        if value_of(parallel, key) != default:
            yield f"parallel.{key}", default


def filled(config: RunConfig, axis: str) -> list[tuple[str, Any]]:
    """Return what must go with another size of an axis, so that data ranks take the rest: nothing if a size is open already."""
    others = (value_of(config, f"layout.{other}") for other in AXES if other != axis)
    return [] if any(size in (None, -1) for size in others) else [("layout.dp_shard", None)]


def least_factor(number: int) -> int:
    """Return the smallest prime factor of a number above 1."""
    return divisors(number)[1]


def value_of(section: Any, key: str) -> Any:
    """Return a value of a configuration, or of a section of it, by its dotted key."""
    for part in key.split("."):
        section = getattr(section, part)
    return section


def with_values(config: RunConfig, overrides: Overrides) -> RunConfig:
    """Return a configuration with other values, which is checked as a whole.

    Raises:
        ValidationError: the values do not go together.
    """
    values = config.model_dump()
    for key, value in overrides:
        *sections, name = key.split(".")
        held = values
        for section in sections:
            held = held[section]
        held[name] = value
    return RunConfig.model_validate(values)


def override_text(value: Any) -> str:
    """Return a value as an override has it."""
    if isinstance(value, list | tuple):
        return str(list(value))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

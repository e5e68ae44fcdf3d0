"""The kinds of errors that an audit can find, and the words in which findings speak of parameters and ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from meshwright.plan.result.sharding_plan import ShardingPlan

__all__ = ["CONSEQUENCES", "Finding", "Kind", "described", "in_ranks", "listed"]


class Kind(StrEnum):
    """What can be wrong. Causes come before their consequences."""

    PLAIN = "plain"
    """One process of Meshwright computes something else than plain transformers, peft and torch, whatever the layout."""

    CALLBACK = "callback"
    """A callback moves parameters, draws random numbers, or changes gradients differently on layouts."""

    VALUES = "values"
    """The initial parameters of the ranks are not those of one process, or not the same on all ranks."""

    DATA = "data"
    """A rank was fed other sequences than its share."""

    RANDOM = "random"
    """Random numbers were generated in the step: dropout, or routing with noise."""

    MODE = "mode"
    """Modules are in evaluation mode that are in training mode in one process, or the reverse."""

    TIES = "ties"
    """Parameters that are one in the plan are several in the model."""

    LOST = "lost"
    """Parameters or buffers that only one side has."""

    FROZEN = "frozen"
    """A parameter that is not trained got a gradient, or its value changed."""

    FORWARD = "forward"
    """A module computes something else: its inputs agree, its output does not."""

    BACKWARD = "backward"
    """A module's own backward is wrong: the gradient of its output agrees, that of its input does not."""

    UNREDUCED = "unreduced"
    """A gradient was not summed over the ranks: each rank has only its own gradient, or none has any."""

    GRADIENT = "gradient"
    """A gradient is wrong in another way: a factor, a lost microbatch, a foreign part."""

    REPLICAS = "replicas"
    """Ranks that should hold the same tensor have different values."""

    LOSS = "loss"
    """The reported loss is not that of one process."""

    NORM = "norm"
    """The norm of the gradient is wrong, before or after clipping."""

    DECAY = "decay"
    """Weight decay applies to other parameters than the configuration says."""

    STATE = "state"
    """Parameters, optimizer state or buffers are wrong after the steps, though the gradients are right."""

    LATER = "later"
    """The loss or the norm of a later step is wrong, though everything else is right."""

    EVALUATION = "evaluation"
    """The loss of an evaluation is not that of one process."""

    RESUMED = "resumed"
    """A new trainer that goes on from a checkpoint does not end where the first one did."""

    COLLECTIVES = "collectives"
    """The collectives, or their bytes, are not those of the plan."""


_AT_THE_END = (Kind.LATER, Kind.EVALUATION, Kind.RESUMED)
_AFTER_GRADIENTS = (Kind.REPLICAS, Kind.NORM, Kind.STATE, *_AT_THE_END)
_ALL_NUMBERS = (Kind.FORWARD, Kind.BACKWARD, Kind.UNREDUCED, Kind.GRADIENT, Kind.LOSS, *_AFTER_GRADIENTS)
CONSEQUENCES = {
    Kind.CALLBACK: (Kind.VALUES, Kind.FROZEN, Kind.DECAY, *_ALL_NUMBERS),
    Kind.VALUES: _ALL_NUMBERS,
    Kind.DATA: _ALL_NUMBERS,
    Kind.RANDOM: _ALL_NUMBERS,
    Kind.LOST: _ALL_NUMBERS,
    Kind.TIES: (*_ALL_NUMBERS, Kind.LOST),
    Kind.FORWARD: _ALL_NUMBERS[1:],
    Kind.BACKWARD: _ALL_NUMBERS[2:],
    Kind.UNREDUCED: _AFTER_GRADIENTS,
    Kind.GRADIENT: _AFTER_GRADIENTS,
    Kind.REPLICAS: _AT_THE_END,
    Kind.NORM: (Kind.STATE, *_AT_THE_END),
    Kind.DECAY: (Kind.STATE, *_AT_THE_END),
    Kind.STATE: _AT_THE_END,
    Kind.LATER: (Kind.EVALUATION, Kind.RESUMED),
}
"""Kind of a cause to the kinds of errors that can follow from it; they are not reported beside it. The rows of the report still
have all numbers."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong.

    Attributes:
        kind: the kind of the error.
        message: one sentence for people.
        names: the parameters, buffers, modules or ranks that it is about.
    """

    kind: Kind
    message: str
    names: tuple[str, ...] = ()


def described(plan: ShardingPlan, names: Sequence[str]) -> str:
    """Describe parameters by their units, if these are meant as a whole. Other names, such as buffers, are listed."""
    if not set(names) <= {row.name for row in plan.parameters}:
        return listed(names)
    if len(names) == 1:
        return f"{names[0]} (unit {plan.unit(plan.parameter(names[0]).unit).label})"
    trained = {row.name for row in plan.parameters if row.trainable}
    if trained <= set(names):
        return f"all {len(names)} parameters"
    units = list(dict.fromkeys(plan.parameter(name).unit for name in names))
    all_of_units = all(set(plan.unit(unit).parameters) & trained <= set(names) for unit in units)
    labels = [plan.unit(unit).label for unit in units]
    if all_of_units:
        return f"all {len(names)} parameters of unit {listed(labels)}"
    return f"{len(names)} parameters ({listed(names)}) of unit {listed(labels)}"


def in_ranks(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"


def listed(names: Iterable[str], most: int = 4) -> str:
    shown = list(names)
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")

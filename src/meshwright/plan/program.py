"""The program of a plan: what is done to a model, action after action, in the order in which it is done.

Rows (:mod:`meshwright.plan.sharding_plan`) say how each parameter and unit ends up, for people. Actions say what
:mod:`meshwright.distributed` has to do for that, and leave it nothing to decide: they name the modules, the parameters and the
attributes that are set. ``meshwright plan --program`` prints them.
"""

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from meshwright.plan.moves import Move
from meshwright.plan.options import SyncPolicy

__all__ = [
    "ACTIONS",
    "Action",
    "Assign",
    "Bias",
    "Compile",
    "Compute",
    "Dispatch",
    "Engine",
    "Freeze",
    "JoinTwins",
    "Kernel",
    "PartTwins",
    "Prefetch",
    "Recompute",
    "Slice",
    "Wrap",
    "describe",
]


@dataclass(frozen=True)
class Slice:
    """Hold a slice of a parameter on each rank of an axis: it becomes a DTensor.

    Attributes:
        names: of the parameter; a tied one has several, and is sliced once.
        axis: of the mesh.
        dim: dimension that is sliced.
        pieces: tensors that lie one after another in this dimension, each of which is sliced.
    """

    names: tuple[str, ...]
    axis: str
    dim: int
    pieces: int = 1


@dataclass(frozen=True)
class Assign:
    """Set attributes of a module.

    Attributes:
        module: its name.
        values: dotted attribute to value.
        own: attributes that the module gets a copy of before, because other modules share them.
    """

    module: str
    values: tuple[tuple[str, int], ...]
    own: tuple[str, ...] = ()


class Kernel(StrEnum):
    """What a module computes with its slices."""

    OWN = "own"
    """Its own forward."""

    VOCABULARY_ROWS = "vocabulary_rows"
    """An embedding that holds the rows of some words looks these up, and gives zeros for the others."""

    ONE_HEAD = "one_head"
    """A matrix of several heads computes the one that the queries of this rank need."""


class Bias(StrEnum):
    """Who adds the bias of a matrix whose output is a sum over ranks."""

    EACH = "each"
    """The module itself: each rank adds its own slice, or there is none."""

    LATE = "late"
    """Each rank, once its part of the sum has left the module."""

    FIRST = "first"
    """The first rank of the axis, before the sum is made elsewhere."""


@dataclass(frozen=True)
class Compute:
    """Let a module compute with slices of its parameters, between a move of its input and one of its output.

    Attributes:
        module: its name.
        kernel: what it computes.
        entry: how the input comes in.
        exit: how the output leaves; of a tuple, as the move says.
        argument: place and name of the argument that comes in so; ``None``: all floating tensors.
        sums: its own parameters whose gradients are summed over the axis.
        parts: sizes that a move or a kernel takes a tensor apart by.
        features: width of a whole output, where the move needs it.
        bias: who adds it.
        padding: row of an embedding that gets no gradient.
        axis: of the mesh.
    """

    module: str
    kernel: Kernel = Kernel.OWN
    entry: Move = Move.NONE
    exit: Move = Move.NONE
    argument: tuple[int, str] | None = None
    sums: tuple[str, ...] = ()
    parts: tuple[int, ...] = ()
    features: int = 0
    bias: Bias = Bias.EACH
    padding: int | None = None
    axis: str = "tp"


@dataclass(frozen=True)
class Dispatch:
    """Send the tokens of a mixture to the ranks that hold their experts, and the results back.

    Attributes:
        module: the mixture.
        experts: of it, over all ranks.
        axis: whose ranks hold them.
        token_axis: axis whose ranks have the same tokens, of which each sends its share; empty: none.
    """

    module: str
    experts: int
    axis: str = "ep"
    token_axis: str = ""


@dataclass(frozen=True)
class Recompute:
    """Compute a module again in backward instead of keeping its activations.

    Attributes:
        module: its name.
        selective: keep the results of the operators that are dear to repeat, or of ``operators`` where any are named.
        operators: ``namespace.operator.overload``.
        routing: keep the choice of experts, whatever else is computed again.
    """

    module: str
    selective: bool = False
    operators: tuple[str, ...] = ()
    routing: bool = False


@dataclass(frozen=True)
class Freeze:
    """Take parameters out of training; all others are trained.

    Attributes:
        parameters: first names of all that have no gradient; the others have one.
    """

    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class PartTwins:
    """Give the second modules of twin units parameters of their own for as long as units are wrapped: FSDP2 refuses a parameter
    that two units hold.

    Attributes:
        parameters: name in the first unit, and in the second.
    """

    parameters: tuple[tuple[str, str], ...]


class Engine(StrEnum):
    """What of torch makes a unit."""

    SHARD = "fully_shard"
    REPLICATE = "replicate"
    """The same engine with whole parameters: one all-reduce a unit."""


@dataclass(frozen=True)
class Wrap:
    """Make modules one unit, which gathers and reduces the parameters in them that no unit has yet.

    Attributes:
        unit: its name, that of the first module.
        modules: mostly one.
        engine: of torch.
        axes: that parameters are replicated and sharded over.
        param_dtype: of compute; ``None``: as stored.
        reduce_dtype: of reduction; ``None``: that of the gradient.
        reshard_after_forward: whether gathered parameters are freed after forward.
        sync: what the unit does between microbatches.
        divisor: what the sum of the gradients is divided by; ``None``: by the ranks that reduce, as torch does.
        output_dtype: that outputs are cast to; ``None``: no cast.
        plain_sum: add first and divide then, on every backend.
        experts: whether the axes are those of the mesh of experts.
        dims: parameter to the dimension that is sharded, where it is not the first one.
        offload: keep shards in host memory, pinned where the device is an accelerator.
        each_run: gather and free around each run of each module, which run apart.
        no_grad_runs: whether modules run without gradient too; backward does not prefetch in the order of these.
    """

    unit: str
    modules: tuple[str, ...]
    engine: Engine
    axes: tuple[str, ...]
    param_dtype: str | None
    reduce_dtype: str | None
    reshard_after_forward: bool
    sync: SyncPolicy
    divisor: float | None
    output_dtype: str | None = None
    plain_sum: bool = False
    experts: bool = False
    dims: tuple[tuple[str, int], ...] = ()
    offload: bool = False
    each_run: bool = False
    no_grad_runs: bool = False


@dataclass(frozen=True)
class JoinTwins:
    """Make the parameters of twin units one again: by name now, and in memory before the first forward.

    Attributes:
        parameters: as in :class:`PartTwins`.
        units: first and second unit of each pair.
    """

    parameters: tuple[tuple[str, str], ...]
    units: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Prefetch:
    """Have a unit start the all-gathers of others, in this order.

    Attributes:
        unit: its name.
        forward: units that it starts in forward; empty: as FSDP2 does by itself.
        backward: the same in backward.
    """

    unit: str
    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()


@dataclass(frozen=True)
class Compile:
    """Compile the forward of a module, as one graph or as many as it takes.

    Attributes:
        module: its name.
        backend: of ``torch.compile``.
    """

    module: str
    backend: str


Action = (
    Slice | Assign | Compute | Dispatch | Recompute | Freeze | PartTwins | Wrap | JoinTwins | Prefetch | Compile
)  # fmt: skip

ACTIONS: dict[str, type[Action]] = {kind.__name__: kind for kind in Action.__args__}
"""Kinds of actions by their names."""


def describe(action: Action) -> tuple[str, str]:
    """What an action is done to, and how: its first attribute, and those of the others that are not as by default."""
    first, *others = fields(action)
    chosen = {item.name: getattr(action, item.name) for item in others}
    shown = (f"{item.name} {_text(chosen[item.name])}" for item in others if chosen[item.name] not in (item.default, ()))
    return _text(getattr(action, first.name)), "; ".join(shown)


def _text(value: Any) -> str:
    if value == ():
        return "none"
    if isinstance(value, tuple):
        return ", ".join(f"({_text(item)})" if isinstance(item, tuple) else _text(item) for item in value)
    return "(root)" if value == "" else str(value)

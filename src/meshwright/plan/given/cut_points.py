"""The facts of a model that pipeline stages need: where it can be cut, what crosses a cut, and what belongs to which side."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

__all__ = [
    "POSITIONS",
    "ROWS",
    "Carried",
    "LayerFacts",
    "LeadingFacts",
    "Path",
    "RankSlices",
    "StageFacts",
    "carried_over",
    "entering_shape",
    "features_of",
    "sized",
]

ROWS, POSITIONS = -1, -2
"""What stands for the rows of a batch, and for the positions that a rank has, among the sizes of a tensor."""

Path = tuple[tuple[int | str, int], ...]
"""Where a call has a tensor: position or name of the argument, then what leads to it inside of containers. Each step is a key
and the number of items of the sequence that it is of; 0: it is of a mapping."""

Carried = tuple[tuple[int, ...], int, tuple[tuple[int, tuple[Path, ...]], ...]]
"""A tensor that layers read beside their hidden state: its sizes (one of them is :data:`POSITIONS`, and the first :data:`ROWS`
unless all rows have the same), the last layer that it was computed from (-1: of what runs before the first one), and the layers
that are given it, each with the places of its call where it is."""


def carried_over(carried: Sequence[Carried], index: int) -> Iterator[int]:
    """Yield the numbers of the tensors that a later layer is given, and that are made before the layer of an index."""
    yield from (number for number, (_, after, readers) in enumerate(carried) if after < index <= readers[-1][0])


def sized(sizes: Sequence[int], rows: int, positions: int) -> tuple[int, ...]:
    """Return the shape of a tensor for a number of rows and of positions."""
    return tuple({ROWS: rows, POSITIONS: positions}.get(size, size) for size in sizes)


def entering_shape(hidden: Sequence[int], carried: Sequence[Carried], index: int, rows: int, positions: int) -> tuple[int, ...]:
    """Return the shape of what crosses the cut before the layer of an index.

    It is the hidden state if that is [rows, positions, ...] and alone. Otherwise it is one tensor [rows, positions, features]
    of it and of what is carried.
    """
    more = [carried[number][0] for number in carried_over(carried, index)]
    if tuple(hidden[:2]) == (ROWS, POSITIONS) and not more:
        return sized(hidden, rows, positions)
    return rows, positions, sum(map(features_of, (hidden, *more)))


def features_of(sizes: Sequence[int]) -> int:
    """Return how many values a tensor of some sizes has for each position of a row."""
    return prod(size for size in sizes if size > 0)


@dataclass(frozen=True)
class LayerFacts:
    """How one layer is called.

    Attributes:
        name: name of the layer in the model.
        argument: position and name of the hidden state among its arguments.
        returned: number of items that it returns, the hidden state first; 0: it returns the hidden state itself.
    """

    name: str
    argument: tuple[int, str]
    returned: int = 0


@dataclass(frozen=True)
class LeadingFacts:
    """What a module that runs before the first layer returns.

    Attributes:
        name: name of the module in the model.
        features: size of the last dimension of its output.
        lookup: whether it looks rows up for numbers, as an embedding does, so that the output has one dimension more.
        sizes: those of its output if it is called without a tensor, see :data:`Carried`; otherwise the call tells them.
    """

    name: str
    features: int
    lookup: bool
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class StageFacts:
    """Where a model can be cut into stages.

    Attributes:
        layers: its layers, in the order in which they run, without those that do not.
        leading: modules with parameters that run before the first layer; the first stage has them.
        trailing: modules with parameters that run after the last layer; the last stage has them.
        body: the innermost module around all layers that is called with tokens. Stages but the last call it, not the
            model around it.
        used: name of each parameter outside of layers to the sides that use it: ``first``, ``last``, or both. What no side
            uses is with the first.
        hidden: sizes of the hidden state, see :data:`Carried`. It may have several residual streams, before or after rows and
            positions.
        uncut: indices of layers before which the model cannot be cut, to why: a layer reads more of an earlier one than its
            hidden state, such as the tokens that it chose.
        problems: why the model cannot be cut.
        after: modules without parameters that run after the last layer, and in none.
        idle: the outermost modules with parameters that do not run, such as an image tower in training on text, and other
            parameters that nobody uses.
        carried: what layers read beside their hidden state, of what runs before the first layer or of earlier layers.
        blank: parameters of modules around the layers, which are used before the first one.
        passes: how often a microbatch goes through all stages. Above 1, layers are those of two stacks in turn: both layers of
            one number, then those of the next. They share their parameters, so they are cut together. The first pass runs those
            of the first stack, each other pass those of the second, and the last alone has a gradient among these.
        canvas: number of columns that the second stack gets, and of tokens of a sequence; ``None``: unknown, or as many.
    """

    layers: tuple[LayerFacts, ...] = ()
    leading: tuple[LeadingFacts, ...] = ()
    trailing: tuple[str, ...] = ()
    body: str = ""
    used: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    hidden: tuple[int, ...] = ()
    problems: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    uncut: Mapping[int, str] = field(default_factory=dict)
    carried: tuple[Carried, ...] = ()
    blank: tuple[str, ...] = ()
    passes: int = 1
    canvas: tuple[int, int] | None = None


@dataclass(frozen=True)
class RankSlices:
    """What a rank of `tp` has of a model where each has other features.

    Attributes:
        parameters: first name of each parameter of which it stores a slice, to the shape of that.
        entering: number of features that enter a module, of those that are sliced before it.
        leaving: number of features that leave a module, where its own parameters do not tell it.
    """

    parameters: Mapping[str, tuple[int, ...]]
    entering: Mapping[str, int]
    leaving: Mapping[str, int]

"""What of a parameter is one matrix, and which of its entries a rank has: plain arithmetic over shapes and placements.

A parameter is seen as a stack of weights [stack, rows, columns]: experts are a stack, any other matrix is one of 1. A weight
may be several matrices in one tensor (queries, keys and values; gate and up), along the dimension of its output features.
Along each dimension, indices are *spans*, (begin, end) pairs in ascending order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, product
from math import prod
from typing import Any, NamedTuple

__all__ = [
    "Apart",
    "Cut",
    "Form",
    "Held",
    "Piece",
    "Spans",
    "matrices_of",
    "own_spans",
    "piece_of",
    "read_form",
    "shape_of",
    "splitting_axes",
    "stack_of",
]

Spans = tuple[tuple[int, int], ...]

ROWS, COLUMNS = 1, 2
"""Dimensions of a stack of weights."""


class Cut(NamedTuple):
    """One axis of the mesh shards one dimension.

    Attributes:
        axis: name of the axis.
        dim: the dimension, of the parameter.
        pieces: number of equal tensors that lie behind each other along it, each of which is sharded.
    """

    axis: str
    dim: int
    pieces: int = 1


class Apart(NamedTuple):
    """How the output features of a weight are taken apart into matrices.

    Attributes:
        sizes: features of each matrix that lie behind each other.
        runs: how often these are repeated: 1 for up behind gate; the number of heads, if the query, key and value of each head
            lie behind each other; the number of features, if those of gate and up take turns.
        heads: into how many matrices of equal size each of them is taken apart further; empty: none is.
    """

    sizes: tuple[int, ...]
    runs: int = 1
    heads: tuple[int, ...] = ()


class Form(NamedTuple):
    """What a weight is.

    Attributes:
        transposed: whether it is [in, out], so that output features are columns.
        apart: how it is taken apart; ``None``: it is one matrix.
    """

    transposed: bool = False
    apart: Apart | None = None


_MATRIX = Form()


def read_form(values: Sequence[Any]) -> Form:
    """Return the form that was written as JSON."""
    transposed, apart = values
    if apart is None:
        return Form(transposed)
    sizes, runs, heads = apart
    return Form(transposed, Apart(tuple(sizes), runs, tuple(heads)))


@dataclass(frozen=True)
class Held:
    """How one parameter is held. Parameters that are held alike are equal.

    Attributes:
        shape: global shape, of two or three dimensions.
        axes: (name, size) of each axis of its mesh that is larger than 1, outermost first.
        cuts: what shards it, in the order in which it is sharded: the first shards the whole parameter, the next one what that
            leaves. Axes without a cut are replicas.
        form: what each weight is.
    """

    shape: tuple[int, ...]
    axes: tuple[tuple[str, int], ...] = ()
    cuts: tuple[Cut, ...] = ()
    form: Form = _MATRIX

    def __post_init__(self) -> None:
        """Sort the cuts by dimension: the order matters within a dimension alone."""
        object.__setattr__(self, "cuts", tuple(sorted(self.cuts, key=lambda cut: cut.dim)))

    @property
    def replicas(self) -> tuple[str, ...]:
        """Names of the axes whose ranks have the same entries."""
        cut = {one.axis for one in self.cuts}
        return tuple(name for name, _ in self.axes if name not in cut)

    @property
    def out(self) -> int:
        """The dimension of a stack of weights that counts output features."""
        return COLUMNS if self.form.transposed else ROWS


def stack_of(held: Held) -> tuple[int, int, int]:
    """Return the shape of a parameter as a stack of weights."""
    rows, columns = held.shape[-2:]
    return prod(held.shape[:-2]), rows, columns


# -- what is one matrix --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def matrices_of(held: Held) -> tuple[Spans, ...]:
    """Return the matrices of each weight of a stack: the output features of each."""
    features = stack_of(held)[held.out]
    if held.form.apart is None:
        return (((0, features),),)
    sizes, runs, heads = held.form.apart
    ends = list(accumulate(sizes, initial=0))
    found: list[Spans] = []
    for index, (begin, end) in enumerate(pairwise(ends)):
        whole = _merged((run * ends[-1] + begin, run * ends[-1] + end) for run in range(runs))
        count = heads[index] if heads else 1
        each = runs * (end - begin) // count
        found += [_taken(whole, head * each, (head + 1) * each) for head in range(count)]
    return tuple(found)


def shape_of(held: Held, matrix: int) -> tuple[int, int]:
    """Return the shape of one of its matrices, as it lies in the weight: [rows, columns]."""
    _, rows, columns = stack_of(held)
    features = _length(matrices_of(held)[matrix])
    return (rows, features) if held.form.transposed else (features, columns)


# -- who has what --------------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """The part of one matrix of each weight of a stack that a rank has.

    Attributes:
        rows: where it is in the matrix.
        columns: so too.
        local_rows: where it is in the shard of the rank.
        local_columns: so too.
    """

    rows: Spans
    columns: Spans
    local_rows: Spans
    local_columns: Spans

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and columns."""
        return _length(self.rows), _length(self.columns)


@lru_cache(maxsize=65536)
def own_spans(held: Held, dim: int, at: tuple[int, ...]) -> Spans:
    """Return the indices that a rank has along a dimension of the stack of weights.

    Args:
        held: how the parameter is held.
        dim: the dimension.
        at: the rank's index on each axis of ``held.axes``.
    """
    spans: Spans = ((0, stack_of(held)[dim]),)
    places = {name: (size, index) for (name, size), index in zip(held.axes, at, strict=True)}
    for cut in held.cuts:
        if _dim(held, cut) == dim:
            spans = _chunk(spans, cut.pieces, *places[cut.axis])
    return spans


def _dim(held: Held, cut: Cut) -> int:
    """Return the dimension of the stack of weights that an axis shards."""
    return cut.dim + 3 - len(held.shape)


@lru_cache(maxsize=65536)
def piece_of(held: Held, matrix: int, at: tuple[int, ...]) -> Piece:
    """Return the part of a matrix that a rank has. See :func:`own_spans` for the arguments."""
    own = {dim: own_spans(held, dim, at) for dim in (ROWS, COLUMNS)}
    whole = {held.out: matrices_of(held)[matrix]}
    found: dict[int, tuple[Spans, Spans]] = {}
    for dim in (ROWS, COLUMNS):
        all_of = whole.get(dim, ((0, stack_of(held)[dim]),))
        both = _common(all_of, own[dim])
        found[dim] = (_positions(both, all_of), _positions(both, own[dim]))
    (rows, local_rows), (columns, local_columns) = found[ROWS], found[COLUMNS]
    return Piece(rows, columns, local_rows, local_columns)


@lru_cache(maxsize=4096)
def splitting_axes(held: Held) -> tuple[str, ...]:
    """Return the axes whose ranks have parts of the same matrix. Ranks of other axes have other matrices, or the same."""
    found = []
    for cut in held.cuts:
        dim = _dim(held, cut)
        along = [own for own in held.cuts if _dim(held, own) == dim]
        if dim == held.out:
            parts = [_holders(held, dim, along, cut.axis, features) for features in matrices_of(held)]
            splits = any(len(holders) > 1 for holders in parts)
        else:
            splits = dim != 0 and len(_holders(held, dim, along, cut.axis, ((0, stack_of(held)[dim]),))) > 1
        if splits:
            found.append(cut.axis)
    return tuple(name for name, _ in held.axes if name in found)


def _holders(held: Held, dim: int, along: Sequence[Cut], axis: str, spans: Spans) -> set[int]:
    """Return the indices on an axis of the ranks that have some of the spans."""
    cut = {one.axis for one in along}
    ranges = [range(size) if name in cut else range(1) for name, size in held.axes]
    place = [name for name, _ in held.axes].index(axis)
    return {at[place] for at in product(*ranges) if _common(own_spans(held, dim, at), spans)}


# -- spans ---------------------------------------------------------------------------------------------------------------------


def _length(spans: Spans) -> int:
    return sum(end - begin for begin, end in spans)


def _merged(spans: Iterable[tuple[int, int]]) -> Spans:
    """Return spans in ascending order without empty ones, those that touch made one."""
    found: list[tuple[int, int]] = []
    for begin, end in spans:
        if begin >= end:
            continue
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return tuple(found)


def _taken(spans: Spans, begin: int, end: int) -> Spans:
    """Return the spans of what is at the places ``begin`` to ``end`` of some spans."""
    found, place = [], 0
    for first, last in spans:
        found.append((max(first, first + begin - place), min(last, first + end - place)))
        place += last - first
    return _merged(found)


def _common(one: Spans, other: Spans) -> Spans:
    """Return what is in both."""
    found, first, second = [], 0, 0
    while first < len(one) and second < len(other):
        found.append((max(one[first][0], other[second][0]), min(one[first][1], other[second][1])))
        if one[first][1] < other[second][1]:
            first += 1
        else:
            second += 1
    return _merged(found)


def _positions(inner: Spans, outer: Spans) -> Spans:
    """Return at which places of some spans others are, which are inside of them."""
    found, place, index = [], 0, 0
    for begin, end in outer:
        while index < len(inner) and inner[index][0] < end:
            found.append((place + inner[index][0] - begin, place + inner[index][1] - begin))
            index += 1
        place += end - begin
    return _merged(found)


def _chunk(spans: Spans, pieces: int, ranks: int, rank: int) -> Spans:
    """Return the share of a rank, as ``torch.chunk`` divides: of the whole, or of each of some pieces of equal length."""
    length = _length(spans)
    found: list[tuple[int, int]] = []
    for piece in range(pieces):
        begin, end = piece * length // pieces, (piece + 1) * length // pieces
        share = -(-(end - begin) // ranks)
        first = min(begin + rank * share, end)
        found += _taken(spans, first, min(first + share, end))
    return _merged(found)

"""Muon: who orthogonalises which matrix, in which buckets, and what that sends and holds. Plain arithmetic over shapes.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) replaces the momentum of a matrix by an orthogonal matrix
near to it, for which it needs the whole matrix. So each matrix has an *owner* among the ranks that have parts or copies of it,
its *group*. In an update, an all-to-all brings the parts of all matrices of a *bucket* to their owners, and a second one brings
the results back to all ranks of the group. Replicas (`dp_replicate`) are in the group too: the owner of a matrix gets it from
the ranks of its own replica, and all replicas get the result, so that no matrix is computed twice. Matrices that are whole
where they lie, as experts under `ep` are, are exchanged with nobody but replicas.

The optimizer (:mod:`meshwright.distributed.update.sharded_muon`) asks the same functions, so a plan and a run cannot differ.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import product
from math import prod
from typing import NamedTuple

from meshwright.plan.update.matrices import Held, matrices_of, own_spans, piece_of, shape_of, splitting_axes

__all__ = [
    "BUCKET",
    "Bucket",
    "Flows",
    "Item",
    "decide",
    "flows",
    "index_of",
    "newton_schulz_work",
    "place_of",
    "places",
    "replica_of",
]

BUCKET = 2**25
"""Elements of the matrices of a bucket for each rank of the group. If matrices are larger, it may have one for each."""


class Item(NamedTuple):
    """One matrix of each of some neighbouring weights of a stack.

    Attributes:
        parameter: index of the parameter.
        matrix: index of the matrix in the weight.
        begin: the first weight, counted in the stack that the group has.
        end: behind the last one.
        owner: index in the group of the rank that computes it.
    """

    parameter: int
    matrix: int
    begin: int
    end: int
    owner: int

    @property
    def weights(self) -> int:
        """Number of weights."""
        return self.end - self.begin


@dataclass(frozen=True)
class Bucket:
    """What is exchanged at once.

    Attributes:
        axes: (name, size) of the axes of the group, outermost first; none: a rank alone.
        replicas: names of those whose ranks have the same.
        items: by owner, those of one shape behind each other.
    """

    axes: tuple[tuple[str, int], ...]
    replicas: tuple[str, ...]
    items: tuple[Item, ...]

    @property
    def ranks(self) -> int:
        """Size of the group."""
        return prod(size for _, size in self.axes)

    @property
    def split(self) -> bool:
        """Whether owners get parts from others; otherwise they have the matrices whole."""
        return len(self.axes) > len(self.replicas)

    @property
    def copies(self) -> int:
        """Number of replicas in the group."""
        return prod(size for name, size in self.axes if name in self.replicas)

    @property
    def all_to_alls(self) -> int:
        """Number of all-to-alls in an update."""
        return 0 if self.ranks == 1 else 1 + self.split

    @property
    def parameters(self) -> tuple[int, ...]:
        """Indices of the parameters."""
        return tuple(dict.fromkeys(item.parameter for item in self.items))


def newton_schulz_work(shape: tuple[int, int]) -> int:
    """Return the multiply-adds of one step of Newton-Schulz on a matrix: X X^T, its square, and the product with X."""
    short, long = sorted(shape)
    return short * short * (2 * long + short)


def decide(held: Sequence[Held], at: Mapping[str, int], bucket: int = BUCKET) -> tuple[Bucket, ...]:
    """Decide buckets and owners. The ranks of a group decide the same.

    Parameters whose groups have other ranks, or whose meshes have other axes, are in different buckets: only then do ranks that
    have the same parameter compute the same batches, and get the same results to the last bit. Parameters that are held alike
    are neighbours, the most expensive matrices first. Each matrix goes to the rank with the least work so far (Graham 1969).

    Args:
        held: how each parameter is held, in the order of the model.
        at: index of the rank on each axis; those on the axes of groups do not matter.
        bucket: see :data:`BUCKET`.
    """
    first: dict[Held, int] = {}
    by_group: dict[tuple[object, tuple[str, ...], tuple[str, ...]], list[int]] = {}
    for index, own in enumerate(held):
        first.setdefault(own, index)
        by_group.setdefault((own.axes, splitting_axes(own), own.replicas), []).append(index)
    found: list[Bucket] = []
    for (_, splitting, replicas), members in by_group.items():
        axes = tuple((name, size) for name, size in held[members[0]].axes if name in (*splitting, *replicas))
        ranks = prod(size for _, size in axes)
        work, filling, filled = [(0, rank) for rank in range(ranks)], list[Item](), 0
        for index in sorted(members, key=lambda index: (-_most_work(held[index]), first[held[index]], index)):
            own = held[index]
            stack = sum(end - begin for begin, end in own_spans(own, 0, place_of(own, at)))
            shapes = {matrix: shape_of(own, matrix) for matrix in _matrices_in(own, axes, at)}
            size, largest = stack * sum(map(prod, shapes.values())), max(map(prod, shapes.values()), default=0)
            if filling and filled + size > ranks * max(bucket, largest):
                found.append(_bucket(held, filling, axes, replicas))
                filling, filled = [], 0
            filled += size
            for matrix, shape in shapes.items():
                for begin, end in _shares(stack, ranks):
                    done, owner = work[0]
                    heapreplace(work, (done + (end - begin) * newton_schulz_work(shape), owner))
                    filling.append(Item(index, matrix, begin, end, owner))
        found.append(_bucket(held, filling, axes, replicas))
    return tuple(own for own in found if own.items)  # a rank may have nothing of what is not exchanged


def _bucket(held: Sequence[Held], items: list[Item], axes: tuple[tuple[str, int], ...], replicas: tuple[str, ...]) -> Bucket:
    def order(item: Item) -> tuple[object, ...]:
        return item.owner, shape_of(held[item.parameter], item.matrix), item.parameter, item.matrix, item.begin

    return Bucket(axes, replicas, tuple(sorted(items, key=order)))


def _most_work(held: Held) -> int:
    return max(newton_schulz_work(shape_of(held, matrix)) for matrix in range(len(matrices_of(held))))


def _matrices_in(held: Held, axes: Sequence[tuple[str, int]], at: Mapping[str, int]) -> list[int]:
    """Return the matrices that ranks of a group have. Where an axis shards whole matrices, they do not have all."""
    everything = range(len(matrices_of(held)))
    inside = {name for name, _ in axes}
    if all(cut.axis in inside or cut.dim + 3 - len(held.shape) != held.out for cut in held.cuts):
        return list(everything)
    members = _places(held, axes, at)
    return [matrix for matrix in everything if any(0 not in piece_of(held, matrix, place).shape for place in members)]


def place_of(held: Held, at: Mapping[str, int]) -> tuple[int, ...]:
    """Return the index of a rank on each axis of the mesh of a parameter."""
    return tuple(at[name] for name, _ in held.axes)


def _shares(stack: int, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of a stack of weights, as many as there can be owners."""
    shares = min(stack, ranks)
    for share in range(shares):
        yield share * stack // shares, (share + 1) * stack // shares


# -- what is sent --------------------------------------------------------------------------------------------------------------


class Flows(NamedTuple):
    """Elements that a rank sends to each rank of the group, itself included, and receives from each, in both all-to-alls."""

    sent_in: list[int]
    received_in: list[int]
    sent_out: list[int]
    received_out: list[int]


def places(held: Held, bucket: Bucket, at: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Return the index of each rank of a group on each axis of the mesh of a parameter."""
    return _places(held, bucket.axes, at)


def _places(held: Held, axes: Sequence[tuple[str, int]], at: Mapping[str, int]) -> list[tuple[int, ...]]:
    names, sizes = [name for name, _ in axes], [range(size) for _, size in axes]
    return [place_of(held, {**at, **dict(zip(names, indices, strict=True))}) for indices in product(*sizes)]


def replica_of(bucket: Bucket, index: int) -> tuple[int, ...]:
    """Return which replica a rank of the group is in."""
    found = []
    for name, size in reversed(bucket.axes):
        index, place = divmod(index, size)
        if name in bucket.replicas:
            found.append(place)
    return tuple(found)


def index_of(bucket: Bucket, at: Mapping[str, int]) -> int:
    """Return the index of a rank in its group."""
    index = 0
    for name, size in bucket.axes:
        index = index * size + at[name]
    return index


def flows(held: Sequence[Held], bucket: Bucket, at: Mapping[str, int]) -> Flows:
    """Return what one rank exchanges in an update of all parameters of a bucket."""
    me, ranks = index_of(bucket, at), range(bucket.ranks)
    found = Flows(*([0] * bucket.ranks for _ in Flows._fields))
    for item in bucket.items:
        own = held[item.parameter]
        everyone = places(own, bucket, at) if item.owner == me else []
        mine = item.weights * prod(piece_of(own, item.matrix, place_of(own, at)).shape)
        found.received_out[item.owner] += mine
        if bucket.split and replica_of(bucket, item.owner) == replica_of(bucket, me):
            found.sent_in[item.owner] += mine
        for rank in ranks if item.owner == me else ():
            theirs = item.weights * prod(piece_of(own, item.matrix, everyone[rank]).shape)
            found.sent_out[rank] += theirs
            if bucket.split and replica_of(bucket, rank) == replica_of(bucket, me):
                found.received_in[rank] += theirs
    return found

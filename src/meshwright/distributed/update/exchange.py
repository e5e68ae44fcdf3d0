"""One bucket of Muon on one rank: its parts go to the owners of their matrices, and the results come back.

Tensors of a bucket, by name:

    update  [stack, rows, columns]   of each parameter, the shard of what is orthogonalised
    sent    [elements]               parts of the rank's shards, by owner; received from all ranks as ``arrived``
    batch   [count, short, long]     whole matrices of one shape that this rank owns; a tall one lies on its side
    results [elements]               parts of the results, by the rank that they go to; received from all owners as ``back``

Which part is where was decided in :mod:`meshwright.plan.update.muon`; here it is made into slices of tensors, once.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshwright.plan.update.matrices import Held, Spans, piece_of, shape_of
from meshwright.plan.update.muon import Bucket, Flows, Item, flows, index_of, place_of, places, replica_of

__all__ = ["BucketExchange", "Part"]

Where = tuple[slice | torch.Tensor, ...]
"""Which entries of a tensor [stack, rows, columns]."""


class Part(NamedTuple):
    """The part of an item that is in a shard.

    Attributes:
        parameter: index of the parameter.
        matrix: shape of the whole matrix, as it lies in the weight: [rows, columns].
        where: which entries of the shard [stack, rows, columns].
        shape: [weights, rows, columns].
    """

    parameter: int
    matrix: tuple[int, int]
    where: Where
    shape: tuple[int, int, int]


class _Place(NamedTuple):
    """Where the part of an item that one rank has is in a batch."""

    batch: tuple[int, int]
    tall: bool
    where: Where
    shape: tuple[int, int, int]


class BucketExchange:
    """What a rank does for a bucket in each update.

    Args:
        held: how each parameter is held.
        bucket: the bucket.
        at: index of this rank on each axis.
        group: process group of the ranks of the bucket; ``None``: this rank is alone.
        order: place in the group of each of its ranks, which decides what is sent to it.
        home: where shards are. If that is another device, parts travel in one copy, for which the host waits.
        device: where matrices are exchanged and computed.
        dtype: in which they are.
    """

    def __init__(
        self,
        held: Sequence[Held],
        bucket: Bucket,
        at: Mapping[str, int],
        group: dist.ProcessGroup | None,
        order: Sequence[int],
        home: torch.device,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.bucket, self.parameters = bucket, bucket.parameters
        self._group, self._home, self._device, self._dtype = group, home, device, dtype
        me = index_of(bucket, at)
        self._flows = Flows(*([numbers[rank] for rank in order] for numbers in flows(held, bucket, at)))
        items = sorted(bucket.items, key=lambda item: order.index(item.owner))
        mine = [item for item in items if item.owner == me]
        own = {index: place_of(held[index], at) for index in self.parameters}
        self._batches: dict[tuple[int, int], int] = {}
        first = {}
        for item in mine:
            first[item] = self._batches.get(key := _batch_of(held, item), 0)
            self._batches[key] = first[item] + item.weights

        def parts(items: Sequence[Item]) -> list[Part]:
            found = [_part(held, item, own[item.parameter], home) for item in items]
            return [part for part in found if prod(part.shape)]

        def placed(ranks: Sequence[int]) -> list[_Place]:
            found = [
                _place(held, item, first[item], places(held[item.parameter], bucket, at)[rank], device)
                for rank in ranks
                for item in mine
            ]
            return [place for place in found if prod(place.shape)]

        beside = [rank for rank in order if replica_of(bucket, rank) == replica_of(bucket, me)]
        self._sent = parts([item for item in items if item.owner in beside]) if bucket.split else parts(mine)
        self._arrived = placed(beside) if bucket.split else placed([me])
        self._results = placed(order)
        self.back = parts(items)
        """The parts of the shards of this rank, in the order of :meth:`finish`."""
        self._waiting: tuple[list[torch.Tensor], dist.Work | None] = ([], None)

    def start(self, updates: Mapping[int, torch.Tensor]) -> None:
        """Send the parts of this rank's shards to the owners, if others own any.

        Args:
            updates: index of each parameter of the bucket to the shard of what is orthogonalised, [stack, rows, columns].
        """
        if not self.bucket.split:
            return
        self._exchange(self._together(updates), self._flows.sent_in, self._flows.received_in)

    def _together(self, updates: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return the parts that are sent, or that this rank computes where nothing is sent: [elements]."""
        shapes = [part.shape for part in self._sent]
        found = torch.empty(sum(map(prod, shapes)), dtype=self._dtype, device=self._home)
        _copy(_segments(found, shapes), [updates[part.parameter][part.where] for part in self._sent])
        return found.to(self._device)

    def compute(
        self, orthogonalise: Callable[[torch.Tensor], torch.Tensor], updates: Callable[[], Mapping[int, torch.Tensor]]
    ) -> None:
        """Compute the matrices that this rank owns, and send the results to all that have parts of them.

        Args:
            orthogonalise: [batch, short, long] to the same; it may overwrite what it gets.
            updates: returns the argument of :meth:`start`, where that sent nothing.
        """
        if self.bucket.split:
            parts = _segments(self._received(), [place.shape for place in self._arrived])
        elif self._home != self._device:
            parts = _segments(self._together(updates()), [part.shape for part in self._sent])
        else:
            whole = updates()
            parts = [whole[part.parameter][part.where] for part in self._sent]
            del whole
        results = torch.empty(sum(self._flows.sent_out), dtype=self._dtype, device=self._device)
        leaving = _segments(results, [place.shape for place in self._results])
        for key, count in self._batches.items():
            batch = torch.empty(count, *key, dtype=self._dtype, device=self._device)
            here = [index for index, place in enumerate(self._arrived) if place.batch == key]
            _put(batch, [self._arrived[index] for index in here], [parts[index] for index in here])
            batch = orthogonalise(batch)
            here = [index for index, place in enumerate(self._results) if place.batch == key]
            _copy([leaving[index] for index in here], [_view(batch, self._results[index]) for index in here])
            del batch
        del parts
        if self._group is None:
            self._waiting = [results], None
        else:
            self._exchange(results, self._flows.sent_out, self._flows.received_out)

    def finish(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the results for this rank's shards: one tensor [elements], and its view for each part of :attr:`back`."""
        back = self._received().to(self._home)
        return back, _segments(back, [part.shape for part in self.back])

    def _exchange(self, sent: torch.Tensor, to: list[int], come: list[int]) -> None:
        received = sent.new_empty(sum(come))
        work = dist.all_to_all_single(received, sent, come, to, group=self._group, async_op=True)
        self._waiting = [received, sent], work

    def _received(self) -> torch.Tensor:
        """Return what the exchange that is under way brought. On an accelerator its stream waits, and not the host."""
        (received, *_), work = self._waiting
        if work is not None:
            work.wait()
        self._waiting = [], None
        return received


def _batch_of(held: Sequence[Held], item: Item) -> tuple[int, int]:
    short, long = sorted(shape_of(held[item.parameter], item.matrix))
    return short, long


def _part(held: Sequence[Held], item: Item, at: tuple[int, ...], device: torch.device) -> Part:
    own = held[item.parameter]
    piece = piece_of(own, item.matrix, at)
    where = (slice(item.begin, item.end), _indices(piece.local_rows, device), _indices(piece.local_columns, device))
    return Part(item.parameter, shape_of(own, item.matrix), _all_tensors(where, device), (item.weights, *piece.shape))


def _place(held: Sequence[Held], item: Item, first: int, at: tuple[int, ...], device: torch.device) -> _Place:
    own = held[item.parameter]
    piece, (rows, columns) = piece_of(own, item.matrix, at), shape_of(own, item.matrix)
    where = (slice(first, first + item.weights), _indices(piece.rows, device), _indices(piece.columns, device))
    key = _batch_of(held, item)
    return _Place(key, rows > columns, _all_tensors(where, device), (item.weights, *piece.shape))


def _indices(spans: Spans, device: torch.device) -> slice | torch.Tensor:
    """Return some indices as a slice, if they have one distance."""
    if len(spans) < 2:
        return slice(*spans[0]) if spans else slice(0, 0)
    begins = [begin for begin, _ in spans]
    distances = {later - earlier for earlier, later in pairwise(begins)}
    if len(distances) == 1 and all(end - begin == 1 for begin, end in spans):
        return slice(begins[0], begins[-1] + 1, distances.pop())
    return torch.cat([torch.arange(begin, end) for begin, end in spans]).to(device)


def _all_tensors(where: Where, device: torch.device) -> Where:
    """Return indices that select every combination, which torch does with one tensor among slices, but not with two."""
    if sum(isinstance(own, torch.Tensor) for own in where) < 2:
        return where
    found = [
        torch.arange(own.start, own.stop, own.step or 1, device=device) if isinstance(own, slice) else own for own in where
    ]
    return tuple(own.view([-1 if dim == place else 1 for dim in range(len(found))]) for place, own in enumerate(found))


def _is_view(where: Where) -> bool:
    return not any(isinstance(own, torch.Tensor) for own in where)


def _segments(buffer: torch.Tensor, shapes: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
    """Return a buffer [elements] as tensors that lie behind each other."""
    return [part.view(shape) for part, shape in zip(buffer.split([prod(shape) for shape in shapes]), shapes, strict=True)]


def _view(batch: torch.Tensor, place: _Place) -> torch.Tensor:
    return (batch.mT if place.tall else batch)[place.where]


def _put(batch: torch.Tensor, targets: Sequence[_Place], parts: Sequence[torch.Tensor]) -> None:
    """Copy parts of matrices to their places."""
    views = [(place, part) for place, part in zip(targets, parts, strict=True) if _is_view(place.where)]
    _copy([_view(batch, place) for place, _ in views], [part for _, part in views])
    for place, part in zip(targets, parts, strict=True):
        if not _is_view(place.where):
            (batch.mT if place.tall else batch)[place.where] = part.to(batch)


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)

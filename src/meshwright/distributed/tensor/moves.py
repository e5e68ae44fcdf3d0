"""The redistributions of tensor parallel, as autograd functions. The backward of each is the conjugate of its forward.

Tensors are plain tensors, and each is in one of three states over the ranks of a group. A *whole* tensor is the same on all
ranks (``Replicate``). *Parts* have to be added up (``Partial``). *Slices* have to be joined along a dimension (``Shard``).
Slices are as ``torch.chunk`` makes them: all have one width, except the last ones.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.distributed import _torch_compat

__all__ = [
    "count_once",
    "enter",
    "enter_last",
    "exchange",
    "gather",
    "leave",
    "slice_of",
    "slice_width",
    "split",
    "sum_both_ways",
    "to_parts",
    "to_slices",
]

Group = dist.ProcessGroup


def enter(whole: torch.Tensor, group: Group) -> torch.Tensor:
    """Enter a region in which each rank computes a part. Forward is the identity; backward adds up the gradient's parts."""
    return _Enter.apply(whole, group)


def enter_last(whole: torch.Tensor, width: int, group: Group) -> torch.Tensor:
    """Enter such a region with the last ``width`` features alone."""
    first, last = whole.split([whole.shape[-1] - width, width], dim=-1)
    return torch.cat([first, enter(last, group)], dim=-1)


def leave(part: torch.Tensor, group: Group) -> torch.Tensor:
    """Leave such a region. Forward adds up the parts; backward is the identity, because the gradient is whole."""
    return _Leave.apply(part, group)


def sum_both_ways(part: torch.Tensor, group: Group) -> torch.Tensor:
    """Add up parts, where each rank computes a part with the sum. Forward and backward each add up the parts."""
    return enter(leave(part, group), group)


def gather(piece: torch.Tensor, dim: int, size: int, group: Group) -> torch.Tensor:
    """Join slices to ``size`` entries. Backward takes this rank's slice of the gradient, which is whole."""
    return _Gather.apply(piece, dim, size, group)


def split(whole: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Take this rank's slice of a whole tensor. Backward joins the slices of the gradient."""
    return _Split.apply(whole, dim, group)


def to_parts(piece: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Join slices of equal width. Backward adds up the parts of the gradient, and takes this rank's slice of the sum."""
    return _GatherParts.apply(piece, dim, group)


def to_slices(part: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Add up parts, and take this rank's slice of the sum (equal widths). Backward joins the slices of the gradient."""
    return _Scatter.apply(part, dim, group)


def exchange(piece: torch.Tensor, parts: Sequence[int], group: Group) -> torch.Tensor:
    """Turn a slice of the output of a fused matrix into this rank's slice of the output of each matrix in it.

    The last dimension of the whole output holds the outputs of several matrices one after another.

    Args:
        piece: [..., this rank's slice of ``sum(parts)``].
        parts: output width of each matrix, a multiple of the number of ranks.
        group: the ranks.
    """
    return _Exchange.apply(piece, tuple(parts), False, group)


def exchange_rows(rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> torch.Tensor:
    """Send rows to each rank, and receive rows from each rank (all-to-all). Backward sends the gradients back.

    Args:
        rows: [sum(sent), features], in the order of the ranks that they go to.
        sent: number of rows to each rank.
        received: number of rows from each rank.
        group: the ranks.
    """
    return _ExchangeRows.apply(rows, list(sent), list(received), group)


def count_once(whole: torch.Tensor, group: Group) -> torch.Tensor:
    """The identity. Backward divides the gradient, which is whole, by the number of ranks, over which it is summed later."""
    return _CountOnce.apply(whole, group)


def slice_width(size: int, group: Group) -> int:
    """Width of the widest slice."""
    return -(-size // dist.get_world_size(group))


def slice_of(tensor: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """This rank's slice."""
    size = tensor.shape[dim]
    width = slice_width(size, group)
    begin = min(dist.get_rank(group) * width, size)
    return tensor.narrow(dim, begin, min(width, size - begin)).contiguous()


def _summed(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _joined(piece: torch.Tensor, dim: int, size: int, group: Group) -> torch.Tensor:
    dim %= piece.ndim
    width, ranks = slice_width(size, group), dist.get_world_size(group)
    lacking = width - piece.shape[dim]
    padded = nn.functional.pad(piece, (0, 0) * (piece.ndim - 1 - dim) + (0, lacking)) if lacking else piece
    pieces = padded.new_empty((ranks * padded.shape[0], *padded.shape[1:]))
    _torch_compat.all_gather_single(pieces, padded.contiguous(), group=group)
    whole = torch.cat(pieces.chunk(ranks), dim=dim)  # not a view of the buffer, because FSDP puts hooks on outputs of units
    return whole if whole.shape[dim] == size else whole.narrow(dim, 0, size).contiguous()


def _scattered(part: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    pieces = torch.cat(part.chunk(ranks, dim=dim))
    own_part = pieces.new_empty((pieces.shape[0] // ranks, *pieces.shape[1:]))
    _torch_compat.reduce_scatter_single(own_part, pieces, group=group)
    return own_part


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, whole: torch.Tensor, group: Group) -> torch.Tensor:
        context.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(gradient, context.group), None


class _CountOnce(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, whole: torch.Tensor, group: Group) -> torch.Tensor:
        context.ranks = dist.get_world_size(group)
        return whole.view_as(whole)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient / context.ranks, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, part: torch.Tensor, group: Group) -> torch.Tensor:
        return _summed(part, group)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, piece: torch.Tensor, dim: int, size: int, group: Group) -> torch.Tensor:
        context.dim, context.group = dim, group
        return _joined(piece, dim, size, group)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return slice_of(gradient, context.dim, context.group), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, whole: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
        context.dim, context.size, context.group = dim, whole.shape[dim], group
        return slice_of(whole, dim, group)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _joined(gradient, context.dim, context.size, context.group), None, None


class _GatherParts(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, piece: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
        context.dim, context.group = dim, group
        return _joined(piece, dim, piece.shape[dim] * dist.get_world_size(group), group)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _scattered(gradient, context.dim, context.group), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, part: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
        context.dim, context.group = dim, group
        return _scattered(part, dim, group)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        size = gradient.shape[context.dim] * dist.get_world_size(context.group)
        return _joined(gradient, context.dim, size, context.group), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, piece: torch.Tensor, parts: tuple[int, ...], back: bool, group: Group) -> torch.Tensor:
        context.parts, context.back, context.group = parts, back, group
        return _exchanged(piece, parts, back, group)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _Exchange.apply(gradient, context.parts, not context.back, context.group), None, None, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: Group) -> torch.Tensor:
        context.sent, context.received, context.group = sent, received, group
        incoming = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(incoming, rows.contiguous(), received, sent, group=group)
        return incoming

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _ExchangeRows.apply(gradient, context.received, context.sent, context.group), None, None, None


def _exchanged(piece: torch.Tensor, parts: tuple[int, ...], back: bool, group: Group) -> torch.Tensor:
    """Forward of :func:`exchange`; with ``back``, its inverse."""
    columns = piece.movedim(-1, 0).contiguous()
    sent, received = _routes(parts, back, dist.get_world_size(group), dist.get_rank(group))
    buffer = columns[_index(sent, columns.device)]
    incoming = buffer.new_empty((sum(map(len, received)), *columns.shape[1:]))
    dist.all_to_all_single(incoming, buffer, list(map(len, received)), list(map(len, sent)), group=group)
    # Each rank sent its columns in the order of the fused matrix, so the columns from one rank go to ascending places.
    result = torch.empty_like(incoming)
    result[_index(received, columns.device)] = incoming
    return result.movedim(0, -1).contiguous()


Routes = tuple[tuple[int, ...], ...]
"""For each rank, indices of columns of the local tensor."""


@lru_cache(maxsize=64)
def _routes(parts: tuple[int, ...], back: bool, ranks: int, me: int) -> tuple[Routes, Routes]:
    """The columns of its slice that rank ``me`` sends to each rank, and the places of the columns that it receives."""
    total = sum(parts)
    width = -(-total // ranks)
    one = [[(rank * width, min((rank + 1) * width, total))] for rank in range(ranks)]
    each: list[list[tuple[int, int]]] = []
    for rank in range(ranks):
        begins = [sum(parts[:index]) + rank * size // ranks for index, size in enumerate(parts)]
        each.append([(begin, begin + size // ranks) for begin, size in zip(begins, parts, strict=True)])
    ours, theirs = (each, one) if back else (one, each)
    sent = tuple(_places(ours[me], theirs[rank]) for rank in range(ranks))
    return sent, tuple(_places(theirs[me], ours[rank]) for rank in range(ranks))


@lru_cache(maxsize=64)
def _index(routes: Routes, device: torch.device) -> torch.Tensor:
    return torch.tensor([place for places in routes for place in places], dtype=torch.long, device=device)


def _places(held: Sequence[tuple[int, int]], wanted: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Indices, ascending, of the columns that lie in some ranges, in a tensor that holds other ranges one after another."""
    indices: list[int] = []
    offset = 0
    for begin, end in held:
        for low, high in wanted:
            indices += range(offset + max(low, begin) - begin, offset + max(min(high, end) - begin, max(low, begin) - begin))
        offset += end - begin
    return tuple(sorted(indices))

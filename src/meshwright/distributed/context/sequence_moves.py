"""How tensors of a sequence that ranks of `cp` share are brought together and apart: autograd functions.

A rank has some positions of each sequence, piece by piece
(:func:`~meshwright.plan.axes.context.sharing.positions_of`). What comes together is in the order of the sequence.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from meshwright.distributed import _torch_compat

__all__ = ["exchange_for_heads", "exchange_for_positions", "gather_positions", "tokens_before"]

Group = dist.ProcessGroup
Pieces = Sequence[tuple[range, ...]]


def gather_positions(part: torch.Tensor, pieces: Pieces, group: Group) -> torch.Tensor:
    """All-gather [batch, heads, positions, size] over the positions, in the order of the sequence; backward: reduce-scatter."""
    gathered: torch.Tensor = _Gather.apply(part, pieces, group)
    return gathered


def exchange_for_heads(part: torch.Tensor, pieces: Pieces, group: Group) -> torch.Tensor:
    """Exchange [batch, heads, positions of this rank, size] for [batch, heads of this rank, positions, size] (all-to-all)."""
    own: torch.Tensor = _Exchange.apply(part, pieces, group, False)
    return own


def exchange_for_positions(own: torch.Tensor, pieces: Pieces, group: Group) -> torch.Tensor:
    """The inverse of :func:`exchange_for_heads`."""
    part: torch.Tensor = _Exchange.apply(own, pieces, group, True)
    return part


def tokens_before(part: torch.Tensor, count: int, pieces: Pieces, rank: int, group: Group) -> list[torch.Tensor]:
    """Return the tokens before each piece of a rank: [rows, as many as ``count`` or as there are, features].

    The last tokens of all pieces are gathered; backward: reduce-scatter. All pieces are of one length.

    Args:
        part: the tokens of this rank [rows, positions, features].
        count: number of tokens before a piece that are wanted.
        pieces: the positions of each rank.
        rank: index of this rank.
        group: the ranks that share the sequence.
    """
    width = len(pieces[0][0])
    few = min(count, width)  # of pieces that are shorter, all tokens of several are wanted
    last = torch.cat([piece[:, width - few :] for piece in part.split(width, 1)], 1)
    places = [tuple(range(own.start // width * few, own.start // width * few + few) for own in of) for of in pieces]
    gathered = gather_positions(last.unsqueeze(1), places, group).squeeze(1)
    return [gathered[:, max(0, place.start - count) : place.start] for place in places[rank]]


def _in_order(by_rank: torch.Tensor, pieces: Pieces) -> torch.Tensor:
    """Put the positions of all ranks, rank after rank in the first dimension, into the order of the sequence."""
    sizes = [len(piece) for own in pieces for piece in own]
    parts = by_rank.split(sizes)
    starts = [piece.start for own in pieces for piece in own]
    return torch.cat([parts[index] for index in sorted(range(len(parts)), key=starts.__getitem__)])


def _by_rank(ordered: torch.Tensor, pieces: Pieces) -> torch.Tensor:
    """The inverse of :func:`_in_order`."""
    return torch.cat([ordered[piece.start : piece.stop] for own in pieces for piece in own])


class _Gather(torch.autograd.Function):
    """All-gather [batch, heads, positions, size] over the positions, in the order of the sequence; backward: reduce-scatter."""

    @staticmethod
    def forward(context: Any, part: torch.Tensor, pieces: Pieces, group: Group) -> torch.Tensor:
        context.pieces, context.group = pieces, group
        own = part.movedim(2, 0).contiguous()
        gathered = own.new_empty((len(pieces) * own.shape[0], *own.shape[1:]))
        _torch_compat.all_gather_single(gathered, own, group=group)
        return _in_order(gathered, pieces).movedim(0, 2)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        by_rank = _by_rank(gradient.movedim(2, 0), context.pieces).contiguous()
        own = by_rank.new_empty((by_rank.shape[0] // len(context.pieces), *by_rank.shape[1:]))
        _torch_compat.reduce_scatter_single(own, by_rank, group=context.group)
        return own.movedim(0, 2), None, None


class _Exchange(torch.autograd.Function):
    """Exchange [batch, heads, positions of this rank, size] for [batch, heads of this rank, positions, size], or ``back``."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, pieces: Pieces, group: Group, back: bool) -> torch.Tensor:
        context.pieces, context.group, context.back = pieces, group, back
        return (_to_positions if back else _to_heads)(tensor, pieces, group)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        undo: Callable[..., torch.Tensor] = _to_heads if context.back else _to_positions
        return undo(gradient, context.pieces, context.group), None, None, None


def _to_heads(part: torch.Tensor, pieces: Pieces, group: Group) -> torch.Tensor:
    batch, heads, positions, size = part.shape
    ranks = len(pieces)
    sent = part.reshape(batch, ranks, heads // ranks, positions, size).permute(1, 3, 0, 2, 4).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return _in_order(received.flatten(0, 1), pieces).movedim(0, 2)


def _to_positions(part: torch.Tensor, pieces: Pieces, group: Group) -> torch.Tensor:
    batch, heads, length, size = part.shape
    ranks = len(pieces)
    sent = _by_rank(part.movedim(2, 0), pieces).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    by_head = received.reshape(ranks, length // ranks, batch, heads, size).permute(2, 0, 3, 1, 4)
    return by_head.reshape(batch, ranks * heads, length // ranks, size)

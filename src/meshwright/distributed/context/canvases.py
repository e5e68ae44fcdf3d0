"""Canvases that the ranks of `cp` share: what an attention must know of one, and how it is cut.

A *canvas* is a second sequence beside a clean one. Its attention has queries of the canvas alone, and keys of both: those of
the clean sequence first, then its own. So keys have *places*: ``0`` to ``clean - 1`` are the positions of the clean sequence,
and ``clean`` to ``clean + columns - 1`` the columns of the canvas. Which places a column sees is a rule of the family, a
function of blocks and positions.

A rank of `cp` has the clean positions that it has anyhow, and of the canvas the columns that
:func:`~meshwright.plan.axes.context.positions_of` gives it. Neither cut needs to be the border of a block.

A batch has whole canvases on every rank, because a tensor that is no ``[batch, length]`` is not cut with the sequence. A rank
takes its columns with :func:`cut_columns` where the model is called.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.plan.axes.context.sharing import positions_of
from meshwright.plan.given.closed_choices import ContextBalance

__all__ = ["Canvases", "Rule", "Share", "canvases_of", "cut_columns", "let_canvases_be_known"]

_CANVASES = "_meshwright_canvases"

Rule = Callable[[range, range, range, int | None], torch.Tensor]
"""Takes columns that ask, clean positions, columns that are asked, and the window; returns who sees whom, bool
[batch, 1, columns that ask, clean positions + columns that are asked]."""


@dataclass(frozen=True)
class Share:
    """Which part of each sequence a rank has.

    Attributes:
        rank: index of the rank on `cp`.
        ranks: number of ranks of `cp`.
        balance: how sequences and canvases are cut.
    """

    rank: int
    ranks: int
    balance: ContextBalance

    @property
    def multiple(self) -> int:
        """The number that must divide the columns of a canvas."""
        return self.ranks if self.balance is ContextBalance.CONTIGUOUS else 2 * self.ranks

    def pieces(self, length: int) -> list[tuple[range, ...]]:
        """Return the positions of each rank, of a sequence or canvas of some length."""
        return [positions_of(length, self.ranks, self.balance, rank) for rank in range(self.ranks)]


@dataclass(frozen=True)
class Canvases:
    """The whole canvases of a microbatch, of which each rank of `cp` has a part.

    It is asked what :class:`~meshwright.distributed.context.sequences.Sequences` is asked, about places.

    Attributes:
        clean: number of positions of a clean sequence.
        columns: number of columns of a canvas, a multiple of :attr:`Share.multiple`.
        rule: which places a column sees.
    """

    clean: int
    columns: int
    rule: Rule
    documents = prefix = None
    _made: dict[Any, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def length(self) -> int:
        """Number of places."""
        return self.clean + self.columns

    def at(self, columns: range) -> range:
        """Return the places of some columns."""
        return range(self.clean + columns.start, self.clean + columns.stop)

    def keys_by_rank(self, share: Share) -> list[tuple[range, ...]]:
        """Return the places of the keys of each rank, in the order in which it has them."""
        pairs = zip(share.pieces(self.clean), share.pieces(self.columns), strict=True)
        return [(*clean, *map(self.at, columns)) for clean, columns in pairs]

    def keys(self, queries: range, causal: bool, window: int | None) -> range:
        """Return the places outside of which none of some queries sees a key: all, as blocks are known on the device alone."""
        return range(self.length)

    def mask(self, queries: range, keys: range, causal: bool, window: int | None, device: torch.device) -> torch.Tensor:
        """Return which of the keys at some places each query sees, bool [batch, 1, queries, keys]."""
        ask = range(queries.start - self.clean, queries.stop - self.clean)
        positions = range(min(keys.start, self.clean), min(keys.stop, self.clean))
        asked = range(max(keys.start - self.clean, 0), max(keys.stop - self.clean, 0))
        return self.rule(ask, positions, asked, window)

    def bias(self, queries: range, keys: range, causal: bool, window: int | None, like: torch.Tensor) -> torch.Tensor:
        """Return :meth:`mask` as what is added to scores, in the dtype and on the device of a tensor. It is made once."""
        key = (queries, keys, window, like.dtype)
        if key not in self._made:
            mask = self.mask(queries, keys, causal, window, like.device)
            self._made[key] = torch.zeros_like(mask, dtype=like.dtype).masked_fill_(~mask, float("-inf"))
        return self._made[key]


def cut_columns(share: Share, tensor: torch.Tensor, fill: int) -> torch.Tensor:
    """Return the columns of a rank of canvases [batch, columns], padded with ``fill`` until all ranks have equally many."""
    missing = -tensor.shape[1] % share.multiple
    if missing:
        tensor = torch.nn.functional.pad(tensor, (0, missing), value=fill)
    own = share.pieces(tensor.shape[1])[share.rank]
    return torch.cat([tensor[:, piece.start : piece.stop] for piece in own], dim=1)


def let_canvases_be_known(positions: torch.Tensor, canvases: Canvases) -> None:
    """Let the attentions of a forward know whole canvases by the positions [batch, columns] of a rank, which they are given."""
    vars(positions)[_CANVASES] = canvases


def canvases_of(positions: torch.Tensor | None) -> Canvases | None:
    """Return the whole canvases that positions are a part of; ``None``: these are not those of a canvas."""
    return None if positions is None else vars(positions).get(_CANVASES)

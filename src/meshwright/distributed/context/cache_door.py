"""Attentions that compute themselves: they get the keys and values of other ranks where they would read a cache.

A model that can generate lets each attention put its keys and values into a cache, and compute with all that the cache then
has: fewer queries than keys. That is what a rank of `cp` needs. So a model gets a cache of ours, a *door*: it keeps nothing,
and returns the keys and values of the whole sequence, in its order. What an attention puts in has its rotary embedding already.
Everything after it is the code of the model: its kernel, biases by the place of a key, an indexer.

The masks of transformers are made by the sizes that the cache says. For a rank they are those of its own queries.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from meshwright.distributed.context.sequence_moves import gather_positions
from meshwright.distributed.context.sequences import Sequences, sequences_of
from meshwright.distributed.mesh import ParallelMesh
from meshwright.errors import UnsupportedError
from meshwright.plan.axes.context.sharing import positions_of
from meshwright.plan.result.context.cache_action import GiveCache

__all__ = ["CACHE", "Bring", "give_cache", "make_door"]

CACHE = "past_key_values"
"""The argument by which all models of transformers are given a cache."""

Bring = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""Returns tensors [batch, (heads,) tokens, size] with the tokens of all ranks."""

_MASKS = ("eager", "sdpa")
"""The kernels whose masks are tensors."""
_OF_RANK: set[Callable[..., Any]] = set()
"""The functions of ours that make their masks."""


class _Rows(NamedTuple):
    """The queries of the forward of a model that is running."""

    model: nn.Module
    places: torch.Tensor
    sequences: Sequences


class _Running(threading.local):
    rows: tuple[_Rows, ...] = ()


_RUNNING = _Running()


def make_door(bring: Bring, length: int, asked: Callable[[], None] = lambda: None) -> Any:
    """Return a cache of transformers that keeps nothing.

    Args:
        bring: what it returns for what it is given.
        length: number of tokens of what it returns.
        asked: called where a mask is made.
    """
    return _door_class()(bring, length, asked)


@cache
def _door_class() -> type[Any]:
    from transformers import DynamicCache

    class Door(DynamicCache):
        """A cache that returns keys and values of all ranks, and stays empty."""

        def __init__(self, bring: Bring, length: int, asked: Callable[[], None]) -> None:
            super().__init__()
            self.bring, self.length, self.asked = torch.compiler.disable(bring), length, asked

        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
            """Return the keys and values of the whole sequence."""
            return tuple(self.bring([key_states, value_states]))

        def update_indexer(self, indexer_key_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            """Return the keys of an indexer [batch, tokens, size] for the whole sequence."""
            return self.bring([indexer_key_states])[0]

        def get_seq_length(self, *_: Any, **__: Any) -> int:
            """Return the number of tokens before those of a forward."""
            return 0

        def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
            """Return the number of keys of a mask, and where they begin."""
            self.asked()
            return self.length, 0

    return Door


def give_cache(model: nn.Module, action: GiveCache, mesh: ParallelMesh) -> None:
    """Let each forward of a model have a cache that brings keys and values of other ranks, and masks of this rank's queries."""
    from transformers import AttentionMaskInterface

    for name in _MASKS:
        known = AttentionMaskInterface()[name]
        if known not in _OF_RANK:
            ours = partial(_mask_of_rank, known)
            _OF_RANK.add(ours)
            AttentionMaskInterface.register(name, ours)
    group = mesh[action.axis].get_group()
    begin = _Beginning(action, group, dist.get_world_size(group), dist.get_rank(group))
    model.register_forward_pre_hook(begin.run, with_kwargs=True)
    model.register_forward_hook(_end, always_call=True)


class _Beginning(NamedTuple):
    """What is done where the forward of a model begins."""

    action: GiveCache
    group: dist.ProcessGroup
    ranks: int
    rank: int

    def run(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Return the arguments of the forward with a cache."""
        positions = kwargs.get("position_ids")
        sequences = sequences_of(positions) if isinstance(positions, torch.Tensor) else None
        if sequences is None or sequences.prefix is not None or kwargs.get(CACHE) is not None:
            what = (
                "the position_ids of this forward are not those of a shard; call the model inside "
                "`with context_parallel(plan, mesh, batch) as shard`, with shard['position_ids'] itself"
                if sequences is None
                else f"{CACHE} cannot be given"
                if sequences.prefix is None
                else "an attention that computes itself knows no prefix that sees itself"
            )
            raise UnsupportedError("cp.positions" if sequences is None else "cp.argument", f"{type(model).__name__}: {what}")
        pieces = [positions_of(sequences.length, self.ranks, self.action.balance, rank) for rank in range(self.ranks)]
        places = torch.cat([torch.arange(piece.start, piece.stop, device=positions.device) for piece in pieces[self.rank]])
        _RUNNING.rows = (*_RUNNING.rows, _Rows(model, places, sequences))
        return args, {**kwargs, CACHE: make_door(partial(_gathered, pieces, self.group), sequences.length, _check_running)}


def _end(model: nn.Module, args: Any, output: Any) -> Any:
    """Take the cache out of what the forward of a model returns: no other hook knows what it is."""
    if _RUNNING.rows and _RUNNING.rows[-1].model is model:  # it is not if its forward was refused
        _RUNNING.rows = _RUNNING.rows[:-1]
    if not isinstance(output, Mapping):
        return output
    return type(output)(**{name: value for name, value in output.items() if name != CACHE})


def _check_running() -> None:
    if not _RUNNING.rows:
        raise UnsupportedError("cp.mask", "a layer that is computed again in backward makes its mask itself; recompute nothing")


def _gathered(pieces: Sequence[tuple[range, ...]], group: dist.ProcessGroup, own: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors [batch, (heads,) tokens, size] of all ranks in the order of the sequence, by one all-gather."""
    rows = [tensor.movedim(-2, 1) for tensor in own]
    widths = [row.shape[2:].numel() for row in rows]
    whole = gather_positions(torch.cat([row.flatten(2) for row in rows], -1).unsqueeze(1), pieces, group).squeeze(1)
    parts = zip(whole.split(widths, -1), rows, strict=True)
    return [part.unflatten(-1, row.shape[2:]).movedim(1, -2).contiguous().to(row.dtype) for part, row in parts]


def _begins(sequences: Sequences, documents: torch.Tensor) -> torch.Tensor:
    """Return where the document of each position begins, [batch, length]."""

    def make() -> torch.Tensor:
        rows = [[(document.start, len(document)) for document in sequences.documents_of(row)] for row in range(len(documents))]
        starts = [[start for start, length in row for _ in range(length)] for row in rows]
        return torch.tensor(starts, device=documents.device)

    begins: torch.Tensor = sequences.kept("begins", make)
    return begins


def _mask_of_rank(known: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return a mask of transformers; while a model with a door runs, that of this rank's queries over all keys."""
    from transformers import masking_utils

    rows = _RUNNING.rows[-1] if _RUNNING.rows else None
    if rows is None:
        return known(*args, **options)
    rule, documents = options["mask_function"], rows.sequences.documents
    relative = "remap_positions_for_packed_sequence" in vars(masking_utils)  # of releases that count the places of a rule so
    begins = _begins(rows.sequences, documents) if relative and documents is not None else None

    def seen(row: Any, head: Any, query: Any, key: Any) -> Any:
        at = rows.places[query]
        own = rule(row, head, at, key) if begins is None else rule(row, head, at - begins[row, at], key - begins[row, key])
        return own if documents is None else own & (documents[row, at] == documents[row, key])

    whole = {
        "mask_function": seen, "q_offset": 0, "kv_length": rows.sequences.length, "kv_offset": 0, "attention_mask": None,
        "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "use_vmap": False,
    }  # fmt: skip
    return known(*args, **{**options, **whole})

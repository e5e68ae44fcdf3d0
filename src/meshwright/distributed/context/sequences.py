"""Sequences that the ranks of `cp` share: how a batch is cut, and what an attention must know of the whole.

The mask of an attention depends on the documents of the whole sequence, of which a rank has a part. A :class:`Sequences` knows
them. It is stored on the tensor ``position_ids`` of its microbatch, which a model passes to every attention. So several
microbatches may be in flight, as in a pipeline, and a layer that is recomputed in backward finds that of its own microbatch.
Nothing is global.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.device import pinned
from meshwright.distributed.mesh import ParallelMesh
from meshwright.errors import ConfigError
from meshwright.plan.axes.context.sharing import positions_of
from meshwright.plan.result.sharding_plan import ShardingPlan

__all__ = [
    "Sequences",
    "are_same_entries",
    "carry_sequences_to",
    "context_parallel",
    "forget_kept",
    "join_sequences",
    "sequences_of",
    "share_batch",
]

_SEQUENCES = "_meshwright_sequences"


@dataclass(frozen=True)
class Sequences:
    """The whole sequences of a microbatch, of which each rank of `cp` has a part.

    Attributes:
        documents: int32 [batch, length], number of the document of each position; ``None``: each sequence is one document.
        prefix: bool [batch, length], positions that see each other within their document, earlier or later; ``None``: none.
        begins: for each position, the first position of its document, the smallest over the batch.
        ends: for each position, the end of its document, the largest over the batch.
        starts: for each sequence, the first positions of its documents.
    """

    documents: torch.Tensor | None
    prefix: torch.Tensor | None
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]
    _made: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls, positions: torch.Tensor, prefix: torch.Tensor | None = None, padding: torch.Tensor | None = None
    ) -> "Sequences":
        """Read documents from positions [batch, length]: one begins wherever the position is not that before plus one.

        Padding (bool [batch, length]) is a document of its own. If the tensors are on a device, the host waits for it.
        """
        rows = positions.detach().cpu().numpy()
        first = np.ones(rows.shape, dtype=bool)
        first[:, 1:] = np.diff(rows, axis=1) != 1
        if padding is not None:
            first[:, 1:] |= np.diff(padding.cpu().numpy().astype(np.int8), axis=1) != 0
        documents = np.cumsum(first, axis=1, dtype=np.int32)
        places = np.arange(rows.shape[1])
        begins = np.maximum.accumulate(np.where(first, places, 0), axis=1)
        last = np.ones(rows.shape, dtype=bool)
        last[:, :-1] = first[:, 1:]
        ends = np.minimum.accumulate(np.where(last, places + 1, rows.shape[1])[:, ::-1], axis=1)[:, ::-1]
        several = bool(first[:, 1:].any())
        return cls(
            torch.from_numpy(documents).to(positions.device) if several else None,
            None if prefix is None or not bool(prefix.any()) else prefix.bool(),
            tuple(begins.min(axis=0).tolist()),
            tuple(ends.max(axis=0).tolist()),
            tuple(tuple(np.flatnonzero(row).tolist()) for row in first),
        )

    def bias(self, queries: range, keys: range, causal: bool, window: int | None, like: torch.Tensor) -> torch.Tensor | None:
        """Return :meth:`mask` as what is added to scores, in the dtype and on the device of a tensor. It is made once."""

        def make() -> torch.Tensor | None:
            mask = self.mask(queries, keys, causal, window, like.device)
            zero = None if mask is None else torch.zeros(mask.shape, dtype=like.dtype, device=like.device)
            return None if zero is None or mask is None else zero.masked_fill_(~mask, float("-inf"))

        bias: torch.Tensor | None = self.kept((queries, keys, causal, window, like.dtype), make)
        return bias

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what was made for a key, which all layers of a microbatch use."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def documents_of(self, row: int) -> Iterator[range]:
        """Yield the positions of each document of a sequence."""
        starts = self.starts[row]
        yield from map(range, starts, [*starts[1:], self.length])

    @property
    def length(self) -> int:
        """Number of positions of a sequence."""
        return len(self.begins)

    def to(self, device: torch.device) -> "Sequences":
        """Return the same on a device."""
        documents, prefix = (
            None if tensor is None else pinned(tensor, device).to(device, non_blocking=True)
            for tensor in (self.documents, self.prefix)
        )
        return replace(self, documents=documents, prefix=prefix, _made={})

    def keys(self, queries: range, causal: bool, window: int | None) -> range:
        """Return the range of positions outside of which none of some queries sees a key."""
        begin, end = self.begins[queries.start], self.ends[queries.stop - 1]
        if causal and self.prefix is None:
            end = min(end, queries.stop)
        if window is not None and self.prefix is None:
            begin = max(begin, queries.start - window + 1)
        return range(begin, end)

    def mask(self, queries: range, keys: range, causal: bool, window: int | None, device: torch.device) -> torch.Tensor | None:
        """Return which keys each query sees, bool [batch or 1, 1, queries, keys]; ``None``: all."""
        query_places = torch.arange(queries.start, queries.stop, device=device)[:, None]
        key_places = torch.arange(keys.start, keys.stop, device=device)[None]
        seen = None
        if causal and keys.stop > queries.start + 1:
            seen = key_places <= query_places
        if window is not None and keys.start < queries.stop - window:
            near = query_places - key_places < window
            seen = near if seen is None else seen & near
        seen = None if seen is None else seen[None, None]
        if self.prefix is not None and seen is not None:
            both = self.prefix[:, None, queries.start : queries.stop, None] & self.prefix[:, None, None, keys.start : keys.stop]
            seen = seen | both
        if self.documents is not None:
            ours = self.documents[:, None, queries.start : queries.stop, None]
            same = ours == self.documents[:, None, None, keys.start : keys.stop]
            seen = same if seen is None else seen & same
        return seen


@contextmanager
def context_parallel(
    plan: ShardingPlan | None, mesh: ParallelMesh | DeviceMesh | None, batch: Mapping[str, torch.Tensor]
) -> Iterator[dict[str, torch.Tensor]]:
    """Cut a batch for this rank of `cp`, for a loop of one's own.

    Call the model with the shard inside the context; backward may run outside of it. Without attentions or mixers in the plan,
    the batch is not changed.

    Args:
        plan: the plan that the model was parallelized with; ``None``: it was not, as a manager leaves it in one process.
        mesh: the mesh of the plan's layout.
        batch: whole sequences, the same on all ranks of `cp`: tensors [batch, length]. ``labels`` must be shifted already, so
            the model must not be called with them. ``position_ids`` restart where a document begins; without them each
            sequence is one document. ``prefix`` (bool) marks positions that see each other within their document, earlier or
            later.

    Yields:
        The same tensors with the positions of this rank, without ``attention_mask`` and ``prefix``.

    Raises:
        ConfigError: ``plan.sequence_multiple`` does not divide the length, the shapes of the tensors do not belong together, or
            ``attention_mask`` masks more than padding at the end.
    """
    yield dict(batch) if plan is None or mesh is None else share_batch(plan, mesh["cp"].get_local_rank(), batch)


def share_batch(plan: ShardingPlan, rank: int, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the part of a batch that a rank of `cp` has; see :func:`context_parallel`."""
    if not (plan.attentions or plan.mixers):
        return dict(batch)
    cp = plan.layout.size("cp")
    whole = {name: tensor for name, tensor in batch.items() if tensor is not None}
    padding = _padding(whole.pop("attention_mask", None))
    tokens = whole.get("input_ids", whole.get("inputs_embeds"))
    if tokens is None or tokens.ndim < 2:
        raise ConfigError(
            "cp.batch", "context parallel: the batch needs input_ids [rows, length] (or inputs_embeds [rows, length, width])"
        )
    rows, length = tokens.shape[:2]
    if length % plan.sequence_multiple:
        raise ConfigError(
            "cp.length",
            f"context parallel: sequences have {length} tokens; pad them to a multiple of {plan.sequence_multiple} "
            "(plan.sequence_multiple)",
        )
    positions = whole.pop("position_ids", torch.arange(length, device=tokens.device))
    if tuple(positions.shape) not in ((rows, length), (1, length), (length,)):
        raise ConfigError(
            "cp.batch",
            f"context parallel: position_ids have the shape {tuple(positions.shape)}; legal are [{rows}, {length}] and "
            f"[{length}]",
        )
    whole["position_ids"] = positions.expand(rows, length)
    for name, tensor in whole.items():
        if tensor.ndim > 1 and tensor.shape[1] == length and tensor.shape[0] != rows:
            raise ConfigError(
                "cp.batch", f"context parallel: {name} has {tensor.shape[0]} rows of {length}; the batch has {rows}"
            )
    sequences = Sequences.of(whole["position_ids"], whole.pop("prefix", None), padding)
    pieces = positions_of(length, cp, plan.options.context_balance, rank)
    shard = {name: _cut(tensor, pieces) if tensor.shape[:2] == (rows, length) else tensor for name, tensor in whole.items()}
    vars(shard["position_ids"])[_SEQUENCES] = sequences
    return shard


@torch.no_grad()
def join_sequences(plan: ShardingPlan, mesh: ParallelMesh, part: torch.Tensor) -> torch.Tensor:
    """Return values of whole sequences [batch, length, ...] from each rank's part, without gradient. All of `cp` call it."""
    ranks = mesh["cp"].size()
    if not (plan.attentions or plan.mixers) or ranks == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(ranks)]
    dist.all_gather(parts, part.contiguous(), group=mesh["cp"].get_group())
    length = part.shape[1] * ranks
    whole = part.new_empty((part.shape[0], length, *part.shape[2:]))
    for rank, one in enumerate(parts):
        begin = 0
        for piece in positions_of(length, ranks, plan.options.context_balance, rank):
            whole[:, piece.start : piece.stop] = one[:, begin : begin + len(piece)]
            begin += len(piece)
    return whole


def sequences_of(position_ids: torch.Tensor | None) -> Sequences | None:
    """Return the whole sequences that a shard's ``position_ids`` are a part of; ``None``: these are not those of a shard."""
    if position_ids is None:
        return None
    whole = position_ids._base  # a model may repeat positions for axes of its rotary embedding, and take the first of them
    known = whole if whole is not None and are_same_entries(position_ids, whole) else position_ids
    return vars(position_ids).get(_SEQUENCES) or vars(known).get(_SEQUENCES)


def are_same_entries(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors, one of which may be a view of the other one, have the same entries in the same memory."""
    own, whole = (one if one._base is None else one._base for one in (tensor, other))
    places = ((one.shape, one.stride(), one.storage_offset()) for one in (tensor, other))
    return own is whole and len(set(places)) == 1


def carry_sequences_to(source: torch.Tensor, copy: torch.Tensor) -> None:
    """Give a copy of a shard's ``position_ids`` on another device what the original knows of its sequences."""
    sequences = sequences_of(source)
    if sequences is not None and copy is not source:
        vars(copy)[_SEQUENCES] = sequences.to(copy.device)


def forget_kept(position_ids: torch.Tensor | None) -> None:
    """Let go of what attentions keep for a microbatch, whose ``position_ids`` are given. They make it again if they must."""
    if (sequences := sequences_of(position_ids)) is not None:
        sequences._made.clear()


def _cut(tensor: torch.Tensor, pieces: Sequence[range]) -> torch.Tensor:
    return torch.cat([tensor[:, piece.start : piece.stop] for piece in pieces], dim=1)


def _padding(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return which positions are padding, for an ``attention_mask`` that masks nothing else."""
    if mask is None or bool((mask != 0).all()):
        return None
    kept = mask != 0
    if mask.ndim != 2 or bool((kept[:, 1:] & ~kept[:, :-1]).any()):
        raise ConfigError(
            "cp.batch",
            "context parallel: attention_mask masks more than padding at the end of sequences; give documents by position_ids "
            "that restart, and leave attention_mask out",
        )
    return ~kept

"""Dispatch of tokens to the ranks that hold their experts, and combination of the results.

On one rank, with ``T`` tokens, ``k`` experts per token, and ``E`` experts in the mixture over ``R`` ranks:

    pairs   [T * k]        (token, expert), sorted by expert, so that the pairs for one rank are contiguous
    counts  [R, E / R + 1] number of pairs for each expert of each rank, and of pairs whose expert does not exist; exchanged, so
                           that every receiver knows what it gets, and all ranks stop together if one cannot go on
    rows    [pairs, H]     hidden states, sent by all-to-all to the owners, which compute each row with its expert and weight 1
    results [pairs, H]     sent back by all-to-all, in the order of the pairs; the sender multiplies them by the weights and
                           adds them up

Nothing is dropped or padded: counts may be uneven and zero. A rank that gets no rows computes one row of zeros, so that its
parameters have gradients (zeros) and it takes part in every collective of the dispatch and of FSDP.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshwright.distributed.tensor import moves
from meshwright.errors import ModelError

__all__ = ["Compute", "dispatch", "static_splits"]

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``experts(hidden [tokens, features], index [tokens, k], weights [tokens, k])``."""

_STATIC: ContextVar[float | None] = ContextVar("static_splits", default=None)


@contextmanager
def static_splits(load: float = 1.0) -> Iterator[None]:
    """Inside, ignore the choice of the router: every rank divides its pairs evenly over the ranks and their experts.

    This is for planning: no shape depends on data, so fake tensors can be used. The computed values have no meaning.

    Args:
        load: pairs that this rank receives, over an even share.
    """
    token = _STATIC.set(load)
    try:
        yield
    finally:
        _STATIC.reset(token)


class _Route(NamedTuple):
    order: torch.Tensor
    """[pairs]: position of each pair that is sent in ``index.flatten()``."""
    sent: list[int]
    """Number of rows sent to each rank."""
    received: list[int]
    """Number of rows received from each rank."""
    experts: torch.Tensor
    """[rows received]: the expert of this rank that each row is for, counted from 0."""


def dispatch(
    compute: Compute,
    experts: int,
    group: dist.ProcessGroup,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    token_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Compute a mixture whose experts are divided over the ranks of a group, in ranges of equal length.

    Args:
        compute: computes this rank's experts, which are counted from 0.
        experts: number of experts of the whole mixture.
        group: process group of the ranks that share the experts.
        hidden: [tokens, features], hidden states.
        index: [tokens, k], the experts of each token, counted over all ranks.
        weights: [tokens, k], the weights of these experts.
        token_group: process group of ranks that have the same tokens, so that each sends only its share; ``None``: there are
            none.

    Returns:
        The output of the mixture, [tokens, features].

    Raises:
        ModelError: the shapes do not match; or, on all ranks of the group, a router on one rank chose an expert that does not
            exist.
    """
    if hidden.ndim != 2 or index.shape != weights.shape or index.shape[:1] != hidden.shape[:1]:
        shapes = ", ".join(str(tuple(item.shape)) for item in (hidden, index, weights))
        raise ModelError("moe.inputs", f"experts take hidden [tokens, features], index and weights [tokens, k]; got {shapes}")
    tokens = hidden.shape[0]
    if token_group is not None:
        hidden, weights = moves.split(hidden, 0, token_group), moves.split(weights, 0, token_group)
        index = moves.slice_of(index, 0, token_group)
    load = _STATIC.get()
    route = _route(index, experts, group) if load is None else _static_route(index, experts, group, load)
    rows = moves.exchange_rows(hidden[route.order // index.shape[1]], route.sent, route.received, group)
    results = moves.exchange_rows(_computed(compute, rows, route.experts), route.received, route.sent, group)
    back = torch.empty_like(route.order)
    back[route.order] = torch.arange(len(route.order), device=back.device)
    output = (results[back].unflatten(0, index.shape) * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)
    return output if token_group is None else moves.gather(output, 0, tokens, token_group)


def _computed(compute: Compute, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    if len(rows):
        return compute(rows, experts[:, None], rows.new_ones((len(rows), 1)))
    idle = rows.sum(0, keepdim=True)
    return compute(idle, experts.new_zeros((1, 1)), idle.new_ones((1, 1)))[:0]


def _route(index: torch.Tensor, experts: int, group: dist.ProcessGroup) -> _Route:
    ranks = dist.get_world_size(group)
    ids = index.flatten()
    order = torch.argsort(ids, stable=True)
    # An additional slot after the experts counts indices that are no expert, so that they are found here and not by a kernel.
    within = ids.clamp(-1, experts) % (experts + 1)
    counts = ids.new_zeros(experts + 1).scatter_add_(0, within, torch.ones_like(ids))
    sent = torch.cat([counts[:experts].view(ranks, experts // ranks), counts[experts:].expand(ranks, 1)], dim=1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    (sent, _), (received, strays) = sent.split([experts // ranks, 1], 1), received.split([experts // ranks, 1], 1)
    # Only here the host waits for the device.
    totals = torch.cat([sent.sum(1), received.sum(1), strays.flatten()]).tolist()
    if any(totals[2 * ranks :]):
        where = zip(dist.get_process_group_ranks(group), totals[2 * ranks :], strict=True)
        shown = ", ".join(f"{count} times on rank {rank}" for rank, count in where if count)
        raise ModelError("moe.inputs", f"the router chose an expert that does not exist, {shown}; legal are 0 to {experts - 1}")
    local = torch.arange(experts // ranks, device=ids.device).repeat(ranks)
    taken = totals[ranks : 2 * ranks]
    return _Route(order, totals[:ranks], taken, local.repeat_interleave(received.flatten(), output_size=sum(taken)))


def _static_route(index: torch.Tensor, experts: int, group: dist.ProcessGroup, load: float) -> _Route:
    ranks, me, pairs = dist.get_world_size(group), dist.get_rank(group), index.numel()
    sent = [pairs // ranks + (rank < pairs % ranks) for rank in range(ranks)]
    received = round(load * sent[me])
    own = torch.arange(received * ranks, device=index.device) % (experts // ranks)
    return _Route(torch.arange(pairs, device=index.device), sent, [received] * ranks, own)

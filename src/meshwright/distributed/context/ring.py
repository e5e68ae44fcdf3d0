"""Ring attention: keys and values travel from rank to rank, and each rank attends to one part after another.

The softmax of a query runs over all parts. For each part, :func:`_part` gives the output ``o`` over this part alone and the
logarithm ``l`` of the sum of its exponentials. Two parts are joined by ``l = log(exp l1 + exp l2)`` and
``o = exp(l1 - l) o1 + exp(l2 - l) o2`` (Milakov and Gimelshein, arXiv 1805.02867), in fp32 or better. A sink is a part without
values.

Backward needs no part again but its keys and values: with the final ``l`` the weights of a part are ``exp(score - l)``. Keys
and values travel once more, and their gradients travel with them, one rank behind, so that after the last step each is at home.

The next part is on its way while one is computed. A part that no query of this rank sees is passed on and not computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

__all__ = ["ring_attention"]

Group = dist.ProcessGroup
Pieces = Sequence[tuple[range, ...]]
Visible = Callable[[range, range], range]
Mask = Callable[[range, range], torch.Tensor | None]

MOST_SCORES = 2**20
"""Number of scores that exist at once; some tensors of that size are alive together. More queries are computed in blocks,"""
LEAST_QUERIES = 64
"""but at least so many, so that products of matrices have something to do."""


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    queries: Sequence[range],
    pieces: Pieces,
    visible: Visible,
    mask: Mask,
    scaling: float,
    softcap: float | None,
    group: Group,
) -> torch.Tensor:
    """Attend to the keys and values of all ranks.

    Args:
        query: [batch, heads, positions, key size], those of this rank.
        key: [batch, key/value heads, positions, key size].
        value: [batch, key/value heads, positions, value size].
        sinks: [heads]; ``None``: there are none.
        queries: the positions of the queries of this rank, piece by piece.
        pieces: for each rank of the group, the positions of the keys that it has, piece by piece.
        visible: returns the positions among some keys that some queries see; an empty range: none.
        mask: returns which of these keys each query sees, bool [batch or 1, 1, queries, keys]; ``None``: all.
        scaling: factor of the scores.
        softcap: scores are at most this large, by a tanh; ``None``: they are not limited.
        group: the ranks.

    Returns:
        The output [batch, heads, positions, value size].
    """
    plan = _Plan(tuple(queries), tuple(pieces), visible, mask, scaling, softcap, group)
    return _Ring.apply(query, key, value, sinks, plan)


@dataclass(frozen=True)
class _Plan:
    """What does not need a gradient: the arguments of :func:`ring_attention` under their names."""

    queries: Sequence[range]
    pieces: Pieces
    visible: Visible
    mask: Mask
    scaling: float
    softcap: float | None
    group: Group

    @property
    def ranks(self) -> int:
        return len(self.pieces)

    @cached_property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def blocks(self, source: int, heads: int) -> list[tuple[slice, slice, range, range]]:
        """Return the blocks of queries of this rank and keys of another that are computed.

        Each is the place of queries and of keys in the tensors of their ranks, and their positions in the sequence.
        """
        blocks = []
        for queries, at in _placed(self.queries):
            for keys, place in _placed(self.pieces[source]):
                rows = max(LEAST_QUERIES, MOST_SCORES // max(1, heads * len(keys)))
                for begin in range(queries.start, queries.stop, rows):
                    block = range(begin, min(begin + rows, queries.stop))
                    seen = self.visible(block, keys)
                    if len(seen) == 0:
                        continue
                    first = at + block.start - queries.start
                    start = place + seen.start - keys.start
                    blocks.append((slice(first, first + len(block)), slice(start, start + len(seen)), block, seen))
        return blocks


def _placed(pieces: Sequence[range]) -> list[tuple[range, int]]:
    return list(zip(pieces, [0, *accumulate(map(len, pieces))][:-1], strict=True))


def _pass_on(tensor: torch.Tensor, group: Group) -> tuple[torch.Tensor, list[Any]]:
    """Begin to send a tensor to the next rank and to receive that of the one before. Return it, and what to wait for."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    received = torch.empty_like(tensor)
    to, source = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
    operations = [dist.P2POp(dist.isend, tensor, to, group), dist.P2POp(dist.irecv, received, source, group)]
    if rank % 2:  # a backend that carries out one after another must find a partner in each pair of neighbours
        operations.reverse()
    return received, dist.batch_isend_irecv(operations)


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, plan: _Plan
    ) -> torch.Tensor:
        precise = torch.promote_types(query.dtype, torch.float32)
        batch, heads, positions, _ = query.shape
        output = query.new_zeros((batch, heads, positions, value.shape[-1]), dtype=precise)
        total = query.new_full((batch, heads, positions), float("-inf"), dtype=precise)
        if sinks is not None:  # a part of its own: no value, one exponential
            total.copy_(sinks.to(precise).view(1, -1, 1).expand_as(total))
        widths = [key.shape[-1], value.shape[-1]]
        part = torch.cat([key, value], dim=-1).contiguous()
        for step in range(plan.ranks):
            following, works = _pass_on(part, plan.group) if step + 1 < plan.ranks else (part, [])
            keys, values = part.split(widths, dim=-1)
            for at, place, queries, seen in plan.blocks((plan.rank - step) % plan.ranks, batch * heads):
                out, log = _part(query[:, :, at], keys[:, :, place], values[:, :, place], queries, seen, plan, precise)
                _merge(output[:, :, at], total[:, :, at], out, log)
            _wait(works)
            part = following
        result = output.to(query.dtype)
        context.save_for_backward(query, key, value, sinks, result, total)
        context.plan = plan
        return result

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, output, total = context.saved_tensors
        plan: _Plan = context.plan
        precise = total.dtype
        batch, heads = query.shape[:2]
        gradient = gradient.to(precise)
        # What the softmax takes off each row: the product of the output and its gradient.
        row = (output.to(precise) * gradient).sum(-1)
        query_gradient = torch.zeros_like(query, dtype=precise)
        widths = [key.shape[-1], value.shape[-1]]
        part = torch.cat([key, value], dim=-1).contiguous()
        part_gradient = torch.zeros_like(part, dtype=precise)
        sent: list[Any] = []
        for step in range(plan.ranks):
            following, works = _pass_on(part, plan.group) if step + 1 < plan.ranks else (part, [])
            keys, values = part.split(widths, dim=-1)
            mine = torch.zeros_like(part, dtype=precise)
            key_gradients, value_gradients = mine.split(widths, dim=-1)
            for at, place, queries, seen in plan.blocks((plan.rank - step) % plan.ranks, batch * heads):
                _part_backward(
                    query[:, :, at], keys[:, :, place], values[:, :, place], total[:, :, at], row[:, :, at],
                    gradient[:, :, at], query_gradient[:, :, at], key_gradients[:, :, place],
                    value_gradients[:, :, place], queries, seen, plan,
                )  # fmt: skip
            # The gradients of this part came from the rank before, with what the ranks before it added. They were on their way
            # while this part was computed.
            _wait(sent)
            part_gradient, sent = _pass_on(part_gradient.add_(mine), plan.group)
            _wait(works)
            part = following
        _wait(sent)
        key_gradient, value_gradient = part_gradient.split(widths, dim=-1)
        sinks_gradient = None
        if sinks is not None:
            weights = (sinks.to(precise).view(1, -1, 1) - total).exp()
            sinks_gradient = -(weights * row).sum((0, 2)).to(sinks.dtype)
        return query_gradient.to(query.dtype), key_gradient.to(key.dtype), value_gradient.to(value.dtype), sinks_gradient, None


def _scores(
    query: torch.Tensor, key: torch.Tensor, queries: range, seen: range, plan: _Plan, precise: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return scores [batch, key/value heads, queries of each, queries, keys], and the tanh of the softcap."""
    batch, heads, count, size = query.shape
    groups = heads // key.shape[1]
    grouped = query.reshape(batch, key.shape[1], groups, count, size)
    scores = (grouped @ key.transpose(2, 3).unsqueeze(2)).to(precise) * plan.scaling
    bent = None
    if plan.softcap is not None:
        bent = torch.tanh(scores / plan.softcap)
        scores = bent * plan.softcap
    allowed = plan.mask(queries, seen)
    if allowed is not None:
        scores = scores.masked_fill(~allowed.unsqueeze(2), float("-inf"))
    return scores, bent


def _part(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    queries: range,
    seen: range,
    plan: _Plan,
    precise: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output over one part alone, and the logarithm of the sum of its exponentials; -inf where nothing is seen."""
    scores, _ = _scores(query, key, queries, seen, plan, precise)
    total = scores.logsumexp(-1)
    weights = (scores - total.masked_fill(total.isneginf(), 0.0).unsqueeze(-1)).exp()
    output = weights.to(value.dtype) @ value.unsqueeze(2)
    return output.flatten(1, 2).to(precise), total.flatten(1, 2)


def _merge(output: torch.Tensor, total: torch.Tensor, more: torch.Tensor, log: torch.Tensor) -> None:
    """Add a part to what was summed up so far, in place."""
    both = torch.logaddexp(total, log)
    finite = both.masked_fill(both.isneginf(), 0.0)
    output.mul_((total - finite).exp().unsqueeze(-1)).add_((log - finite).exp().unsqueeze(-1) * more)
    total.copy_(both)


def _part_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    total: torch.Tensor,
    row: torch.Tensor,
    gradient: torch.Tensor,
    query_gradient: torch.Tensor,
    key_gradient: torch.Tensor,
    value_gradient: torch.Tensor,
    queries: range,
    seen: range,
    plan: _Plan,
) -> None:
    """Add the gradients that one part gives to those of queries, keys and values, in place."""
    precise, (batch, heads, count, size) = total.dtype, query.shape
    shape = (batch, key.shape[1], heads // key.shape[1], count)
    scores, bent = _scores(query, key, queries, seen, plan, precise)
    weights = (scores - total.reshape(shape).unsqueeze(-1)).exp()
    outgoing = gradient.reshape(*shape, -1)
    value_gradient += (weights.transpose(-1, -2) @ outgoing).sum(2)
    weights_gradient = outgoing @ value.to(precise).transpose(2, 3).unsqueeze(2)
    scores_gradient = weights * (weights_gradient - row.reshape(shape).unsqueeze(-1))
    if bent is not None:
        scores_gradient = scores_gradient * (1 - bent**2)
    scores_gradient = scores_gradient * plan.scaling
    query_gradient += (scores_gradient @ key.to(precise).unsqueeze(2)).reshape(batch, heads, count, size)
    key_gradient += (scores_gradient.transpose(-1, -2) @ query.to(precise).reshape(*shape, size)).sum(2)

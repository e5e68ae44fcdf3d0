"""Context parallel: attention over sequences that the ranks of `cp` share.

A rank has the tokens of its positions (:func:`~meshwright.plan.axes.context.sharing.positions_of`), and so its queries, keys
and values ``[batch, heads, positions of this rank, head size]``. The models of transformers call one function between the
projections of an attention and its output; :func:`attend` is this function here. It brings keys and values together by the
method of the plan, and computes with the kernel that the model would have used.

What it must know of the whole sequences comes with ``position_ids`` (:mod:`~meshwright.distributed.context.sequences`).

Keys and values are put into the order of the sequence first. Then a kernel computes
(:mod:`~meshwright.distributed.context.attention_kernels`).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.distributed.context.attention_kernels import AttentionRule, attention
from meshwright.distributed.context.canvases import Canvases, Share, canvases_of
from meshwright.distributed.context.carried import carry_sequences, running_sequences
from meshwright.distributed.context.ring import ring_attention
from meshwright.distributed.context.sequence_moves import exchange_for_heads, exchange_for_positions, gather_positions
from meshwright.distributed.context.sequences import Sequences, sequences_of
from meshwright.distributed.mesh import ParallelMesh
from meshwright.errors import UnsupportedError
from meshwright.plan.axes.context.sharing import FUNCTION
from meshwright.plan.given.attentions import unknown_argument
from meshwright.plan.given.closed_choices import ContextMethod
from meshwright.plan.result.context.canvas_rows import CanvasRow
from meshwright.plan.result.program import Attend

__all__ = ["attend_over_ranks", "share_of"]

_CONTEXT = "_meshwright_context"

Group = dist.ProcessGroup
Whole = Sequences | Canvases


# -- the attention of a rank -----------------------------------------------------------------------------------------------


def attend_over_ranks(model: nn.Module, action: Attend, mesh: ParallelMesh) -> None:
    """Let an attention work on this rank's part of each sequence. The model calls :func:`attend` from now on."""
    from transformers import AttentionInterface

    # A compiled layer breaks its graph here: what the attention needs to know is no tensor.
    AttentionInterface.register(FUNCTION, torch.compiler.disable(attend))
    group = mesh[action.axis].get_group()
    context = _Context(action, group, dist.get_world_size(group), dist.get_rank(group))
    module = model.get_submodule(action.module)
    vars(module)[_CONTEXT] = context
    if action.row.carried:
        carry_sequences(model, module)


def share_of(model: nn.Module) -> Share:
    """Return which part of each sequence this rank has, from the first attention of a model that :func:`attend` computes."""
    found: _Context = next(vars(module)[_CONTEXT] for module in model.modules() if _CONTEXT in vars(module))
    return found.share


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers, for a part of each sequence.

    Args:
        module: the attention.
        query: [batch, heads, positions, key size].
        key: [batch, key/value heads, positions, key size].
        value: [batch, key/value heads, positions, value size].
        attention_mask: must be ``None``: the mask follows from the microbatch.
        dropout: must be 0.
        scaling: factor of the scores; ``None``: one over the root of the key size.
        softcap: scores are at most this large, by a tanh; ``None``: they are not limited.
        s_aux: [heads], the sinks.
        position_ids: [batch, positions], those of the shard that :func:`share_batch` made; ``None`` where the plan says that
            the model passes none on, but is called with them.
        others: what changes nothing, or is in the plan (the window).

    Returns:
        The output [batch, positions, heads, value size], and no weights.

    Raises:
        UnsupportedError: the microbatch is unknown; or there is a mask, dropout or an argument that is not known.
    """
    context: _Context = vars(module)[_CONTEXT]
    action, name = context.action, type(module).__name__
    over_canvas = isinstance(action.row, CanvasRow)
    sequences: Whole | None = canvases_of(position_ids) if over_canvas else sequences_of(position_ids)
    if action.row.carried and position_ids is None:
        sequences = running_sequences()
    if sequences is None:
        inside = "call the model inside `with context_parallel(plan, mesh, batch) as shard`, with shard['position_ids'] itself"
        canvas = "part of a canvas; call the model with denoise=batch, as the objective of its family does"
        whose = canvas if over_canvas else f"shard; {inside}"
        raise UnsupportedError("cp.positions", f"{name}: the position_ids of this forward are not those of a {whose}")
    if attention_mask is not None or dropout:
        raise UnsupportedError(
            "cp.argument", f"{name}: context parallel knows no {'dropout' if dropout else 'attention_mask'} of attention"
        )
    if unknown := unknown_argument({**others, "scaling": scaling, "softcap": softcap}):
        raise UnsupportedError(
            "cp.argument", f"{name}: context parallel does not know the argument {unknown!r} of an attention; leave it out"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = AttentionRule(action.row.kernel, action.row.causal, action.row.window, scaling, softcap)
    output = context(rule, sequences, query, key, value, s_aux)
    return output.transpose(1, 2).contiguous(), None


@dataclass(frozen=True)
class _Context:
    """What one attention does with its part of each sequence."""

    action: Attend
    group: Group
    ranks: int
    rank: int

    def __call__(
        self,
        rule: AttentionRule,
        sequences: Whole,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the output [batch, heads, positions, value size]."""
        run = {ContextMethod.GATHER: self._gather, ContextMethod.ULYSSES: self._ulysses, ContextMethod.RING: self._ring}
        method = run[self.action.row.method]
        if self.action.row.recompute and self.action.row.method is not ContextMethod.RING and torch.is_grad_enabled():
            return checkpoint(method, rule, sequences, query, key, value, sinks, use_reentrant=False, preserve_rng_state=False)
        return method(rule, sequences, query, key, value, sinks)

    @property
    def share(self) -> Share:
        """Which part of each sequence the rank has."""
        return Share(self.rank, self.ranks, self.action.balance)

    def _pieces(self, sequences: Whole) -> tuple[list[tuple[range, ...]], list[tuple[range, ...]], tuple[range, ...]]:
        """Return which queries and which keys each rank has, and the places of the queries of this rank among all keys."""
        if isinstance(sequences, Canvases):
            queries, keys = self.share.pieces(sequences.columns), sequences.keys_by_rank(self.share)
            return queries, keys, tuple(map(sequences.at, queries[self.rank]))
        pieces = self.share.pieces(sequences.length)
        return pieces, pieces, pieces[self.rank]

    def _gather(
        self, rule: AttentionRule, sequences: Whole, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: Any
    ) -> torch.Tensor:
        _, keys, places = self._pieces(sequences)
        if self.ranks == 1:
            return attention(rule, sequences, places, query, key, value, sinks)
        both = gather_positions(torch.cat([key, value], dim=-1), keys, self.group)
        key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        return attention(rule, sequences, places, query, key, value, sinks)

    def _ulysses(
        self, rule: AttentionRule, sequences: Whole, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: Any
    ) -> torch.Tensor:
        queries, keys, _ = self._pieces(sequences)
        both = torch.cat([key, value], dim=-1)
        if both.shape[1] < self.ranks:  # several ranks need one head; its gradients are added up by the backward of this
            both = both.repeat_interleave(self.ranks // both.shape[1], dim=1)
        query, both = exchange_for_heads(query, queries, self.group), exchange_for_heads(both, keys, self.group)
        all_keys, all_values = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        own = None if sinks is None else sinks.chunk(self.ranks)[self.rank]
        every = (range(sequences.length - query.shape[2], sequences.length),)
        output = attention(rule, sequences, every, query, all_keys, all_values, own)
        return exchange_for_positions(output, queries, self.group)

    def _ring(
        self, rule: AttentionRule, sequences: Whole, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: Any
    ) -> torch.Tensor:
        def visible(queries: range, keys: range) -> range:
            seen = sequences.keys(queries, rule.causal, rule.window)
            return range(max(seen.start, keys.start), min(seen.stop, keys.stop))

        def mask(queries: range, keys: range) -> torch.Tensor | None:
            return sequences.mask(queries, keys, rule.causal, rule.window, query.device)

        _, keys, places = self._pieces(sequences)
        return ring_attention(query, key, value, sinks, places, keys, visible, mask, rule.scaling, rule.softcap, self.group)

"""What computes the attention of some queries of a sequence: the kernels that ``model.attn_implementation`` names.

Keys and values are whole, in the order of the sequence. Queries are those of some pieces of it. Which keys a query sees follows
from the sequences of the microbatch and from the attention's own rule (causal, window). Each kernel gets this in its own form:

sdpa, eager: a mask for each block of queries, over the range of keys that the block can see. What is outside of this range is
    not computed, and no mask has the size of the sequence squared.
flex_attention: a function (query, key) -> bool, and which tiles of the scores it leaves empty.
flash_attention_2, -3, ...: segments. Each is a run of queries with the one run of keys that they see.

Gradients of flex need a GPU, and flash needs one for everything. On a CPU the masks of both are tested, and flex forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.distributed.context.canvases import Canvases
from meshwright.distributed.context.sequences import Sequences
from meshwright.errors import UnsupportedError
from meshwright.plan.axes.context.sharing import is_flash

__all__ = ["AttentionRule", "attention"]

MOST_ENTRIES = 2**20
"""Number of entries of a mask that exist at once. More queries are computed block by block,"""
LEAST_QUERIES = 256
"""but at least so many, so that a kernel has something to do."""
MOST_SCORES, LEAST_ROWS = 2**22, 16
"""The same of scores, where attention is written out."""


@dataclass(frozen=True)
class AttentionRule:
    """What one attention computes.

    Attributes:
        kernel: a value of ``attn_implementation``.
        causal: whether a query sees no later key.
        window: number of keys up to its own that a query sees; ``None``: all.
        scaling: factor of the scores.
        softcap: scores are at most this large, by a tanh; ``None``: they are not limited.
    """

    kernel: str
    causal: bool
    window: int | None
    scaling: float
    softcap: float | None = None


def attention(
    rule: AttentionRule,
    sequences: Sequences | Canvases,
    pieces: Sequence[range],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the output [batch, heads, queries, value size] of some queries of each sequence.

    Args:
        rule: what is computed.
        sequences: the whole sequences; or canvases, for which a plan has no kernel but sdpa and eager.
        pieces: the positions of the queries, piece by piece.
        query: [batch, heads, queries, key size].
        key: [batch, key/value heads, length, key size].
        value: [batch, key/value heads, length, value size].
        sinks: [heads], one more logit in the softmax of each head, without a value.

    Raises:
        UnsupportedError: a flash kernel is given sinks, or a prefix that sees itself.
    """
    if isinstance(sequences, Canvases):
        return _blocks(rule, sequences, pieces, query, key, value, sinks)
    if rule.kernel == "flex_attention":
        return _flex(rule, sequences, pieces, query, key, value, sinks)
    if is_flash(rule.kernel):
        if sinks is not None or sequences.prefix is not None:
            what = "sinks" if sinks is not None else "a prefix that sees itself"
            raise UnsupportedError(
                "cp.kernel", f"context parallel: {rule.kernel} has no {what}; legal are sdpa, eager and flex_attention"
            )
        return _flash(rule, sequences, pieces, query, key, value)
    return _blocks(rule, sequences, pieces, query, key, value, sinks)


# -- sdpa, eager -----------------------------------------------------------------------------------------------------------


def _blocks(
    rule: AttentionRule,
    sequences: Sequences | Canvases,
    pieces: Sequence[range],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    batch, heads, device = query.shape[0], query.shape[1], query.device
    fused = rule.kernel == "sdpa" and rule.softcap is None and sinks is None
    row = batch * sequences.length
    most = max(LEAST_QUERIES, MOST_ENTRIES // row) if fused else max(LEAST_ROWS, MOST_SCORES // (row * heads))
    offsets = [0, *accumulate(map(len, pieces))]
    several = any(len(piece) > most for piece in pieces)
    outputs = []
    for piece, offset in zip(pieces, offsets[:-1], strict=True):
        for begin in range(piece.start, piece.stop, most):
            queries = range(begin, min(begin + most, piece.stop))
            keys = sequences.keys(queries, rule.causal, rule.window)
            at = offset + queries.start - piece.start

            def compute(
                query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, queries: range = queries, keys: range = keys
            ) -> torch.Tensor:
                if fused and not several:  # kept for backward, so one for all layers
                    mask = sequences.bias(queries, keys, rule.causal, rule.window, query)
                else:
                    mask = sequences.mask(queries, keys, rule.causal, rule.window, device)
                return _block(rule, fused, query, key, value, mask, sinks)

            tensors = (
                query[:, :, at : at + len(queries)],
                key[:, :, keys.start : keys.stop],
                value[:, :, keys.start : keys.stop],
            )
            if several and torch.is_grad_enabled():  # otherwise the masks of all blocks would be kept for backward
                outputs.append(checkpoint(compute, *tensors, use_reentrant=False, preserve_rng_state=False))
            else:
                outputs.append(compute(*tensors))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _block(
    rule: AttentionRule,
    fused: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with torch's fused kernel, or written out. The softmax is computed in fp32 or better."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if fused:
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=rule.scaling)
    logits = _capped(query @ key.transpose(2, 3) * rule.scaling, rule.softcap)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.to(logits.dtype).view(1, -1, 1, 1).expand(logits.shape[0], -1, logits.shape[2], 1)
        logits = torch.cat([logits, column], dim=-1)
    weights = logits.softmax(dim=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    return weights.to(value.dtype) @ value


def _capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


# -- flex ------------------------------------------------------------------------------------------------------------------


def _flex(
    rule: AttentionRule,
    sequences: Sequences,
    pieces: Sequence[range],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    from torch.nn.attention.flex_attention import AuxRequest

    def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return _capped(score, rule.softcap)

    output, others = _compiled(query.device.type)[0](
        query, key, value,
        score_mod=None if rule.softcap is None else capped,
        block_mask=_tiles(rule, sequences, tuple(pieces), query.device),
        scale=rule.scaling,
        enable_gqa=query.shape[1] > key.shape[1],
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    if sinks is None:
        return output
    # A sink s takes exp(s) of the sum of exponents, whose logarithm is lse: the rest keeps sigmoid(lse - s).
    kept = torch.sigmoid(others.lse - sinks.to(others.lse.dtype).view(1, -1, 1))
    return output * kept.unsqueeze(-1).to(output.dtype)


@cache
def _compiled(device: str) -> tuple[Any, Any]:
    """Return ``flex_attention`` and ``create_block_mask``; compiled where their plain forms would hold all scores at once."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return (flex_attention, create_block_mask) if device == "cpu" else (
        torch.compile(flex_attention), torch.compile(create_block_mask)
    )  # fmt: skip


def _tiles(rule: AttentionRule, sequences: Sequences, pieces: tuple[range, ...], device: torch.device) -> Any:
    """Return the ``BlockMask`` of some queries over all keys. It is made once for all layers of a microbatch."""

    def make() -> Any:
        documents, prefix, causal, window = sequences.documents, sequences.prefix, rule.causal, rule.window
        places = torch.cat([torch.arange(piece.start, piece.stop, device=device) for piece in pieces])

        def seen(row: torch.Tensor, _: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            at = places[query]
            result = key <= at if causal else key >= 0
            if window is not None:
                result = result & (at - key < window)
            if prefix is not None:
                result = result | (prefix[row, at] & prefix[row, key])
            if documents is not None:
                result = result & (documents[row, at] == documents[row, key])
            return result

        own = next((len(item) for item in (documents, prefix) if item is not None), None)
        create = _compiled(device.type)[1]
        return create(seen, own, None, len(places), sequences.length, device=str(device))

    return sequences.kept(("tiles", pieces, rule.causal, rule.window), make)


# -- flash -----------------------------------------------------------------------------------------------------------------


def _flash(
    rule: AttentionRule,
    sequences: Sequences,
    pieces: Sequence[range],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    from transformers.integrations.flash_attention import flash_attention_forward

    if query.dtype == torch.float32:
        raise UnsupportedError("cp.dtype", f"{rule.kernel}: computes in 16 bits; set parallel.param_dtype=bfloat16")
    segments = [found for row in range(len(query)) for found in _segments(rule, sequences, pieces, row)]

    def joined_segments(tensor: torch.Tensor) -> torch.Tensor:
        """[batch, heads, length, size] to [1, heads, keys of all segments, size]."""
        return torch.cat([tensor[row, :, keys.start : keys.stop] for row, _, keys in segments], dim=1).unsqueeze(0)

    def bounds(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=query.device)

    query_lengths, key_lengths = [len(queries) for _, queries, _ in segments], [len(keys) for _, _, keys in segments]
    # The function of transformers reads of its module which kernel it is, and whether the mask is causal.
    module = SimpleNamespace(config=SimpleNamespace(_attn_implementation=rule.kernel), is_causal=rule.causal)
    output, _ = flash_attention_forward(
        module,
        query.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0),
        joined_segments(key),
        joined_segments(value),
        None,
        scaling=rule.scaling,
        sliding_window=rule.window,
        softcap=rule.softcap,
        cu_seq_lens_q=bounds(query_lengths),
        cu_seq_lens_k=bounds(key_lengths),
        max_length_q=max(query_lengths),
        max_length_k=max(key_lengths),
    )
    return output.view(len(query), -1, query.shape[1], value.shape[-1]).transpose(1, 2)


def _segments(rule: AttentionRule, sequences: Sequences, pieces: Sequence[range], row: int) -> list[tuple[int, range, range]]:
    """Return (row, queries, keys) for each part of a document that a piece has.

    The last query of a segment is at the position of its last key if the mask is causal: so the kernels align a causal mask and
    a window when there are fewer queries than keys (FlashAttention 2.1 and later).
    """
    result = []
    for piece in pieces:
        for document in sequences.documents_of(row):
            queries = range(max(piece.start, document.start), min(piece.stop, document.stop))
            if len(queries):
                first = document.start if rule.window is None else max(document.start, queries.start - rule.window + 1)
                result.append((row, queries, range(first, queries.stop if rule.causal else document.stop)))
    return result

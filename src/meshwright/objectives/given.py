"""What an objective computes with. Each function is right on every axis, under vocabulary slices, in chunks and on stages.

They are called in :meth:`~meshwright.objectives.Objective.sums`, ``metrics`` and ``before``, with their model and batch. The
model runs once for all values of tokens of a batch, and once more for its hidden states.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.distributed import _torch_compat
from meshwright.distributed.memory.chunked_loss import VALUES, DeferredLogits, chunks_its_loss, deferring
from meshwright.distributed.tensor.moves import gather as join_slices
from meshwright.errors import UnsupportedError
from meshwright.models import _transformers_compat as compat
from meshwright.models.added_modules import added_modules
from meshwright.models.objective import Batch
from meshwright.models.token_loss import (
    IGNORE,
    forward_arguments,
    forward_logits,
    log_probs_at,
    token_entropies,
    token_log_probs,
    top_log_probs,
)
from meshwright.objectives.documents import (
    document_count,
    document_sum,
    first_of_pairs,
    pair_count,
    per_document,
    per_token,
    pooled,
    second_of_pairs,
)
from meshwright.objectives.running import Running, Seen, call_of
from meshwright.plan.axes.tensor.move_kinds import Move

__all__ = [
    "data_rank",
    "document_count",
    "document_sum",
    "entropy",
    "first_of_pairs",
    "gather",
    "hidden",
    "log_probs",
    "log_probs_of",
    "logits",
    "module",
    "pair_count",
    "per_document",
    "per_token",
    "pooled",
    "reference_log_probs",
    "second_of_pairs",
    "top_k",
]

Values = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits, ids) -> values of tokens [B, S, N]."""

_VALUES = {"log_probs": token_log_probs, "entropy": token_entropies}


# -- values of tokens ---------------------------------------------------------------------------------------------------------


def log_probs(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the log-probability of each label in nats [B, S], in at least fp32; 0 where there is no label."""
    return _token_values(model, batch, "log_probs")


def entropy(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the entropy of the next token in nats [B, S], in at least fp32; 0 where there is no label."""
    return _token_values(model, batch, "entropy").masked_fill(batch["labels"] == IGNORE, 0.0)


def logits(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the logits of all words [B, S, V]. Under `tp` they are gathered, which costs traffic and memory.

    An objective that calls it has ``whole_logits = True``, so that the plan gathers and prices them, and cannot be computed in
    chunks.
    """
    found = _logits(model, batch, call_of("logits"))
    if isinstance(found, DTensor):
        raise UnsupportedError("objective.logits", "given.logits: the logits are sliced over tp; set whole_logits = True")
    return found


def log_probs_of(model: nn.Module, batch: Batch, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of given words in nats [B, S, K], in at least fp32; 0 where there is no label.

    In chunks, call it before the other functions of tokens: it computes their values by the same forward.

    Args:
        model: the model.
        batch: its batch.
        ids: int64 [B, S, K], words of the vocabulary, which need not differ.
    """
    call = call_of("log_probs_of")
    kept = call.of(model, batch)
    if kept.get("log_probs_of.ids") is not ids:
        found = _values_of(model, batch, call, log_probs_at, ids)
        absent = (batch["labels"] == IGNORE).unsqueeze(-1)
        kept.update({"log_probs_of.ids": ids, "log_probs_of": found.masked_fill(absent, 0.0)})
    return kept["log_probs_of"]


def top_k(model: nn.Module, batch: Batch, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and log-probabilities in nats of the likeliest words, each [B, S, count]; 0 where there is no label.

    The likeliest is the first. They have no gradient: :func:`log_probs_of` gives that of their log-probabilities.
    """

    def values(logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        logs, ids = top_log_probs(logits, count)
        return torch.cat([logs, ids.to(logs.dtype)], -1)  # fp32 is exact for ids up to 2**24

    found = _values_of(model, batch, call_of("top_k"), values).masked_fill((batch["labels"] == IGNORE).unsqueeze(-1), 0.0)
    logs, ids = found.split(count, -1)
    return ids.long(), logs


def _logits(model: nn.Module, batch: Batch, call: Running) -> torch.Tensor:
    """Return logits of a model that has no loss in chunks; a DTensor if they are sliced."""
    kept = call.of(model, batch)
    if "logits" not in kept:
        kept["logits"] = forward_logits(model, batch)
    return kept["logits"]


def _token_values(model: nn.Module, batch: Batch, name: str) -> torch.Tensor:
    call = call_of(name)
    kept = call.of(model, batch)
    if name not in kept and chunks_its_loss(model):
        _in_chunks(model, batch, call, call.wanted | {name})
    elif name not in kept:
        kept[name] = _VALUES[name](_logits(model, batch, call), batch["labels"])
    return kept[name]


def _values_of(
    model: nn.Module, batch: Batch, call: Running, function: Values, ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Return values of tokens [B, S, N]; without ids they have no gradient."""
    if not chunks_its_loss(model):
        return function(_logits(model, batch, call), batch["labels"] if ids is None else ids)
    if ids is None and torch.is_grad_enabled():  # what is kept besides would have no gradient either
        with torch.no_grad():
            return _in_chunks(model, batch, call, frozenset(), function)
    return _in_chunks(model, batch, call, call.wanted, function, ids)


def _in_chunks(
    model: nn.Module,
    batch: Batch,
    call: Running,
    names: frozenset[str],
    function: Values | None = None,
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return values of tokens [B, S, N] of a model with a loss in chunks, and keep those of some names, by one forward."""
    kept, labels = call.of(model, batch), batch["labels"].unsqueeze(-1)
    wanted = sorted(names - kept.keys())

    def values(logits: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        found = [_VALUES[one](logits, beside[..., 0]).unsqueeze(-1) for one in wanted]
        return torch.cat([*found, *(() if function is None else [function(logits, beside[..., 1:])])], -1)

    beside = labels if ids is None else torch.cat([labels, ids], -1)
    found = model(**forward_arguments(batch), **{VALUES: (beside, values)})
    kept.update(zip(wanted, found[..., : len(wanted)].unbind(-1), strict=True))
    return found[..., len(wanted) :]


def reference_log_probs(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return ``reference_log_probs`` of a batch [B, S]: a column of the data, or what a reference says, without gradient.

    Without the column an objective that calls it has ``reference = True``: the model with its adapters off says them before
    each step; or ``reference = "precomputed"``: the model says them once, as the run begins.
    """
    call_of("reference_log_probs")
    if "reference_log_probs" not in batch:
        raise UnsupportedError("objective.reference", "given.reference_log_probs: the batch has none; set reference = True")
    return batch["reference_log_probs"]


# -- hidden states ------------------------------------------------------------------------------------------------------------


def hidden(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the last hidden state [B, S, H]: what the output head of the model gets. The head is not computed."""
    call = call_of("hidden")
    kept = call.of(model, batch)
    if "hidden" not in kept:
        with _without_head(model) as head:
            states = model(**forward_arguments(batch))
        kept["hidden"] = _whole(states, call, head, batch["input_ids"].shape[1])
    return kept["hidden"]


@contextmanager
def _without_head(model: nn.Module) -> Iterator[str]:
    """Inside, the forward of a model returns what its output head gets. Yields the name of the head."""
    head = compat.embedding_and_head(model)[1]
    name = next((name for name, module in model.named_modules() if module is head), None)
    if head is None or name is None:
        raise UnsupportedError("objective.hidden", "given.hidden: the output head of the model is unknown")
    forward, own = model.forward, model.__dict__.get("forward")

    @wraps(forward)
    def without_head(*args: Any, **kwargs: Any) -> torch.Tensor:
        with deferring(head, 1):
            found = forward(*args, **kwargs).logits
        if not isinstance(found, DeferredLogits):
            raise UnsupportedError("objective.hidden", f"given.hidden: {name!r} did not give the logits of the model")
        return found.hidden

    model.forward = without_head
    try:
        yield name
    finally:
        del model.forward
        if own is not None:
            model.forward = own


def _whole(states: torch.Tensor, call: Running, head: str, length: int) -> torch.Tensor:
    """Return whole sequences of hidden states, which ranks of `tp` may have slices of before the head."""
    rows = () if call.plan is None else call.plan.tensor_parallel
    sliced = any(row.module == head and row.entry in (Move.GATHER_SEQUENCE, Move.GATHER_SEQUENCE_WHOLE) for row in rows)
    if not sliced or call.mesh is None:
        return states
    return join_slices(states, 1, length, call.mesh["tp"].get_group())  # all ranks compute the same with it


# -- what an objective adds ---------------------------------------------------------------------------------------------------


def module(model: nn.Module, name: str) -> nn.Module:
    """Return a module that the objective added to the model (:meth:`~meshwright.objectives.Objective.modules`).

    Call it, and do not read its parameters: they are sharded, and whole while it computes. It takes whole values, such as those
    of the functions here, and computes in at least fp32.
    """
    call_of("module")
    added = added_modules(model)
    if added is None or name not in added:
        names = ", ".join(added) if added is not None and len(added) else "none"
        raise UnsupportedError("objective.modules", f"given.module: {name!r} is not added by the objective; added are: {names}")
    _torch_compat.set_up(model)
    return added[name]


# -- other data ranks ---------------------------------------------------------------------------------------------------------


def gather(values: torch.Tensor) -> torch.Tensor:
    """Return the values [N, ...] of all data ranks, in the order of the ranks, with gradient: [data ranks x N, ...].

    They are those of one number of microbatch. In an evaluation they are those of this rank alone.
    """
    call = call_of("gather")
    call.gathered.append(seen := Seen(values.numel(), values.element_size()))
    if call.mesh is None or call.size("dp") == 1 or not call.trains:
        own = values.view_as(values)
        if own.requires_grad:

            def reduced(gradient: torch.Tensor) -> None:
                seen.reduced = True
                call.asked["gather's gradient"] += 1

            own.register_hook(reduced)
        return own
    return _Gather.apply(values, call.mesh["dp"].get_group())


def data_rank() -> int:
    """Return the place of this rank's values in what :func:`gather` returns."""
    call = call_of("data_rank")
    return 0 if call.mesh is None or not call.trains else call.mesh.rank("dp")


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        context.group, context.rows = group, len(values)
        every = values.new_empty(dist.get_world_size(group) * len(values), *values.shape[1:])
        _torch_compat.all_gather_single(every, values.contiguous(), group=group)
        return every

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=context.group)
        return total.narrow(0, dist.get_rank(context.group) * context.rows, context.rows), None

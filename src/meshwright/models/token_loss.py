"""The training loss: a sum over tokens, divided once by the number of valid tokens of the whole optimizer step."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.distributed.memory.chunked_loss import LABELS, chunks_its_loss
from meshwright.distributed.tensor.loss_parallel import (
    cross_entropies,
    cross_entropy_sum,
    entropies,
    sliced_log_probs,
    sliced_top,
)
from meshwright.errors import ModelError

__all__ = [
    "IGNORE",
    "count_tokens",
    "forward_arguments",
    "forward_logits",
    "forward_loss",
    "log_probs_at",
    "token_entropies",
    "token_log_probs",
    "token_loss_sum",
    "top_log_probs",
]

IGNORE = -100
"""Label of positions that have no target: the default of torch's cross entropy. The loader writes the same number."""


def forward_arguments(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the arguments with which a causal language model of transformers is called.

    No attention mask is passed: transformers derives the documents from positions that restart.
    """
    return {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}


def forward_logits(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits [batch, sequence, vocabulary] of a causal language model of transformers, or of a module like one.

    Raises:
        ModelError: its forward returns something without logits.
    """
    found = model(**forward_arguments(batch))
    if not hasattr(found, "logits"):
        words = f"its forward returned {type(found).__name__}; legal is an object with logits [batch, sequence, vocabulary]"
        raise ModelError("model.logits", f"{type(model).__name__}: {words}")
    return found.logits


def forward_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the sum of next-token cross-entropies of a batch, see :func:`token_loss_sum`.

    If the plan of the model has a loss in chunks, only the logits of one chunk exist at a time.

    Args:
        model: a causal language model of transformers; it may be parallelized.
        batch: ``input_ids``, ``position_ids`` and ``labels``, each [batch, sequence].
    """
    if chunks_its_loss(model):
        return model(**forward_arguments(batch), **{LABELS: (batch["labels"], token_loss_sum)})
    return token_loss_sum(forward_logits(model, batch), batch["labels"])


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum of next-token cross-entropies in nats, in fp32 (in fp64 for a model that computes in fp64).

    Args:
        logits: [batch, sequence, vocabulary]; a DTensor if they are sharded over the vocabulary.
        labels: [batch, sequence], already shifted; :data:`IGNORE` for positions without a target.
    """
    if isinstance(logits, DTensor):
        return cross_entropy_sum(logits, labels, IGNORE)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def token_log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each label in nats [batch, sequence], 0 where there is none. Arguments as above."""
    if isinstance(logits, DTensor):
        return -cross_entropies(logits, labels, IGNORE)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none")
    return -losses.view(labels.shape)


def token_entropies(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the entropy of the next token in nats [batch, sequence], also where there is no label. Arguments as above."""
    if isinstance(logits, DTensor):
        return entropies(logits)
    logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)


def log_probs_at(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of given words in nats [batch, sequence, k], also where there is no label.

    Args:
        logits: [batch, sequence, vocabulary]; a DTensor if they are sharded over the vocabulary.
        ids: [batch, sequence, k].
    """
    if isinstance(logits, DTensor):
        return sliced_log_probs(logits, ids)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True)


@torch.no_grad()
def top_log_probs(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities and ids of the likeliest words, each [batch, sequence, count], without gradient."""
    if isinstance(logits, DTensor):
        return sliced_top(logits, count)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    best = logits.topk(count, -1)
    return best.values - logits.logsumexp(-1, keepdim=True), best.indices


def count_tokens(batches: list[dict[str, torch.Tensor]]) -> int:
    """Return the number of valid labels in some microbatches."""
    return sum(int((batch["labels"] != IGNORE).sum()) for batch in batches)

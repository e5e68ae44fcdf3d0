"""Cross-entropy over a vocabulary that is sharded over `tp`: no rank ever holds the logits of all words.

Each rank holds x_r, its slice of the logits of a token with label y. With m the largest logit of all ranks,

    loss = log(sum_r sum exp(x_r - m)) + m - x[y],    d loss / d x_r = exp(x_r - loss - x[y]) - [y is there]

So the ranks exchange three numbers for each token (Shoeybi et al. 2019, arXiv 1909.08053, section 3). With p = softmax(x), the
entropy of the next token needs one number more:

    H = log(sum exp(x - m)) + m - sum p x,    d H / d x_i = -p_i (x_i - sum p x)

The log-probabilities of k given words of a token need k numbers instead of x[y]. The k likeliest words of all are among the k
likeliest of each rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from meshwright.distributed.tensor.moves import slice_width

__all__ = ["cross_entropies", "cross_entropy_sum", "entropies", "sliced_log_probs", "sliced_top"]


def cross_entropy_sum(logits: DTensor, labels: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Return the sum of :func:`cross_entropies`."""
    return cross_entropies(logits, labels, ignore_index).sum()


def cross_entropies(logits: DTensor, labels: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Cross-entropies in nats [...], in fp32 (fp64 for fp64 logits), 0 for tokens that do not count; equal on all ranks.

    Args:
        logits: [..., vocabulary], sharded over the last dimension on a 1-D mesh.
        labels: [...], the same on all ranks.
        ignore_index: label of a token that does not count.

    Raises:
        ValueError: the logits have another placement.
        IndexError: a label is outside of the vocabulary. Not checked on a GPU, where the check would wait for the device.
    """
    local, group = _local(logits)
    words = logits.shape[-1]
    if labels.device.type == "cpu" and not ((labels == ignore_index) | ((labels >= 0) & (labels < words))).all():
        raise IndexError(f"labels must be {ignore_index}, or at least 0 and below {words}")
    begin = dist.get_rank(group) * slice_width(words, group)
    return _CrossEntropy.apply(local, labels.flatten(), begin, ignore_index, group).view(labels.shape)


def entropies(logits: DTensor) -> torch.Tensor:
    """Entropies of the next token in nats [...], in fp32 (fp64 for fp64 logits). They are equal on all ranks of `tp`.

    Args:
        logits: [..., vocabulary], sharded over the last dimension on a 1-D mesh.

    Raises:
        ValueError: the logits have another placement.
    """
    local, group = _local(logits)
    return _Entropy.apply(local, group).view(logits.shape[:-1])


def sliced_log_probs(logits: DTensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of given words in nats [..., k], in fp32 (fp64 for fp64 logits). They are equal on all ranks of `tp`.

    Args:
        logits: [..., vocabulary], sharded over the last dimension on a 1-D mesh.
        ids: [..., k], words of each token, the same on all ranks.

    Raises:
        ValueError: the logits have another placement.
        IndexError: a word is outside of the vocabulary. Not checked on a GPU, where the check would wait for the device.
    """
    local, group = _local(logits)
    words = logits.shape[-1]
    if ids.device.type == "cpu" and not ((ids >= 0) & (ids < words)).all():
        raise IndexError(f"words must be at least 0 and below {words}")
    begin = dist.get_rank(group) * slice_width(words, group)
    return _LogProbs.apply(local, ids.flatten(0, -2), begin, group).view(ids.shape)


@torch.no_grad()
def sliced_top(logits: DTensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [..., count] and ids of the likeliest words, the likeliest first, without gradient.

    They are equal on all ranks of `tp`. Arguments and errors as for :func:`entropies`.
    """
    local, group = _local(logits)
    width = slice_width(logits.shape[-1], group)
    own = local.topk(min(count, local.shape[-1]), -1)
    beyond = min(count, width) - own.values.shape[-1]  # the last slices may be narrower
    values = torch.nn.functional.pad(own.values, (0, beyond), value=float("-inf"))
    ids = torch.nn.functional.pad(own.indices + dist.get_rank(group) * width, (0, beyond))
    best = (values := _joined(values, group)).topk(count, -1)
    logs = best.values - _normalizer(local, group).unsqueeze(-1)
    shape = (*logits.shape[:-1], count)
    return logs.view(shape), _joined(ids, group).gather(-1, best.indices).view(shape)


def _joined(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, -1)


def _normalizer(logits: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return log(sum exp(x)) over the words of all ranks [tokens]."""
    largest = _largest(logits, group)
    total = (logits - largest.unsqueeze(-1)).exp().sum(dim=-1)
    dist.all_reduce(total, group=group)
    return total.log() + largest


def _largest(logits: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    largest = logits.amax(dim=-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


def _local(logits: DTensor) -> tuple[torch.Tensor, dist.ProcessGroup]:
    """Return this rank's words [tokens, words] in at least fp32, and the group of the ranks that have the others."""
    if logits.device_mesh.ndim != 1 or logits.placements != (Shard(logits.ndim - 1),):
        raise ValueError(f"logits have the placements {logits.placements}; legal is Shard of the last dimension, over one axis")
    local = logits.to_local()
    return local.to(torch.promote_types(local.dtype, torch.float32)).flatten(0, -2), logits.device_mesh.get_group()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, logits: torch.Tensor, labels: torch.Tensor, begin: int, ignore_index: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        counts = labels != ignore_index
        place = labels - begin
        is_own = counts & (place >= 0) & (place < logits.shape[-1])
        place = place.masked_fill(~is_own, 0)
        largest = _largest(logits, group)
        own = logits.gather(-1, place.unsqueeze(-1)).squeeze(-1).masked_fill(~is_own, 0.0)
        sums = torch.stack([(logits - largest.unsqueeze(-1)).exp().sum(dim=-1), own])
        dist.all_reduce(sums, group=group)
        normalizer = sums[0].log() + largest
        context.save_for_backward(logits, normalizer, place, is_own, counts)
        return (normalizer - sums[1]).masked_fill(~counts, 0.0)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        logits, normalizer, place, is_own, counts = context.saved_tensors
        logits_gradient = (logits - normalizer.unsqueeze(-1)).exp()
        logits_gradient.scatter_add_(-1, place.unsqueeze(-1), -is_own.to(logits_gradient.dtype).unsqueeze(-1))
        return logits_gradient.mul_((counts * gradient).unsqueeze(-1)), None, None, None, None


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, logits: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        largest = _largest(logits, group)
        shares = (logits - largest.unsqueeze(-1)).exp()
        sums = torch.stack([shares.sum(dim=-1), (shares * (logits - largest.unsqueeze(-1))).sum(dim=-1)])
        dist.all_reduce(sums, group=group)
        mean = sums[1] / sums[0]  # of the logits, less the largest
        context.save_for_backward(logits, largest, sums[0], mean)
        return sums[0].log() - mean

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, largest, total, mean = context.saved_tensors
        shifted = logits - largest.unsqueeze(-1)
        shares = shifted.exp() / total.unsqueeze(-1)
        return shares.mul_(mean.unsqueeze(-1) - shifted).mul_(gradient.unsqueeze(-1)), None


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, logits: torch.Tensor, ids: torch.Tensor, begin: int, group: dist.ProcessGroup) -> torch.Tensor:
        place = ids - begin
        is_own = (place >= 0) & (place < logits.shape[-1])
        place = place.masked_fill(~is_own, 0)
        largest = _largest(logits, group)
        own = logits.gather(-1, place).masked_fill(~is_own, 0.0)
        total = (logits - largest.unsqueeze(-1)).exp().sum(dim=-1, keepdim=True)
        sums = torch.cat([total, own], -1)
        dist.all_reduce(sums, group=group)
        normalizer = sums[:, 0].log() + largest
        context.save_for_backward(logits, normalizer, place, is_own)
        return sums[:, 1:] - normalizer.unsqueeze(-1)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, normalizer, place, is_own = context.saved_tensors
        found = (logits - normalizer.unsqueeze(-1)).exp().mul_(-gradient.sum(-1, keepdim=True))
        return found.scatter_add_(-1, place, gradient.masked_fill(~is_own, 0.0)), None, None, None

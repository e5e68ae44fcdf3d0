"""Cross-entropy over a vocabulary that is sharded over `tp`: no rank ever holds the logits of all words.

Each rank holds x_r, its slice of the logits of a token with label y. With m the largest logit of all ranks,

    loss = log(sum_r sum exp(x_r - m)) + m - x[y],    d loss / d x_r = exp(x_r - loss - x[y]) - [y is there]

So the ranks exchange three numbers for each token (Shoeybi et al. 2019, arXiv 1909.08053, section 3). With p = softmax(x), the
entropy of the next token needs one number more:

    H = log(sum exp(x - m)) + m - sum p x,    d H / d x_i = -p_i (x_i - sum p x)
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from meshwright.distributed.tensor.moves import slice_width

__all__ = ["cross_entropies", "cross_entropy_sum", "entropies"]


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
        largest = logits.amax(dim=-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
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
        largest = logits.amax(dim=-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
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

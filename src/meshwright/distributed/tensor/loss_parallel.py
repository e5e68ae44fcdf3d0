"""Cross-entropy over a vocabulary that is sharded over `tp`: no rank ever holds the logits of all words.

Each rank holds x_r, its slice of the logits of a token with label y. With m the largest logit of all ranks,

    loss = log(sum_r sum exp(x_r - m)) + m - x[y],    d loss / d x_r = exp(x_r - loss - x[y]) - [y is there]

So the ranks exchange three numbers for each token (Shoeybi et al. 2019, arXiv 1909.08053, section 3).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from meshwright.distributed.tensor.moves import slice_width

__all__ = ["cross_entropy_sum"]


def cross_entropy_sum(logits: DTensor, labels: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Sum of cross-entropies in nats, in fp32 (fp64 for fp64 logits). It is the same on all ranks of `tp`.

    Args:
        logits: [..., vocabulary], sharded over the last dimension on a 1-D mesh.
        labels: [...], the same on all ranks.
        ignore_index: label of a token that does not count.

    Raises:
        ValueError: the logits have another placement.
        IndexError: a label is outside of the vocabulary. Not checked on a GPU, where the check would wait for the device.
    """
    if logits.device_mesh.ndim != 1 or logits.placements != (Shard(logits.ndim - 1),):
        raise ValueError(f"logits have the placements {logits.placements}; legal is Shard of the last dimension, over one axis")
    group, words = logits.device_mesh.get_group(), logits.shape[-1]
    if labels.device.type == "cpu" and not ((labels == ignore_index) | ((labels >= 0) & (labels < words))).all():
        raise IndexError(f"labels must be {ignore_index}, or at least 0 and below {words}")
    begin = dist.get_rank(group) * slice_width(words, group)
    local = logits.to_local()
    local = local.to(torch.promote_types(local.dtype, torch.float32)).flatten(0, -2)
    return _CrossEntropy.apply(local, labels.flatten(), begin, ignore_index, group)


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
        return (normalizer - sums[1]).masked_fill(~counts, 0.0).sum()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        logits, normalizer, place, is_own, counts = context.saved_tensors
        logits_gradient = (logits - normalizer.unsqueeze(-1)).exp()
        logits_gradient.scatter_add_(-1, place.unsqueeze(-1), -is_own.to(logits_gradient.dtype).unsqueeze(-1))
        return logits_gradient.mul_((counts * gradient).unsqueeze(-1)), None, None, None, None

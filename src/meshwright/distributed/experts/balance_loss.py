"""The balance loss of a mixture's router, for each sequence."""

from typing import Any

import torch
import torch.distributed as dist

from meshwright.errors import ModelError
from meshwright.plan.given.spec import Scores

__all__ = ["KINDS", "LossAtWeights", "sequence_balance"]

KINDS = ", ".join(kind for kind in Scores if kind is not Scores.UNKNOWN)
"""Legal kinds of the scores of a router, in words."""


def sequence_balance(
    scores: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    kind: Scores,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the balance loss of a router, each sequence weighted by its tokens: sum_b T_b sum_i f_i P_i.

    Where ranks share sequences, loads and tokens are added up over them before the product. The result is this rank's part of a
    sum over these ranks: it is linear in the mean of the scores, of which each rank has its tokens.

    Args:
        scores: [B * S, E], as the router returns them.
        index: [B * S, k], the experts that were chosen.
        counts: bool [B, S], which tokens count.
        kind: what the scores are.
        group: the ranks that share sequences; ``None``: each rank has whole sequences.

    Returns:
        A scalar, in fp32 or better.

    Raises:
        ModelError: it is unknown what the scores are.
    """
    if kind is Scores.UNKNOWN:
        raise ModelError(
            "moe.scores", f"the balance loss needs the kind of the router's scores, which is unknown; legal are {KINDS}"
        )
    experts, chosen = scores.shape[-1], index.shape[-1]
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if kind is Scores.SOFTMAX:
        shares = scores.softmax(-1)
    else:
        shares = scores.sigmoid() if kind is Scores.SIGMOID else scores
        shares = shares / shares.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
    mask = counts.to(shares.dtype)
    loads = mask.new_zeros(len(counts), experts)
    loads.scatter_add_(1, index.reshape(len(counts), -1).long(), mask.repeat_interleave(chosen, dim=1))
    tokens = mask.sum(1, keepdim=True)
    if group is not None:
        both = torch.cat([loads, tokens], dim=1)
        dist.all_reduce(both, group=group)
        loads, tokens = both[:, :-1], both[:, -1:]
    tokens = tokens.clamp(min=1)
    sums = (shares.view(*counts.shape, experts) * mask.unsqueeze(-1)).sum(1)
    return experts / chosen * (loads / tokens * sums).sum()


class LossAtWeights(torch.autograd.Function):
    """Returns the weights unchanged; backward gives the loss a gradient of 1, as if it were added to the training loss."""

    @staticmethod
    def forward(context: Any, weights: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        """Return the weights."""
        context.one = torch.ones_like(loss)
        return weights.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradient of the weights, and 1."""
        return gradient, context.one

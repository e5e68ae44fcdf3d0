"""Stochastic gradient descent on the shards of a rank, as torch.optim.SGD, whose fused kernel does not take shards."""

from collections.abc import Iterable
from typing import Any

import torch

from meshwright.distributed.update.flagged import FlaggedOptimizer, local

__all__ = ["Sgd"]


class Sgd(FlaggedOptimizer):
    """Decay is added to the gradient, which for this optimizer is decoupled decay where there is no momentum.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        momentum: share of the sum of earlier gradients that stays.
        nesterov: whether the gradient is added to the momentum once more.
        weight_decay: added to the gradient, times the parameter.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Change the parameters that have a gradient."""
        for group, parameter, gradient in self.trained():
            values, share = local(parameter), group["momentum"]
            moved = gradient.add(values, alpha=group["weight_decay"])
            if share:
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                kept = local(state["momentum_buffer"])
                total = kept.mul(share).add_(moved)
                moved = moved.add_(total, alpha=share) if group["nesterov"] else total
                self.put(kept, total)
            self.put(values, values.sub(moved, alpha=group["lr"]))

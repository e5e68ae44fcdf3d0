"""Lion (Chen et al. 2023, arXiv 2302.06675): steps of equal size in the direction of a moving average of gradients."""

from collections.abc import Iterable
from typing import Any

import torch

from meshwright.distributed.update.flagged import FlaggedOptimizer, local

__all__ = ["Lion"]


class Lion(FlaggedOptimizer):
    """Algorithm 2 of the paper: ``p -= lr * (sign(b1 m + (1 - b1) g) + decay * p)``, then ``m = b2 m + (1 - b2) g``.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        betas: b1 and b2.
        weight_decay: decoupled.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Change the parameters that have a gradient."""
        for group, parameter, gradient in self.trained():
            state = self.state[parameter]
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter)
            values, average = local(parameter), local(state["exp_avg"])
            first, second = group["betas"]
            rate = group["lr"]
            direction = average.lerp(gradient, 1 - first).sign_()
            self.put(values, values.mul(1 - rate * group["weight_decay"]).sub_(direction, alpha=rate))
            self.put(average, average.lerp(gradient, 1 - second))

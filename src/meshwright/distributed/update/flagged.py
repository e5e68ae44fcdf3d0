"""What the optimizers of this room have in common: they change the local part of a parameter, or nothing at all."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["FlaggedOptimizer", "local"]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank stores, without a copy."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class FlaggedOptimizer(torch.optim.Optimizer):
    """An optimizer whose step changes nothing if the tensor ``found_inf`` is 1, without asking the device for it.

    The attribute is set for a step and deleted after it, as torch's gradient scaler does with fused optimizers.
    """

    skips_by_flag = True

    found_inf: torch.Tensor | None = None
    """The flag of this step, a number; ``None``: the step is made."""

    def trained(self) -> Iterator[tuple[dict[str, Any], torch.Tensor, torch.Tensor]]:
        """Yield each parameter that has a gradient: its group, itself, and the local part of the gradient.

        With a flag that is 1, the gradient is zeros: it may be no number, and nothing may become so.
        """
        flag = self.found_inf
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = local(parameter.grad)
                yield group, parameter, gradient if flag is None else gradient.masked_fill(flag.bool(), 0.0)

    def made(self, value: Any) -> Any:
        """Return a number, such as a rate: 0 if the flag is 1."""
        return value if self.found_inf is None else value * (1 - self.found_inf)

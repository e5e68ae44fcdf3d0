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
        """Yield each parameter that has a gradient: its group, itself, and the local part of the gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield group, parameter, local(parameter.grad)

    def put(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Write new values into a tensor, unless the flag is 1."""
        if self.found_inf is None:
            target.copy_(values)
        else:
            torch.where(self.found_inf.bool(), target, values, out=target)

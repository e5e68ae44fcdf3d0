"""The guard: a step whose loss or gradient norm is not finite changes nothing, and the host need not wait to know it.

Its flag is a number on the device. A fused optimizer takes it as ``found_inf``, the name that torch's gradient scaler gave it,
and leaves parameters, moments and step counts as they are where it is 1. The host reads how steps went when it logs.
"""

import math

import torch

from meshwright.train.config import RunConfig

__all__ = ["Guard", "is_finite", "waits"]

NAMES = ("loss", "gradient_norm")
"""Metrics that have to be finite."""


def is_finite(values: dict[str, float]) -> bool:
    """Whether a step with these metrics may change the model."""
    return all(math.isfinite(values[name]) for name in NAMES)


def waits(config: RunConfig) -> str:
    """Why the host waits for the device in every step of a run, a line; empty: it waits when it logs."""
    why = ""
    if config.parallel.cpu_offload:
        why = "the optimizer runs on the host (parallel.cpu_offload)"
    elif config.optimizer.fused is False:
        why = "it decides whether the optimizer steps (optimizer.fused=false)"
    return f"the host waits for the device in every step: {why}" if why else ""


class Guard:
    """Stands before an optimizer. The same on all ranks, since loss and norm are.

    Args:
        optimizer: whose steps are left out.
        device: of losses and norms.
        most: bad steps in a row after which every later step changes nothing, too; ``None``: no number of them.

    Attributes:
        flag: fp32 scalar on the device; 1 where the step that was judged last changes nothing, otherwise 0.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, most: int | None) -> None:
        self._optimizer, self._most = optimizer, most
        self._fused = all(group.get("fused") for group in optimizer.param_groups)
        self._homes = {parameter.device for group in optimizer.param_groups for parameter in group["params"]}
        self.flag = torch.zeros((), device=device)
        self._in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self._ended = torch.zeros((), dtype=torch.bool, device=device)

    def judge(self, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """Set the flag for a step.

        Args:
            loss: of the step, over all ranks.
            norm: of its gradient.
        """
        bad = ~(loss.isfinite() & norm.isfinite())
        self._in_a_row = torch.where(bad, self._in_a_row + 1, 0)
        if self._most is not None:
            self._ended = self._ended | (self._in_a_row >= self._most)
        self.flag = (bad | self._ended).float()

    def step(self) -> None:
        """The step of the optimizer, unless the flag is set."""
        if not self._fused:
            if not self.flag.item():
                self._optimizer.step()
            return
        # Parameters on the host: their kernels do not wait for a copy that is under way, so the host does.
        offloaded = self.flag.device.type != "cpu" and torch.device("cpu") in self._homes
        self._optimizer.found_inf = self.flag.cpu() if offloaded else self.flag  # type: ignore[attr-defined]
        try:
            self._optimizer.step()
        finally:
            del self._optimizer.found_inf  # type: ignore[attr-defined]

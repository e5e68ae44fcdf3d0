"""The guard: a step whose loss or gradient norm is not finite changes nothing, and the host need not wait to find that out.

The flag of the guard is a number on the device. Fused optimizers of torch and those of ours take it as ``found_inf`` (the name
is from torch's gradient scaler), and leave parameters, moments and step counts unchanged if it is 1. The host reads how steps
went when it logs.
"""

import math
from contextlib import AbstractContextManager, nullcontext

import torch

from meshwright.objectives.call import in_part
from meshwright.train.optimizer import skips_by_flag

__all__ = ["Guard", "is_finite"]

NAMES = ("loss", "gradient_norm")
"""The metrics that must be finite."""


def is_finite(values: dict[str, float]) -> bool:
    """Whether a step with these metrics may change the model."""
    return all(math.isfinite(values[name]) for name in NAMES)


class Guard:
    """Makes an optimizer skip steps that are not finite. All ranks decide the same, since loss and norm are the same on all.

    Args:
        optimizer: the optimizer whose steps are skipped.
        device: device of losses and norms.
        most: number of bad steps in a row after which every later step changes nothing either; ``None``: no limit.
        part: name of an optimizer of the user, for what it raises; ``None``: it is ours.

    Attributes:
        flag: fp32 scalar on the device; 1 if the step that was judged last changes nothing, otherwise 0.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, device: torch.device, most: int | None, part: str | None = None
    ) -> None:
        self._optimizer, self._most, self._part = optimizer, most, part
        self._by_flag = skips_by_flag(optimizer)
        self._homes = {parameter.device for group in optimizer.param_groups for parameter in group["params"]}
        self.flag = torch.zeros((), device=device)
        self._in_a_row = torch.zeros((), device=device)  # steps that changed nothing; once it is `most`, it only grows

    def judge(self, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """Set the flag for a step.

        Args:
            loss: loss of the step, over all ranks.
            norm: norm of its gradient.
        """
        # A finite number minus itself is 0; otherwise it is NaN, which differs from every number. `isfinite` has four kernels.
        unchanged = (loss - loss) != (norm - norm)
        if self._most is not None:
            unchanged = unchanged | (self._in_a_row >= self._most)
        self.flag = unchanged.float()
        if self._most is not None:
            self._in_a_row = torch.addcmul(self.flag, self._in_a_row, self.flag)  # (steps + 1) * flag

    def step(self) -> None:
        """Run the step of the optimizer, unless the flag is set."""
        if not self._by_flag:
            if not self.flag.item():
                with self._named():
                    self._optimizer.step()
            return
        # CPU kernels, for parameters on the host, do not wait for a copy of the flag that is under way, so the host waits.
        offloaded = self.flag.device.type != "cpu" and torch.device("cpu") in self._homes
        self._optimizer.found_inf = self.flag.cpu() if offloaded else self.flag  # type: ignore[attr-defined]
        try:
            with self._named():
                self._optimizer.step()
        finally:
            del self._optimizer.found_inf  # type: ignore[attr-defined]

    def _named(self) -> AbstractContextManager[None]:
        return nullcontext() if self._part is None else in_part(f"optimizer {self._part}", "step")

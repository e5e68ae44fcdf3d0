"""The journal: the metrics of steps stay on the device until the host asks for them.

It may ask, launch another step, and read only then. So the device has work while the host reads.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.device import HostCopy

__all__ = ["Journal"]


@dataclass(frozen=True)
class _Entry:
    step: int
    rate: float
    metrics: dict[str, torch.Tensor]
    seconds: float


class Journal:
    """Records the steps of a run, in order."""

    def __init__(self) -> None:
        self._unread: list[_Entry] = []
        self._posted: tuple[list[_Entry], HostCopy] | None = None
        self._last: dict[str, Any] = {}
        self._steps, self._seconds, self._tokens = 0, 0.0, 0.0

    def add(self, step: int, rate: float, metrics: dict[str, torch.Tensor], seconds: float) -> None:
        """Record a step.

        Args:
            step: number of the step.
            rate: learning rate.
            metrics: name to metric, scalars on one device; ``tokens`` is among them.
            seconds: time that the host spent on the step.
        """
        self._unread.append(_Entry(step, rate, metrics, seconds))

    def post(self) -> bool:
        """Begin to copy the metrics of all steps that were not read yet to the host. Read what was posted before first.

        Returns:
            Whether they arrive later. Otherwise nothing is gained by reading them later.
        """
        if not self._unread:
            return False
        assert self._posted is None
        begun = time.perf_counter()
        entries, self._unread = self._unread, []
        copy = HostCopy(_together([value for entry in entries for value in entry.metrics.values()]))
        self._posted = entries, copy
        self._seconds += time.perf_counter() - begun
        return copy.is_later

    def arrives_within(self, seconds: float) -> bool:
        """Wait for some time at most, and return whether what was posted is there."""
        return self._posted is not None and self._posted[1].arrives_within(seconds)

    def read_posted(self) -> list[tuple[int, dict[str, float]]]:
        """Wait for what was posted, and return the number and the metrics of each of these steps."""
        if self._posted is None:
            return []
        begun = time.perf_counter()
        (entries, copy), self._posted = self._posted, None
        flat = iter(copy.wait().tolist())
        read = [(entry.step, {name: next(flat) for name in entry.metrics}) for entry in entries]
        self._steps += len(entries)
        self._seconds += sum(entry.seconds for entry in entries) + time.perf_counter() - begun
        self._tokens += sum(values["tokens"] for _, values in read)
        self._last = {**read[-1][1], "learning_rate": entries[-1].rate}
        return read

    def read(self) -> list[tuple[int, dict[str, float]]]:
        """Wait for the device, and return the number and the metrics of each step that was not read yet."""
        before = self.read_posted()
        self.post()
        return [*before, *self.read_posted()]

    def summary(self) -> dict[str, Any]:
        """Return the metrics of the step that was read last, with its learning rate.

        Tokens per second and seconds per step are means since the last summary.
        """
        means = {
            **self._last,
            "tokens": int(self._last["tokens"]),
            "tokens_per_second": self._tokens / self._seconds,
            "step_seconds": self._seconds / self._steps,
        }
        self._steps, self._seconds, self._tokens = 0, 0.0, 0.0
        return means


def _together(scalars: list[torch.Tensor]) -> torch.Tensor:
    """Return scalars of one device in fp64 [scalars], by one operator for each dtype."""
    whole = torch.empty(len(scalars), dtype=torch.float64, device=scalars[0].device)
    for dtype in dict.fromkeys(scalar.dtype for scalar in scalars):
        same = [place for place, scalar in enumerate(scalars) if scalar.dtype == dtype]
        torch._foreach_copy_([whole[place] for place in same], [scalars[place] for place in same])
    return whole

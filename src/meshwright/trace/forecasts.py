"""All that is forecast of a run on a device, each when it is first asked for."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from meshwright.plan.cost.hardware import Hardware
from meshwright.trace.few_layers import Traces
from meshwright.trace.speedups import Speedup, find_speedups
from meshwright.trace.time import TimeForecast, forecast_time
from meshwright.trace.verdict import Verdict, judge
from meshwright.train.start.setup import RunSetup

__all__ = ["Forecasts"]


@dataclass
class Forecasts:
    """What is forecast of a run on a device. No process group may exist.

    Args:
        setup: the run.
        hardware: the device.
        load: tokens of the fullest rank of ``ep``, over an even share.
    """

    setup: RunSetup
    hardware: Hardware
    load: float = 1.0

    @cached_property
    def traces(self) -> Traces:
        """The trace of some of its layers."""
        return Traces(self.setup, load=self.load)

    @cached_property
    def verdict(self) -> Verdict:
        """Whether it fits."""
        return judge(self.setup, self.hardware, self.traces)

    @cached_property
    def time(self) -> TimeForecast:
        """How long a step takes."""
        return forecast_time(self.setup, self.hardware, self.traces)

    @cached_property
    def faster(self) -> Sequence[Speedup]:
        """Changes that save most of its time."""
        return find_speedups(self.setup, self.hardware, self.traces, self.verdict, self.time)

"""What a candidate costs: the forecasts of `plan --gpu`, with traces and facts that all candidates share."""

from dataclasses import dataclass
from functools import cached_property

from meshwright.errors import MeshwrightError
from meshwright.plan.cost.hardware import Hardware
from meshwright.search.space import Candidate
from meshwright.trace.few_layers import Traces
from meshwright.trace.in_time.part_words import words_of
from meshwright.trace.kept_traces import TraceStore
from meshwright.trace.time import TimeForecast, forecast_time
from meshwright.trace.verdict import Verdict, fit
from meshwright.train.start.setup import RunSetup, change_setup

__all__ = ["Price", "Pricer", "limit_of"]


@dataclass(frozen=True)
class Price:
    """A candidate, and what it costs.

    Attributes:
        candidate: the layout and choices.
        setup: the run that it is.
        verdict: whether it fits, and by how much.
        traces: its traces.
        hardware: the devices.
    """

    candidate: Candidate
    setup: RunSetup
    verdict: Verdict
    traces: Traces
    hardware: Hardware

    @cached_property
    def time(self) -> TimeForecast:
        """How long a step takes. It is forecast when it is asked for: not for what does not fit."""
        return forecast_time(self.setup, self.hardware, self.traces)

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.time.step_seconds


class Pricer:
    """Prices candidates of a run.

    Args:
        setup: the run.
        hardware: the devices.
        store: traces.
        load: tokens of the experts of the fullest rank, over an even share.

    Attributes:
        refusals: code of each refusal to the number of candidates that it refused.
    """

    def __init__(self, setup: RunSetup, hardware: Hardware, store: TraceStore, load: float = 1.0) -> None:
        self.setup, self.hardware, self.store, self.load = setup, hardware, store, load
        self.refusals: dict[str, int] = {}

    def setup_of(self, candidate: Candidate) -> RunSetup | None:
        """Return the run of a candidate; ``None``: it is refused."""
        try:
            config = candidate.config(self.setup.config)
            return change_setup(self.setup, config, candidate.layout.world_size, program=False)
        except MeshwrightError as error:
            self._refuse(error)
            return None

    def fit(self, setup: RunSetup) -> tuple[Verdict, Traces] | None:
        """Return whether a run fits, and its traces; ``None``: it cannot be traced."""
        traces = Traces(setup, load=self.load, store=self.store)
        try:
            return fit(setup, self.hardware, traces), traces
        except MeshwrightError as error:
            self._refuse(error)
            return None

    def price(self, candidate: Candidate, setup: RunSetup | None = None) -> Price | None:
        """Return what a candidate costs; ``None``: it is refused.

        Args:
            candidate: the layout and choices.
            setup: its run, if it is planned.
        """
        setup = setup or self.setup_of(candidate)
        if setup is None or (found := self.fit(setup)) is None:
            return None
        verdict, traces = found
        return Price(candidate, setup, verdict, traces, self.hardware)

    def _refuse(self, error: MeshwrightError) -> None:
        code = error.problems[0].code
        self.refusals[code] = self.refusals.get(code, 0) + 1


def limit_of(price: Price) -> str:
    """Return what keeps a candidate from being faster, in words: the largest part of its step beside products and attention."""
    others = {name: seconds for name, seconds in price.time.parts.items() if name not in ("products", "attention")}
    name, seconds = max(others.items(), key=lambda part: part[1])
    compiles = name in ("elementwise", "launches") and not price.setup.plan.options.compile
    return f"{seconds / price.seconds:.0%} {words_of(name)}{': compile' if compiles else ''}"

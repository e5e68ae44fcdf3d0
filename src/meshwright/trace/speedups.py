"""Which single changes of a run save most time: each is planned, traced and priced as the run itself."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.plan.cost.hardware import Hardware
from meshwright.plan.cost.price import totals
from meshwright.plan.given.closed_choices import SyncPolicy
from meshwright.trace.changes import KEPT_FIRST, Overrides, filled, least_factor, override_text, with_values, without_axis
from meshwright.trace.few_layers import Traces
from meshwright.trace.in_time.part_words import longer_in
from meshwright.trace.time import TimeForecast, forecast_time
from meshwright.trace.verdict import Verdict, fit
from meshwright.train.start.setup import RunSetup, change_setup

__all__ = ["Speedup", "find_speedups"]

PROPOSED = 3
"""Number of changes that are proposed."""

LEAST = 0.01
"""Share of a step that a change must save."""


@dataclass(frozen=True)
class Speedup:
    """A change of a run that makes its step shorter, and with which it still fits.

    Attributes:
        overrides: what to append to the command.
        reason: what it does, and which parts of the step it makes shorter, in words.
        step_seconds: a step with it.
        saved: share of the step that it saves.
        peak_bytes: memory of the fullest rank with it.
    """

    overrides: tuple[str, ...]
    reason: str
    step_seconds: float
    saved: float
    peak_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the change as plain values, for JSON."""
        return asdict(self)


def find_speedups(
    setup: RunSetup, hardware: Hardware, traces: Traces, verdict: Verdict, time: TimeForecast
) -> tuple[Speedup, ...]:
    """Return the changes that save most time, the best first; none for a run that does not fit, or has a teacher.

    Args:
        setup: the run. No process group may exist.
        hardware: the devices.
        traces: its trace.
        verdict: whether it fits.
        time: how long a step takes.
    """
    if not verdict.fits or setup.teacher is not None:
        return ()
    found = []
    for overrides, reason in _candidates(setup, verdict):
        try:
            config = with_values(setup.config, overrides)
            changed = change_setup(setup, config, setup.layout.world_size, program=False)
            own = replace(traces, setup=changed)
            other, after = fit(changed, hardware, own), forecast_time(changed, hardware, own)
        except MeshwrightError:  # the change is illegal for this run
            continue
        saved = 1 - after.step_seconds / time.step_seconds
        if other.fits and saved >= LEAST:
            words = tuple(f"{key}={override_text(value)}" for key, value in overrides)
            because = f"{reason}: {longer_in(time.parts, after.parts, 'less')}"
            found.append(Speedup(words, because, after.step_seconds, saved, other.peak_bytes))
    return tuple(sorted(found, key=lambda change: change.step_seconds)[:PROPOSED])


def _candidates(setup: RunSetup, verdict: Verdict) -> Iterator[tuple[Overrides, str]]:
    plan, layout, config = setup.plan, setup.layout, setup.config
    options, parallel = plan.options, config.parallel
    if not options.compile:
        yield [("parallel.compile", True)], "the compiler fuses operators beside products"
    if any(unit.sync is not SyncPolicy.DEFER for unit in plan.fsdp_units) and options.microbatches > 1:
        held = totals(plan)
        more = sum(row.gathered_bytes + row.reduced_bytes for row in plan.parameters) // layout.size("pp")
        now = held.gathered_peak_bytes + held.unsharded_gradient_peak_bytes
        if verdict.peak_bytes + more - now <= verdict.limit_bytes:
            yield [("parallel.sync", "defer")], "parameters are gathered, and gradients reduced, once a step"
    for mode in KEPT_FIRST[: min(2, KEPT_FIRST.index(parallel.activation_checkpointing))]:
        yield [("parallel.activation_checkpointing", mode.value)], "less is recomputed"
    if options.microbatches > 1:
        times = least_factor(options.microbatches)
        rows = times * config.training.microbatch_size
        yield [("training.microbatch_size", rows)], f"{'half' if times == 2 else f'1/{times} of'} the microbatches"
    for axis in ("tp", "cp", "pp"):
        if (size := layout.size(axis)) > 1:
            fewer = size // least_factor(size)
            back = list(without_axis(parallel, axis)) if fewer == 1 else []  # what is written for the axis goes with it
            yield [(f"layout.{axis}", fewer), *filled(config, axis), *back], f"fewer ranks for {axis}"

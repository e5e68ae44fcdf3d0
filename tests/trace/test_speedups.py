"""The changes that save most time are legal, fit, and cost what they are said to cost."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from meshwright.plan.cost.hardware import load_hardware
from meshwright.trace.few_layers import Traces
from meshwright.trace.speedups import Speedup, find_speedups
from meshwright.trace.time import forecast_time
from meshwright.trace.verdict import fit
from meshwright.train.config import overridden
from meshwright.train.start.setup import RunSetup, make_setup
from tests.harness import run_ranks
from tests.trace.test_memory import setup_of

DEVICE = replace(load_hardware("h100"), hbm_tb_s=0.5, launch_us=0.0, link_us=0.1)
"""Slow memory and quick collectives: operators beside products are most of a step."""


def speedups_of(setup: RunSetup, **changed: Any) -> tuple[Speedup, ...]:
    def found(_: int) -> tuple[Speedup, ...]:
        device, traces = replace(DEVICE, **changed), Traces(setup)
        return find_speedups(setup, device, traces, fit(setup, device, traces), forecast_time(setup, device, traces))

    (result,) = run_ranks(found, 1, group=False)
    return result


@pytest.mark.thorough
def test_they_cost_what_they_are_said_to_cost() -> None:
    setup = setup_of(4, layers=4, layout={"tp": 2}, parallel={"activation_checkpointing": "full"})
    found = speedups_of(setup)
    assert len(found) == 3
    assert [one.step_seconds for one in found] == sorted(one.step_seconds for one in found)
    assert ("parallel.compile=true",) in [one.overrides for one in found]
    content = setup.config.model_dump(mode="json", by_alias=True)

    def planned(_: int) -> list[tuple[float, int]]:
        prices = []
        for one in found:
            own = make_setup(overridden(deepcopy(content), one.overrides), 4, planning=True)
            traces = Traces(own)
            prices.append((forecast_time(own, DEVICE, traces).step_seconds, fit(own, DEVICE, traces).peak_bytes))
        return prices

    (prices,) = run_ranks(planned, 1, group=False)
    assert prices == [(one.step_seconds, one.peak_bytes) for one in found]


def test_none_for_a_run_that_does_not_fit() -> None:
    assert speedups_of(setup_of(2, layers=4), memory_gib=1.0) == ()


def test_what_is_written_for_an_axis_goes_with_it() -> None:
    """Half of two ranks of tp are none, for which sequence parallel would be refused."""
    setup = setup_of(4, layers=4, layout={"tp": 2}, parallel={"sequence_parallel": True, "compile": True})
    slow = {"link_gb_s": 0.01, "nic_gb_s": 0.01}
    found = [one.overrides for one in speedups_of(setup, **slow)]
    assert ("layout.tp=1", "layout.dp_shard=null", "parallel.sequence_parallel=false") in found

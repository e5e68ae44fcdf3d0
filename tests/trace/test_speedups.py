"""The changes that save most time are legal, fit, and cost what they are said to cost."""

import re
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from meshwright.plan.cost.hardware import load_hardware
from meshwright.trace.changes import with_values
from meshwright.trace.few_layers import Traces
from meshwright.trace.in_time.part_words import longer_in
from meshwright.trace.speedups import Speedup, _candidates, find_speedups
from meshwright.trace.time import forecast_time
from meshwright.trace.verdict import Verdict, fit
from meshwright.train.config import overridden
from meshwright.train.start.setup import RunSetup, change_setup, make_setup
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
    assert ("layout.tp=1", "parallel.sequence_parallel=false") in found


@pytest.mark.parametrize(
    ("world", "sections", "expected"),
    [
        (4, {"layout": {"tp": 2, "dp_shard": 1, "dp_replicate": None}}, {"layout.tp": 1}),
        (4, {"layout": {"tp": 2, "dp_shard": 2}}, {"layout.tp": 1, "layout.dp_shard": None}),
        (
            3,
            {"layout": {"pp": 3}, "parallel": {"pipeline": {"schedule": "gpipe"}}, "training": {"global_batch_size": 24}},
            {"layout.pp": 1, "parallel.pipeline.schedule": "1f1b"},
        ),
        (6, {"layout": {"cp": 6}, "data": {"files": ["drawn"], "sequence_length": 48}}, {"layout.cp": 3}),
        (2, {"training": {"global_batch_size": 12}}, {"training.microbatch_size": 6}),
        (2, {"training": {"global_batch_size": 32}}, {"training.microbatch_size": 4}),
    ],
    ids=["null replicas", "all written", "three stages", "six parts", "three microbatches", "eight microbatches"],
)
def test_a_change_of_any_size_is_legal(world: int, sections: dict[str, Any], expected: dict[str, Any]) -> None:
    """A layout has one size that is left open at the most, and sizes and numbers of microbatches may be odd."""
    setup = setup_of(world, layers=6, **sections)
    proposed = [dict(overrides) for overrides, _ in _candidates(setup, Verdict(True, 1, 1, "", {}))]
    assert expected in proposed
    change_setup(setup, with_values(setup.config, list(expected.items())), world, program=False)


def test_the_reason_names_what_gets_shorter() -> None:
    """Where the host is slow, compiled code wins by starting fewer operators, and not by fusing what they move."""
    setup = setup_of(2, layers=4)
    (compiled,) = (one for one in speedups_of(setup, launch_us=50.0) if one.overrides == ("parallel.compile=true",))
    assert re.search(r"fuses.*: .* less in starting operators", compiled.reason)
    assert longer_in({"tp": 3.0, "update": 2.0, "cp": 1.0}, {"tp": 1.0, "bubble": 9.0}, "less") == (
        "2 s less in the update, 2 s less in communication over tp"
    )

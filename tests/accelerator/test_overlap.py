"""What collectives expose on the timeline of a training step is what the forecast says, with the same times."""

from collections.abc import Callable

import pytest

from meshwright.train.config import RunConfig
from tests.accelerator.overlap import CASES, COMMON, STEP, forecast, measured
from tests.accelerator.workers import Workers

SEVERAL_STAGES = ("pp=2, interleaved 1f1b", "pp=2, zbv")
"""The replay knows how long these take, but not as well what of it is waiting: torch asks for messages where it sees fit."""

DEFAULT = ("dp_shard=2, reduce each, reshard", "tp=2", "cp=2, ring", "ep=2", "pp=2, 1f1b")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.thorough) for name in CASES]
)
def test_exposed_seconds_are_the_forecast(tiny: Callable[..., RunConfig], two: Workers, name: str) -> None:
    config = tiny(*COMMON, *CASES[name])
    found, said = measured(two, config), forecast(config)
    scalars = found.pop(STEP)  # whose latency no forecast has
    assert scalars < 0.01 * sum(found.values())
    for part, seconds in found.items():
        if name in SEVERAL_STAGES and part in ("bubble", "pp"):
            continue
        assert said.get(part, 0.0) == pytest.approx(seconds, rel=0.1, abs=0.002 * sum(found.values())), part
    assert sum(said.values()) == pytest.approx(sum(found.values()), rel=0.03)

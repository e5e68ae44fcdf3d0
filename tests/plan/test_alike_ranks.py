"""Ranks of a pipeline that count as alike add up to the same; what differs in one layer makes a rank another one."""

from dataclasses import replace
from typing import Any

import pytest

from meshwright.plan.cost import price
from meshwright.plan.cost.alike_ranks import alike_rank
from meshwright.plan.cost.hardware import load_hardware
from meshwright.plan.cost.price import fullest_rank, totals_of_rank
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.trace import time
from meshwright.trace.few_layers import Traces
from meshwright.trace.held import stage_memory
from meshwright.trace.held.memory import memory_moments
from meshwright.trace.kept_traces import TraceStore
from meshwright.trace.time import forecast_time
from tests.trace.test_memory import setup_of

OF_LAYER_5 = "model.layers.5.mlp.up_proj.weight"


def plan_of(family: str = "llama", schedule: str = "1f1b", **parallel: Any) -> ShardingPlan:
    options = {"pipeline": {"schedule": schedule}, **parallel}
    return setup_of(8, family, layers=8, layout={"pp": 4, "dp_shard": 2}, parallel=options).plan


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_inner_ranks_add_up_to_the_same(family: str, schedule: str) -> None:
    plan = plan_of(family, schedule)
    assert [alike_rank(plan, rank) for rank in range(4)] == [0, 1, 1, 3]
    one, other = (replace(totals_of_rank(plan, rank), largest_unit="", receive_buffer_bytes=0) for rank in (1, 2))
    assert one == other


@pytest.mark.parametrize(
    "choice",
    [
        {"freeze": [OF_LAYER_5]},
        {"sync": "defer", "sync_units": {"model.layers.5": "reduce_each"}},
        {"activation_checkpointing_layers": {"model.layers.5": "full"}},
    ],
    ids=lambda choice: next(iter(choice)),
)
def test_a_layer_that_differs_makes_a_rank_another(choice: dict[str, Any]) -> None:
    plan = plan_of(**choice)
    assert [alike_rank(plan, rank) for rank in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_forecasts_are_those_of_all_ranks_one_by_one(family: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They add up one of the ranks that are alike."""
    setup = setup_of(8, family, layers=9, layout={"pp": 4, "dp_shard": 2}, parallel={"pipeline": {"schedule": schedule}})
    hardware, store = load_hardware("h100"), TraceStore(setup)

    def forecasts() -> Any:
        plan = replace(setup.plan)  # nothing was asked of it
        again = replace(setup, plan=plan)
        found = forecast_time(again, hardware, Traces(again, store=store)).to_dict()
        return fullest_rank(plan), found, [vars(one) for one in memory_moments(again, Traces(again, store=store))]

    few = forecasts()
    for module in (price, stage_memory, time):
        monkeypatch.setattr(module, "alike_rank", lambda plan, rank: rank)
    assert forecasts() == few


def test_without_stages_there_is_one_rank() -> None:
    assert alike_rank(setup_of(2, layout={"dp_shard": 2}).plan, 0) == 0

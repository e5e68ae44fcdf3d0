"""Ranks of a pipeline that count as alike add up to the same; what differs in one layer makes a rank another one."""

from dataclasses import replace
from typing import Any

import pytest

from meshwright.plan.cost.alike_ranks import alike_rank
from meshwright.plan.cost.price import totals_of_rank
from meshwright.plan.result.sharding_plan import ShardingPlan
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


def test_without_stages_there_is_one_rank() -> None:
    assert alike_rank(setup_of(2, layout={"dp_shard": 2}).plan, 0) == 0

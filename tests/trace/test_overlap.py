"""What compute hides of collectives: the limits, and closed forms of small cases."""

from typing import Any
from unittest.mock import patch

import pytest

from meshwright.plan.axes.context.sharing import ring_message_bytes
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.trace.in_time.fsdp_replay import Recording, Turn, _Line, exposed_share
from meshwright.trace.overlap import Speeds, exposed_of_ring, waits_of_pipeline
from tests.trace.test_memory import setup_of

LAYERS, GATHER, REDUCE = 6, 1.0, 2.0


def plan_of(**sections: Any) -> ShardingPlan:
    return setup_of(2, layers=LAYERS, **sections).plan


def price(axis: str, kind: str, size: int) -> float:
    return {"all_gather": GATHER, "reduce_scatter": REDUCE, "all_reduce": REDUCE, "send": 1.0}[kind]


def exposed(plan: ShardingPlan, forward: float, backward: float) -> float:
    """Seconds; each unit, of six layers and the root, is gathered and reduced."""
    share = exposed_share(plan, {name: Turn(forward, backward) for name in plan.layers}, 0.0, price)
    return share * (LAYERS + 1) * (GATHER + REDUCE)


@pytest.mark.parametrize(
    ("forward", "backward", "left"),
    [
        (0.0, 0.0, (LAYERS + 1) * (GATHER + REDUCE)),
        (9.0, 9.0, 2 * GATHER + 2 * REDUCE),  # those of the root and of the first layer
        (0.5, 9.0, 2 * GATHER + (LAYERS - 1) * (GATHER - 0.5) + 2 * REDUCE),
        (9.0, 0.5, 2 * GATHER + (LAYERS - 1) * (REDUCE - 0.5) + 2 * REDUCE),
    ],
)
def test_what_a_deferred_step_exposes(forward: float, backward: float, left: float) -> None:
    """Forward of the last layer hides no gather, and backward of the last layer no reduction."""
    assert exposed(plan_of(), forward, backward) == pytest.approx(left)


def test_replicas_reduce_beside_the_next_layer() -> None:
    plan = plan_of(layout={"dp_replicate": 2})
    assert exposed_share(plan, {name: Turn(9.0, 9.0) for name in plan.layers}, 0.0, price) == pytest.approx(2 / (LAYERS + 1))


@pytest.mark.parametrize("reshard", [False, True])
def test_each_microbatch_that_reduces_exposes_its_ends(reshard: bool) -> None:
    """Without a head, the last layer's gather in backward has nothing to hide behind; the root's runs beside that layer."""
    plan = plan_of(parallel={"sync": "reduce_each", "reshard_after_forward": reshard})
    share = exposed_share(plan, {name: Turn(99.0, 99.0) for name in plan.layers}, 0.0, price)
    calls = (LAYERS + 1) * ((1 + reshard) * GATHER + REDUCE)
    assert share * calls == pytest.approx(2 * GATHER + 2 * REDUCE + reshard * GATHER)


@pytest.mark.parametrize("sync", ["defer", "reshard_each", "reduce_each"])
@pytest.mark.parametrize("layout", [{}, {"dp_replicate": 2, "dp_shard": 1}], ids=["shards", "replicas"])
def test_microbatches_that_are_counted_are_as_those_that_are_replayed(sync: str, layout: dict[str, int]) -> None:
    """A recording has all of them."""
    plan = plan_of(layout=layout, parallel={"sync": sync}, training={"global_batch_size": 24, "microbatch_size": 1})
    assert plan.options.microbatches == 12
    for scale in (0.1, 1.0, 10.0):
        turns = {name: Turn(scale * (1 + index % 3), scale * (2 + index % 2)) for index, name in enumerate(plan.layers)}
        recording = Recording()
        replayed = exposed_share(plan, turns, scale, price, recording)
        assert len(recording.phases) == 24
        with patch.object(_Line, "forward", autospec=True, side_effect=_Line.forward) as forward:
            assert exposed_share(plan, turns, scale, price) == pytest.approx(replayed, rel=1e-9)
        assert forward.call_count < 12


def test_a_ring_waits_for_the_gradients_of_its_last_part() -> None:
    plan = plan_of(layout={"cp": 2, "dp_shard": 1}, parallel={"context_parallel": "ring"})
    microbatches, row = plan.options.microbatches, plan.attentions[0]
    assert plan.options.tokens is not None
    sent, returned = ring_message_bytes(plan, row, plan.options.tokens)
    assert (sent, returned) == (returned, plan.options.tokens * row.kv_heads * (row.key_size + row.value_size) * 4)
    fast, slow = (exposed_of_ring(plan, 64, Speeds(speed, speed, speed), price) for speed in (1e99, 1e-9))
    assert fast == pytest.approx(microbatches * LAYERS * 4)  # keys and values twice, their gradients twice
    assert slow == pytest.approx(microbatches * LAYERS)


@pytest.mark.parametrize(("schedule", "messages"), [("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 0)])
def test_a_pipeline_waits_for_messages(schedule: str, messages: int) -> None:
    """A stage alone on its rank waits for every message, and the last one for its own last one; others mostly do not."""
    plan = plan_of(layout={"pp": 2}, parallel={"pipeline": {"schedule": schedule}})
    stages = [1e6 * row.cost for row in plan.stages]
    bubble, waits = waits_of_pipeline(plan, 1, stages, price)
    again, none = waits_of_pipeline(plan, 1, stages, lambda *_: 0.0)
    assert bubble == again > 0
    assert none == 0
    if messages:
        assert waits == pytest.approx(plan.options.microbatches + 1, rel=1e-3)
    else:
        assert 0 < waits < plan.options.microbatches

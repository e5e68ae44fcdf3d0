"""How a plan decides about a loss in chunks."""

from dataclasses import replace

import pytest
from rich.console import Console

from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.models.specs.registry import spec_of
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.given.spec import UnitRule
from meshwright.plan.memory.loss_chunks import chunks_of
from meshwright.plan.resolver import resolve
from meshwright.plan.result.program import ChunkLoss
from meshwright.plan.result.rows import LossRow
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.plan.show.explain import explain
from tests.tiny import tiny_model


def planned(layout: Layout = Layout(dp_shard=2), vocab_size: int = 67, **options: object) -> ShardingPlan:  # noqa: B008
    model = tiny_model("llama", meta=True, vocab_size=vocab_size)
    return resolve(spec_of(model), model, layout, ParallelOptions(**options))  # type: ignore[arg-type]


def test_the_number_of_chunks() -> None:
    assert chunks_of(32_000, 4_096, "bfloat16") == 0  # 500 MiB
    assert chunks_of(128_256, 8_192, "bfloat16") == chunks_of(128_256, 8_192, "float32") == 8
    assert chunks_of(128_256, 8_192, "float64") == 16
    assert chunks_of(262_144, 32_768, "bfloat16") == 64


def test_null_depends_on_the_whole_microbatch_and_not_on_the_layout() -> None:
    one = planned(vocab_size=128_256, tokens=8_192, loss_chunks=None)
    shared = planned(Layout(cp=2, dp_shard=1), vocab_size=128_256, tokens=4_096, loss_chunks=None)
    sliced = planned(Layout(tp=2, dp_shard=1), vocab_size=128_256, tokens=8_192, loss_chunks=None)
    for plan in (one, shared, sliced):
        assert plan.loss is not None
        assert (plan.loss.module, plan.loss.vocabulary, plan.loss.chunks) == ("lm_head", 128_256, 8)
    assert planned(tokens=8_192, loss_chunks=None).loss is None  # a small vocabulary
    assert planned(vocab_size=128_256, loss_chunks=None).loss is None  # by hand, nobody said how many tokens there are
    assert planned(vocab_size=128_256, tokens=8_192).loss is None  # by hand, a model returns logits


def test_a_plan_with_chunks() -> None:
    plan = planned(Layout(pp=2, dp_shard=1), vocab_size=128_256, tokens=8_192, loss_chunks=4, microbatches=2)
    assert [action for action in plan.program if isinstance(action, ChunkLoss)] == [ChunkLoss(LossRow("lm_head", 128_256, 4))]
    assert ShardingPlan.from_json(plan.to_json()) == plan
    (difference,) = (item for item in plan.diff(replace(plan, loss=None)) if "loss" in str(item))
    assert "lm_head" in str(difference)
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(explain(plan))
    assert "4 chunks of 2,048 tokens" in console.export_text()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"loss_chunks": -1}, "loss_chunks=-1: must be at least 0"),
        ({"loss_chunks": 9, "tokens": 8}, "a rank has 8 tokens of a microbatch; legal are 0 to 8"),
        ({"loss_chunks": 2, "output_dtype": "bfloat16"}, "output_dtype=bfloat16 would round the loss"),
    ],
)
def test_what_is_refused(options: dict[str, object], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        planned(**options)  # type: ignore[arg-type]


def test_a_head_in_a_unit_of_its_own() -> None:
    model = tiny_model("llama", meta=True, vocab_size=128_256)
    spec = spec_of(model)
    spec = replace(spec, units=(*spec.units, UnitRule("lm_head")))
    with pytest.raises(PlanError, match="its output head 'lm_head' is in the unit 'lm_head', which would gather for each"):
        resolve(spec, model, Layout(dp_shard=2), ParallelOptions(loss_chunks=2))
    plan = resolve(spec, model, Layout(dp_shard=2), ParallelOptions(loss_chunks=None, tokens=8_192))
    assert plan.loss is None
    assert any("the loss is computed from all logits at once" in remark for remark in plan.remarks)

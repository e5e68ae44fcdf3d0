"""How a plan shares sequences: positions, refusals, counts, and worlds of many ranks."""

from dataclasses import replace
from typing import Any

import pytest

from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.models.specs.registry import spec_of
from meshwright.plan.axes.context.sharing import gathered_bytes, positions_of, unevenness
from meshwright.plan.cost.activation_traffic import activation_traffic
from meshwright.plan.given.closed_choices import ContextBalance, ContextMethod
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.resolver import resolve
from meshwright.plan.result.program import Attend
from meshwright.plan.result.sharding_plan import ShardingPlan
from tests.diffusion_gemma import tiny_diffusion_gemma
from tests.harness import refuses
from tests.tiny import PLAIN_SPEC, Plain, tiny_model


def planned(model: Any, layout: Layout, world: int | None = None, **options: Any) -> ShardingPlan:
    return resolve(spec_of(model), model, layout, ParallelOptions(**options), world_size=world)


def refusal(model: Any, layout: Layout, **options: Any) -> str:
    with pytest.raises(PlanError) as caught:
        planned(model, layout, **options)
    return str(caught.value)


@pytest.mark.parametrize("balance", ContextBalance)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_have_parts_of_equal_length_that_make_the_sequence(ranks: int, balance: ContextBalance) -> None:
    parts = [positions_of(48 * ranks, ranks, balance, rank) for rank in range(ranks)]
    assert {sum(map(len, pieces)) for pieces in parts} == {48}
    assert sorted(position for pieces in parts for piece in pieces for position in piece) == list(range(48 * ranks))


def test_zigzag_is_equal_work_for_causal_rows() -> None:
    assert unevenness(range(1, 65), 4, ContextBalance.ZIGZAG) == 1.0
    assert unevenness(range(1, 65), 4, ContextBalance.CONTIGUOUS) > 1.7
    assert unevenness([1, 2, 3, 4] * 16, 4, ContextBalance.CONTIGUOUS) == 1.0


@pytest.mark.parametrize(
    ("layout", "options", "multiple"),
    [
        ({"cp": 2}, {}, 4),
        ({"cp": 2}, {"context_balance": "contiguous"}, 2),
        ({"cp": 2, "tp": 4}, {"sequence_parallel": True}, 8),
        ({"cp": 2, "tp": 2}, {"context_balance": "contiguous", "sequence_parallel": True}, 4),
        ({"cp": 3, "tp": 2}, {"sequence_parallel": True}, 6),
        ({"tp": 2}, {"sequence_parallel": True}, 2),
    ],
)
def test_the_length_of_a_sequence(layout: dict[str, int], options: dict[str, Any], multiple: int) -> None:
    model = tiny_model("llama", meta=True, num_key_value_heads=4)
    assert planned(model, Layout(dp_shard=1, **layout), **options).sequence_multiple == multiple


@pytest.mark.parametrize("method", ContextMethod)
@pytest.mark.parametrize("world", [8, 64, 1024])
def test_worlds(world: int, method: ContextMethod) -> None:
    model = tiny_model("gemma3_text", meta=True)
    plan = planned(model, Layout(cp=4, tp=1), world, context_parallel=method, tokens=8, microbatches=3)
    assert [row.mask for row in plan.attentions] == ["window of 8", "causal"]
    assert [action.module for action in plan.program if isinstance(action, Attend)] == [row.module for row in plan.attentions]
    assert plan.layout.size("dp_shard_cp") == world
    calls = {item.kind: item.calls for item in activation_traffic(plan) if item.axis == "cp"}
    assert (
        calls
        == {
            ContextMethod.GATHER: {"all_gather": 6, "reduce_scatter": 6},
            ContextMethod.ULYSSES: {"all_to_all": 36},
            ContextMethod.RING: {"send": 60},
        }[method]
    )
    assert {unit.tokens for unit in plan.units} == {"1/4 of each sequence (cp)"}
    assert ShardingPlan.from_json(plan.to_json()) == plan


def test_gathered_keys_are_priced() -> None:
    plan = planned(tiny_model("llama", meta=True), Layout(dp_shard=1, cp=2), tokens=16)
    assert gathered_bytes(plan, 16) == 32 * 2 * (8 + 8) * 2


def test_the_attentions_of_a_stack_that_denoises_are_read_from_a_training_forward() -> None:
    plan = planned(tiny_diffusion_gemma(), Layout(dp_shard=1, cp=2))
    rows = plan.attentions
    assert ShardingPlan.from_json(plan.to_json()) == plan
    assert [(row.module.split(".layers.")[0], row.mask, row.key_size) for row in rows] == [
        ("model.encoder.language_model", "window of 8", 8),
        ("model.encoder.language_model", "causal", 16),
        ("model.decoder", "own block, clean text before it, the last 7", 8),
        ("model.decoder", "own block, clean text before it", 16),
    ]
    assert "attention_dropout" in refusal(tiny_diffusion_gemma(attention_dropout=0.1), Layout(dp_shard=1, cp=2))


def test_what_cannot_be_shared_is_refused_by_name() -> None:
    two = Layout(dp_shard=1, cp=2)
    unknown = replace(spec_of(tiny_diffusion_gemma()), traces=None)
    with pytest.raises(PlanError, match="runs twice, with attention from one pass to the other, and nothing says which keys"):
        resolve(unknown, tiny_diffusion_gemma(), two, ParallelOptions())
    assert "takes no mask of blocks; legal are sdpa and eager" in refusal(tiny_diffusion_gemma("flex_attention"), two)
    assert "set attention_dropout" in refusal(tiny_model("llama", meta=True, attention_dropout=0.1), two)
    assert "context_recompute=True: needs cp > 1" in refusal(
        tiny_model("llama", meta=True), Layout(dp_shard=1), context_recompute=True
    )
    for name, value, legal in (("parallel", "ring", "gather"), ("balance", "contiguous", "zigzag")):
        said = refusal(tiny_model("llama", meta=True), Layout(dp_shard=1), **{f"context_{name}": value})
        assert said == f"context_{name}={value}: needs cp > 1; the legal value is {legal}"
    model = tiny_model("llama", meta=True)
    model.config._attn_implementation_internal = "paged|sdpa"
    assert "'paged|sdpa' is not supported; legal are sdpa, eager, flex_attention and flash_attention_2" in refusal(model, two)
    model = tiny_model("gpt_oss", meta=True)
    model.config._attn_implementation_internal = "flash_attention_2"
    assert "'model.layers.0.self_attn' has sinks, which flash_attention_2 does not know" in refusal(model, two)
    model = tiny_model("llama", meta=True)
    model.config._attn_implementation_internal = "flash_attention_2"
    for options in ({"param_dtype": "float32"}, {"param_dtype": None}):
        assert "flash_attention_2 computes in 16 bits, not in float32" in refusal(model, two, **options)
    with refuses(PlanError, "cp.unknown"):
        resolve(PLAIN_SPEC, Plain(), two, ParallelOptions())
    with pytest.raises(PlanError, match="legal are gather, ulysses, ring"):
        ParallelOptions(context_parallel="rings")


@pytest.mark.parametrize("kernel", ["flex_attention", "flash_attention_2", "kernels-community/flash-attn2"])
def test_kernels_of_gpus_are_planned_on_a_laptop(kernel: str) -> None:
    model = tiny_model("llama", meta=True)
    model.config._attn_implementation_internal = kernel
    plan = resolve(spec_of(model), model, Layout(dp_shard=1, cp=2), ParallelOptions())
    assert {row.kernel for row in plan.attentions} == {kernel}


def test_heads_that_cannot_be_exchanged() -> None:
    model = tiny_model("llama", meta=True)
    assert "over 1, 2, 4 ranks" in refusal(model, Layout(dp_shard=1, cp=3), context_parallel="ulysses")
    assert "2 heads and 1 key/value head of a rank can be exchanged over 1, 2 ranks" in refusal(
        model, Layout(dp_shard=1, cp=4, tp=2), context_parallel="ulysses"
    )

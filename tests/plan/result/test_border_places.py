"""Which modules have borders, and what a rank holds there: a function of the plan alone."""

import pytest
import torch

from meshwright.layout import Layout
from meshwright.models.specs.registry import spec_of
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.resolver import resolve
from meshwright.plan.result.border_places import Portion, Side, borders, first_microbatch, portion_of_rank
from meshwright.plan.result.sharding_plan import ShardingPlan
from tests.tiny import tiny_model

ROWS, LENGTH = 2, 12
WHOLE = Portion(range(ROWS), (range(LENGTH),))
PART = Portion(range(ROWS), (range(6, 12),))
SECOND = {"pp": 0, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 1}


def plan_of(family: str, layout: Layout, **options: bool) -> tuple[ShardingPlan, torch.nn.Module]:
    with torch.device("meta"):
        model = tiny_model(family)
    return resolve(spec_of(model), model, layout, ParallelOptions(**options), world_size=layout.resolve(4).world_size), model


@pytest.fixture(scope="module")
def sequence() -> ShardingPlan:
    return plan_of("llama", Layout(tp=2), sequence_parallel=True, loss_parallel=True)[0]


def test_borders_are_layers_what_stands_in_them_experts_and_the_leaves_outside() -> None:
    plan, model = plan_of("mixtral", Layout(dp_shard=4, ep=2))
    inside = ("self_attn", "mlp", "mlp.gate", "mlp.experts", "input_layernorm", "post_attention_layernorm")
    layers = [f"model.layers.{index}" for index in range(2)]
    outside = {"model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"}
    found = borders(plan, model)
    assert set(found) == outside | {*layers, *(f"{layer}.{name}" for layer in layers for name in inside)}
    assert list(found) == [name for name, _ in model.named_modules() if name in found]


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": False}])
def test_without_sequence_parallel_a_rank_holds_all_tokens(options: dict[str, bool]) -> None:
    for layout in (Layout(dp_shard=4), Layout(tp=2)):
        plan, model = plan_of("llama", layout, loss_parallel=False, **options)
        for name in borders(plan, model):
            assert portion_of_rank(plan, name, Side.OUTPUT, SECOND, ROWS, LENGTH) == WHOLE


@pytest.mark.parametrize(
    ("module", "side", "expected"),
    [
        ("model.embed_tokens", Side.OUTPUT, WHOLE),
        ("model.rotary_emb", Side.OUTPUT, WHOLE),
        ("model.layers.0", Side.INPUT, WHOLE),  # cut as it comes in
        ("model.layers.0", Side.OUTPUT, PART),
        ("model.layers.0.input_layernorm", Side.INPUT, PART),
        ("model.layers.1", Side.INPUT, PART),
        ("model.layers.1.self_attn", Side.INPUT, PART),  # gathered behind its border
        ("model.layers.1.self_attn", Side.OUTPUT, PART),
        ("model.layers.1.self_attn.q_proj", Side.OUTPUT, None),  # slices of features
        ("model.norm", Side.INPUT, PART),
        ("model.norm", Side.OUTPUT, WHOLE),  # joined as it leaves
        ("lm_head", Side.INPUT, WHOLE),
        ("lm_head", Side.OUTPUT, Portion(range(ROWS), (range(LENGTH),), range(34, 67))),
    ],
    ids=str,
)
def test_sequence_parallel_from_the_first_layer_to_the_last_norm(
    sequence: ShardingPlan, module: str, side: Side, expected: Portion | None
) -> None:
    assert portion_of_rank(sequence, module, side, SECOND, ROWS, LENGTH, features=67) == expected


def test_the_inside_of_experts_that_are_sliced_is_not_held_whole_and_that_of_experts_over_ep_is() -> None:
    for layout, expected in ((Layout(tp=2), None), (Layout(tp=2, ep=2), WHOLE)):
        plan, _ = plan_of("mixtral", layout)
        assert portion_of_rank(plan, "model.layers.0.mlp.experts", Side.OUTPUT, SECOND, ROWS, LENGTH) == expected


def test_the_first_microbatch_of_each_data_rank() -> None:
    plan, _ = plan_of("llama", Layout(dp_replicate=2, dp_shard=2))
    layout = plan.layout
    found = [first_microbatch(plan, layout.coordinates(rank)) for rank in range(4)]
    assert found == [rank * plan.options.microbatches for rank in range(4)]


def test_each_unit_says_which_tokens_come_into_it(sequence: ShardingPlan) -> None:
    part = "1/2 of each sequence (tp)"
    found = {unit.name: unit.tokens for unit in sequence.units}
    # The first layer cuts the stream as it comes in.
    assert found == {"": "all", **dict.fromkeys(sequence.layers, part), sequence.layers[0]: "all"}
    routed = plan_of("mixtral", Layout(dp_shard=4, ep=2))[0]
    assert {unit.tokens for unit in routed.units if unit.kind == "experts"} == {"routed over ep"}
    assert {unit.tokens for unit in routed.units if unit.kind != "experts"} == {"all"}

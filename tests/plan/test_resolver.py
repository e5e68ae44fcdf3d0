"""resolve(): rows of parameters and units for every family, and what it refuses."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from meshwright.errors import LayoutError, PlanError
from meshwright.layout import Layout
from meshwright.models.specs.registry import spec_of
from meshwright.plan.cost.price import totals
from meshwright.plan.given.closed_choices import SyncPolicy
from meshwright.plan.given.names import generalize, match_names
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.given.spec import ExpertsRule, ParallelSpec, UnitRule
from meshwright.plan.resolver import resolve
from meshwright.plan.result.sharding_plan import ShardingPlan
from tests.harness import refuses
from tests.tiny import FAMILIES, PLAIN_SPEC, make, tiny_model

FP32 = ParallelOptions(param_dtype="float32")


def problems(spec: ParallelSpec, model: nn.Module, **options) -> list[str]:
    with pytest.raises(PlanError) as error:
        resolve(spec, model, Layout(), ParallelOptions(**options), world_size=2)
    return list(error.value.problems)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("world", [1, 2, 8])
def test_every_family_has_a_unit_a_layer_and_a_row_a_parameter(family: str, world: int) -> None:
    model = tiny_model(family, meta=True)
    plan = resolve(spec_of(model), model, Layout(), FP32, world_size=world)
    assert [row.name for row in plan.parameters] == [name for name, _ in model.named_parameters()]
    layers = model.config.num_hidden_layers
    outer = [unit for unit in plan.units if unit.kind != "experts"]
    assert [unit.kind for unit in outer] == ["root", *["layer"] * layers]
    # The container rule: the last layer keeps its parameters, and so does the root. Its experts do not.
    assert [unit.reshard_after_forward for unit in outer] == [False, *[True] * (layers - 1), False]
    assert [unit.name for unit in plan.units if unit.kind == "experts"] == [row.module for row in plan.experts]
    assert all(unit.reshard_after_forward for unit in plan.units if unit.kind == "experts")
    for row in plan.parameters:
        inside = [unit.name for unit in plan.units if row.name.startswith(f"{unit.name}.")]
        assert row.unit == (inside[-1] if inside else "")
        if plan.unit(row.unit).kind == "experts" and row.shape[0] % world:
            continue  # sharded along another dimension: below
        expected = -(-row.shape[0] // world)
        assert row.local_shape == (expected, *row.shape[1:])
        assert row.bytes_per_rank == 4 * expected * row.numel // row.shape[0]
    if model.config.tie_word_embeddings:
        assert plan.parameter("lm_head.weight").aliases == ("lm_head.weight",)


def test_padding_of_uneven_rows_is_counted() -> None:
    model, spec = make("plain", meta=True, vocab=29)
    row = resolve(spec, model, Layout(), FP32, world_size=4).parameter("embed.weight")
    assert row.local_shape == (8, 16)  # 29 rows over 4 ranks: 8, 8, 8, 5
    assert row.bytes_per_rank == 8 * 16 * 4
    assert row.gathered_bytes == 32 * 16 * 4


def test_placements_of_every_axis() -> None:
    model = tiny_model("llama", meta=True, num_hidden_layers=4)
    layout = Layout(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2)
    plan = resolve(spec_of(model), model, layout, replace(FP32, microbatches=2))
    q = plan.parameter("model.layers.3.self_attn.q_proj.weight")
    assert q.placements == (("dp_replicate", "Replicate()"), ("dp_shard_cp", "Shard(0)"), ("tp", "Shard(0)"))
    assert q.local_shape == (32 // 2 // 4, 32)
    o = plan.parameter("model.layers.0.self_attn.o_proj.weight")
    assert dict(o.placements)["tp"] == "Shard(1)"
    assert o.local_shape == (32 // 4, 32 // 2)
    assert (o.stage, q.stage) == (0, 1)
    assert plan.parameter("model.embed_tokens.weight").stage == 0
    assert plan.parameter("lm_head.weight").stage == 1


def test_experts_are_planned_on_their_own_mesh() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=67, num_experts=8, num_experts_per_tok=2,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    plan = resolve(spec_of(model), model, Layout(dp_replicate=2, ep=4), FP32, world_size=16)
    row = next(row for row in plan.parameters if "experts" in row.name)
    assert dict(row.placements) == {"dp_replicate": "Replicate()", "ep_shard": "Shard(0)", "ep": "Shard(0)"}
    assert row.local_shape[0] == 1  # 8 experts over ep=4 and ep_shard=2
    with pytest.raises(LayoutError, match="ep=3"):
        resolve(spec_of(model), model, Layout(ep=3), FP32, world_size=6)


def test_patterns_without_a_match_are_errors_that_say_what_there_is() -> None:
    model, _ = make("plain", meta=True)
    spec = ParallelSpec(
        "plain", layers=("layers.*",), units=(UnitRule("adapter"),), fp32=("norms",), tp_styles={"wq": "colwise"}
    )
    found = problems(spec, model, freeze=("bias",), sync_units={"experts": "defer"})
    for start in (
        "layers pattern 'layers.*' matches no module; there are, for example, blocks",
        "units pattern 'adapter' matches no module",
        "fp32 pattern 'norms' matches no module",
        "freeze pattern 'bias' matches no parameter",
        "sync_units pattern 'experts' matches no unit",
        "tp_styles pattern 'wq' matches no parameter",
    ):
        assert any(line.startswith(start) for line in found), (start, found)


def test_a_module_that_two_rules_claim_is_an_error_that_names_both() -> None:
    model, _ = make("plain", meta=True)
    spec = ParallelSpec("plain", layers=("blocks.*",), units=(UnitRule("blocks.2"),))
    assert problems(spec, model) == [
        "module 'blocks.2' is claimed twice: by layers pattern 'blocks.*' and by units pattern 'blocks.2'"
    ]


def test_a_unit_is_left_out_if_another_one_holds_its_parameter() -> None:
    model, _ = make("plain", meta=True)
    model.head.weight = model.embed.weight
    spec = ParallelSpec("plain", layers=("blocks.*",), units=(UnitRule("embed"), UnitRule("head")))
    plan = resolve(spec, model, Layout(dp_shard=2), ParallelOptions())
    assert {unit.name for unit in plan.units} & {"embed", "head"} == set()
    why = "left out, because 'embed.weight' and 'head.weight' are one parameter, which one unit must hold"
    assert plan.remarks == (f"unit 'embed': {why}", f"unit 'head': {why}")
    excluding = resolve(spec, model, Layout(dp_shard=2), ParallelOptions(exclude_units=("head", "embed", "blocks.1")))
    assert excluding.remarks == ()
    assert excluding.parameter("blocks.1.0.weight").unit == ""
    (found,) = problems(spec, model, exclude_units=("blocks.9",))
    assert found.startswith("exclude_units pattern 'blocks.9' matches no unit; units are blocks.*, embed, head")


def test_a_tied_parameter_in_two_layers_is_an_error_that_names_both() -> None:
    model, _ = make("plain", meta=True)
    model.blocks[1][0].weight = model.blocks[0][0].weight  # and their biases are not tied
    (found,) = problems(ParallelSpec("plain", layers=("blocks.*",)), model)
    assert "'blocks.0.0.weight' in unit 'blocks.0' and 'blocks.1.0.weight' in unit 'blocks.1'" in found
    tied = ParallelSpec("plain", layers=("blocks.*",), tied=(("embed.weight", "norm.weight"),))
    assert "are not one parameter" in problems(tied, make("plain", meta=True)[0])[0]


def test_a_scalar_parameter_and_mixed_dtypes_are_refused() -> None:
    model, spec = make("plain", meta=True)
    model.temperature = nn.Parameter(torch.zeros((), device="meta"))
    assert "'temperature' is a scalar" in problems(spec, model)[0]
    model, spec = make("plain", meta=True)
    model.blocks[1][0].to(torch.bfloat16)
    (found,) = problems(spec, model)
    assert "unit 'blocks.1' mixes stored dtypes" in found
    assert "'blocks.1.0.weight' is bfloat16" in found


def test_each_parameter_without_entries_is_named() -> None:
    model, spec = make("plain", meta=True)
    for index in (1, 2):
        layer = model.get_submodule(f"blocks.{index}")
        layer.register_parameter("nothing", torch.nn.Parameter(torch.empty(0, 4, device="meta")))
    with refuses(PlanError, "fsdp.empty") as caught:
        resolve(spec, model, Layout(dp_shard=2), ParallelOptions())
    said = list(map(str, caught.value.problems))
    assert len(said) == 1
    assert said[0].startswith("'blocks.1.nothing' has the shape [0, 4]")
    assert said[0].endswith("(and 1 more like it)")


def test_fp32_modules_become_units_of_their_own_only_where_it_matters() -> None:
    model, _ = make("plain", meta=True)
    spec = ParallelSpec("plain", layers=("blocks.*",), fp32=("norm",))
    plan = resolve(spec, model, Layout(), ParallelOptions(), world_size=2)
    assert plan.unit("norm").kind == "fp32"
    assert (plan.unit("norm").param_dtype, plan.unit("norm").output_dtype) == ("float32", "bfloat16")
    assert plan.parameter("norm.weight").gathered_bytes == 16 * 4
    assert "norm" not in [unit.name for unit in resolve(spec, model, Layout(), FP32, world_size=2).units]


def test_transformers_fp32_declarations_are_followed() -> None:
    model = tiny_model("llama", meta=True)
    model._keep_in_fp32_modules_strict = {"post_attention_layernorm"}
    model._keep_in_fp32_modules = {"norm"}
    assert spec_of(model).fp32 == ("model.layers.*.post_attention_layernorm",)
    assert set(spec_of(model, "float16").fp32) == {"model.layers.*.post_attention_layernorm", "model.norm"}


def test_an_explicit_reshard_wins_over_the_container_rule() -> None:
    model, spec = make("plain", meta=True)
    for wish in (True, False):
        plan = resolve(spec, model, Layout(), ParallelOptions(reshard_after_forward=wish), world_size=2)
        assert {unit.reshard_after_forward for unit in plan.units} == {wish}


def test_resharding_excludes_deferring() -> None:
    """One of the two would be dropped in silence."""
    model, spec = make("plain", meta=True)
    for sync in ({"sync": "defer"}, {"sync": "reduce_each", "sync_units": {"blocks.1": "defer"}}):
        (found,) = problems(spec, model, reshard_after_forward=True, **sync)
        assert found.startswith("reshard_after_forward=True and sync=defer")
        assert "legal with it are reshard_each and reduce_each" in found
    plan = resolve(spec, model, Layout(), ParallelOptions(reshard_after_forward=True), world_size=2)
    assert {unit.sync for unit in plan.units} == {SyncPolicy.REDUCE_EACH}


def test_resharding_replicas_is_refused() -> None:
    model, spec = make("plain", meta=True)
    with pytest.raises(PlanError, match="nothing is sharded"):
        resolve(spec, model, Layout(dp_replicate=2, dp_shard=1), ParallelOptions(reshard_after_forward=True))


def test_sync_policies_by_unit_and_by_budget() -> None:
    model, spec = make("plain", meta=True)
    options = ParallelOptions(microbatches=2, sync_units={"blocks.*": "reduce_each", "blocks.0": "reshard_each"})
    plan = resolve(spec, model, Layout(), options, world_size=2)
    assert [plan.unit(name).sync for name in ("", "blocks.0", "blocks.1")] == ["defer", "reshard_each", "reduce_each"]

    whole = totals(resolve(spec, model, Layout(), ParallelOptions(), world_size=2)).gathered_peak_bytes
    for budget, microbatches, expected in (
        (whole, 1, SyncPolicy.DEFER),
        (whole - 1, 1, SyncPolicy.REDUCE_EACH),
        (3 * whole, 2, SyncPolicy.DEFER),  # bf16 parameters and fp32 gradients
        (3 * whole - 1, 2, SyncPolicy.REDUCE_EACH),
    ):
        options = ParallelOptions(sync_budget=budget, microbatches=microbatches)
        plan = resolve(spec, model, Layout(), options, world_size=2)
        assert {unit.sync for unit in plan.units} == {expected}, budget


def test_frozen_parameters_have_no_gradient_and_no_optimizer_state() -> None:
    model, spec = make("plain", meta=True)
    plan = resolve(spec, model, Layout(), ParallelOptions(freeze=("blocks.**",)), world_size=2)
    assert {row.trainable for row in plan.parameters if row.name.startswith("blocks")} == {False}
    found = totals(plan)
    assert found.trainable == sum(row.numel for row in plan.parameters if not row.name.startswith("blocks"))
    assert found.traffic.reduce_scatters == 1


def test_illegal_options_are_refused_together() -> None:
    with pytest.raises(PlanError) as error:
        ParallelOptions(sync="sometimes", param_dtype="int8", microbatches=0)
    assert [line.split("=")[0] for line in error.value.problems] == ["param_dtype", "sync", "microbatches"]


def test_a_layout_without_world_size_must_be_resolved() -> None:
    model, spec = make("plain", meta=True)
    with pytest.raises(LayoutError, match="pass world_size"):
        resolve(spec, model, Layout())


def test_json_round_trip_and_diff() -> None:
    model, spec = make("plain", meta=True)
    plan = resolve(spec, model, Layout(dp_replicate=2), ParallelOptions(sync_units={"blocks.0": "defer"}), world_size=4)
    assert ShardingPlan.from_json(plan.to_json()) == plan
    assert plan.diff(plan) == []
    other = resolve(spec, model, Layout(), ParallelOptions(freeze=("norm.*",)), world_size=4)
    lines = [str(item) for item in plan.diff(other)]
    assert "layout: dp_shard 2 -> 4" in lines
    assert "parameter norm.weight: trainable True -> False" in lines
    deeper, _ = make("plain", meta=True, blocks=5)
    lines = [str(item) for item in plan.diff(resolve(spec, deeper, Layout(dp_replicate=2), plan.options, world_size=4))]
    assert "unit blocks.4: only in the second plan" in lines


def test_patterns() -> None:
    names = ["model.layers.0.mlp", "model.layers.11.mlp", "model.layers.0.mlp.up", "lm_head", ""]
    assert match_names("model.layers.*.mlp", names) == names[:2]
    assert match_names("model.**", names) == names[:3]
    assert match_names("", names) == [""]
    assert match_names("lm_*", names) == ["lm_head"]
    assert generalize("model.layers.11.mlp") == "model.layers.*.mlp"


def test_a_plain_spec_gives_five_units() -> None:
    model, _ = make("plain", meta=True)
    assert len(resolve(PLAIN_SPEC, model, Layout(), world_size=2).units) == 5


def moe(**config) -> tuple[ParallelSpec, nn.Module]:
    model = tiny_model("qwen3_moe", meta=True, **config)
    return spec_of(model), model


def test_experts_that_do_not_fit_are_the_first_to_go_without_deferring() -> None:
    spec, model = moe()
    everything = sum(parameter.numel() for parameter in model.parameters()) * 8  # gathered and reduced, in fp32
    experts = sum(parameter.numel() for name, parameter in model.named_parameters() if "experts" in name) * 8
    for budget, policies in (
        (everything, {SyncPolicy.DEFER}),
        (everything - experts, {SyncPolicy.DEFER, SyncPolicy.REDUCE_EACH}),
        (everything - experts - 1, {SyncPolicy.REDUCE_EACH}),
    ):
        options = ParallelOptions(param_dtype=None, microbatches=2, sync_budget=budget)
        plan = resolve(spec, model, Layout(), options, world_size=1)
        assert {unit.sync for unit in plan.units} == policies
        if len(policies) == 2:
            assert {unit.kind for unit in plan.units if unit.sync is SyncPolicy.REDUCE_EACH} == {"experts"}


def test_experts_fewer_than_shards_are_sharded_along_their_matrices() -> None:
    spec, model = moe(num_experts=4, moe_intermediate_size=32)
    plan = resolve(spec, model, Layout(), FP32, world_size=8)
    row = next(row for row in plan.parameters if row.name.endswith("gate_up_proj"))
    assert (dict(row.placements), row.local_shape) == ({"dp_shard": "Shard(1)"}, (4, 8, 32))
    assert row.gathered_bytes == row.numel * 4  # nothing is padded
    row = next(row for row in resolve(spec, model, Layout(), FP32, world_size=3).parameters if "gate_up" in row.name)
    assert (dict(row.placements), row.local_shape) == ({"dp_shard": "Shard(0)"}, (2, 64, 32))  # no dimension is even


def test_expert_parallel_that_cannot_be_is_refused_with_what_is_legal() -> None:
    spec, model = moe()
    with pytest.raises(LayoutError, match=r"ep=3: 8 experts cannot be divided by 3; legal are 1, 2, 4, 8"):
        resolve(spec, model, Layout(ep=3), world_size=6)
    with pytest.raises(
        PlanError, match=r"reduce_dtype=float16 with ep=2, gradient_reduction=mean.*legal are bfloat16 and float32"
    ):
        resolve(spec, model, Layout(ep=2), ParallelOptions(gradient_reduction="mean", reduce_dtype="float16"), world_size=2)
    options = ParallelOptions(tp_plan={"model.layers.*.mlp.experts": "moe_tp_experts"})
    with pytest.raises(
        PlanError, match=r"tp_plan: slices the experts 'model.layers.1.mlp.experts', but ep=2 distributes whole"
    ):
        resolve(spec, model, Layout(dp_shard=1, tp=2, ep=2), options, world_size=2)
    with refuses(PlanError, "ep.router"):
        resolve(replace(spec, experts=(ExpertsRule("model.layers.*.mlp.experts", "gate"),)), model, Layout(), world_size=2)
    with pytest.raises(PlanError, match=r"experts 'model.layers.0.mlp': the first dimension"):
        resolve(replace(spec, experts=(ExpertsRule("model.layers.0.mlp"),)), model, Layout(), world_size=2)
    with refuses(PlanError, "ep.dense"):
        resolve(replace(spec, experts=()), model, Layout(ep=2), world_size=2)


def test_a_unit_of_tied_modules_cannot_be_left_out() -> None:
    model, _ = make("plain", meta=True)
    model.blocks[1][0] = copy.deepcopy(model.blocks[0][0])
    model.blocks[1][0].weight, model.blocks[1][0].bias = model.blocks[0][0].weight, model.blocks[0][0].bias
    spec = ParallelSpec("plain", layers=("blocks.*",))
    plan = resolve(spec, model, Layout(dp_shard=2), ParallelOptions())
    assert plan.unit("blocks.1.0").part_of == "blocks.0.0"
    for name in ("blocks.0.0", "blocks.1.0"):
        (found,) = problems(spec, model, exclude_units=(name,))
        assert found == f"exclude_units: {name!r} has the parameters of another module, so one unit must hold both"


def test_a_list_is_no_layer_and_a_plan_without_layers_says_so() -> None:
    model, _ = make("plain", meta=True)
    (found,) = problems(ParallelSpec("plain", layers=("blocks",)), model)
    assert (
        found
        == "layers pattern 'blocks' matches 'blocks', a ModuleList, which is not called itself; its entries are 'blocks.*'"
    )
    plan = resolve(ParallelSpec("plain", layers=()), model, Layout(dp_shard=2), ParallelOptions())
    assert plan.remarks == ("layers: none; what no other unit has is one unit, gathered as a whole",)


def test_a_tied_weight_is_frozen_by_either_of_its_names() -> None:
    model, _ = make("plain", meta=True)
    model.head.weight = model.embed.weight
    for name in ("embed.weight", "head.weight"):
        plan = resolve(ParallelSpec("plain", layers=("blocks.*",)), model, Layout(dp_shard=2), ParallelOptions(freeze=(name,)))
        assert not plan.parameter("head.weight").trainable


def test_problems_that_differ_in_numbers_alone_are_one_line() -> None:
    model, _ = make("plain", meta=True)
    for block in model.blocks:
        block[0].weight = nn.Parameter(torch.zeros((), device="meta"))
    (found,) = problems(ParallelSpec("plain", layers=("blocks.*",)), model)
    assert found.startswith("parameter 'blocks.0.0.weight' is a scalar")
    assert found.endswith(f"(and {len(model.blocks) - 1} more like it)")

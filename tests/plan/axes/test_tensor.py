"""Whose tensor parallel styles are taken, and what of a given plan is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.models.specs.registry import spec_of
from meshwright.plan.axes.tensor.move_kinds import Move
from meshwright.plan.axes.tensor.styles import STYLES
from meshwright.plan.given.inspection import inspect_model
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.given.sliced_code import mixes_features
from meshwright.plan.given.spec import ParallelSpec
from meshwright.plan.resolver import resolve
from meshwright.plan.result.sharding_plan import ShardingPlan
from tests.tiny import make

TP2 = Layout(tp=2, dp_shard=1)
MLP_ONLY = {
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}
TORCH = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "model.norm": SequenceParallel(),
    "model.layers.*.input_layernorm": SequenceParallel(),
    "model.layers.*.self_attn.q_proj": ColwiseParallel(),
    "model.layers.*.self_attn.k_proj": ColwiseParallel(),
    "model.layers.*.self_attn.v_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(input_layouts=Shard(1)),
    "model.layers.*.mlp.up_proj": ColwiseParallel(input_layouts=Shard(1)),
    "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}


def plan_as_function() -> dict[str, Any]:
    return MLP_ONLY


NOT_A_PLAN = 7


def planned(family: str = "llama", **options: Any) -> ShardingPlan:
    model, spec = make(family, meta=True)
    return resolve(spec, model, TP2, ParallelOptions(**options))


def refused(**options: Any) -> str:
    with pytest.raises(PlanError) as error:
        planned(**options)
    return str(error.value)


def styles(plan: ShardingPlan) -> dict[str, str]:
    return {row.module: row.style for row in plan.tensor_parallel if row.style != "region"}


@pytest.mark.parametrize(
    "given", [MLP_ONLY, f"{__name__}.MLP_ONLY", f"{__name__}.plan_as_function"], ids=["dict", "path", "function"]
)
def test_a_given_plan_wins(given: Any) -> None:
    plan = planned(tp_plan=given)
    assert plan.tp_level == "given"
    assert plan.tp_passed_over == ()
    assert styles(plan) == {name.replace("*", layer): style for layer in "01" for name, style in MLP_ONLY.items()}
    assert ShardingPlan.from_json(plan.to_json()) == plan


def test_then_the_family_then_the_model_and_why_is_in_the_plan() -> None:
    assert planned("phi3").tp_level == "family"
    assert planned("phi3").tp_passed_over == (("given", "no tp_plan is set"),)
    assert planned("llama").tp_level == "model"
    assert planned("llama").tp_passed_over[1] == ("family", "none is written for LlamaForCausalLM")


def test_a_model_that_declares_nothing_gets_the_styles_of_its_trace() -> None:
    for family in ("llama", "qwen3"):
        model, spec = make(family, meta=True)
        derived, declared = resolve(replace(spec, tp_styles={}), model, TP2, ParallelOptions()), planned(family)
        assert (derived.tp_level, [level for level, _ in derived.tp_passed_over]) == ("derived", ["given", "family", "model"])
        in_layers = [{name: style for name, style in styles(plan).items() if "layers" in name} for plan in (derived, declared)]
        assert in_layers[0] == in_layers[1]
    assert in_layers[0]["model.layers.0.self_attn.q_norm"] == "replicated_with_grad_allreduce"
    mine = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(4, 4)])})
    with pytest.raises(PlanError, match=r"derived: the model is not traced \(traces .*; the legal value of tp is 1"):
        resolve(ParallelSpec("mine", layers=("blocks.*",)), mine, TP2, ParallelOptions())


def test_styles_of_torch_mean_what_they_mean_there() -> None:
    from_torch = planned(tp_plan=TORCH, sequence_parallel=True, loss_parallel=True)
    ours = planned(sequence_parallel=True, loss_parallel=True)
    assert [(row.module, row.entry, row.exit, row.sums) for row in from_torch.tensor_parallel] == [
        (row.module, row.entry, row.exit, row.sums) for row in ours.tensor_parallel
    ]
    assert from_torch.parameters[0].placements == ours.parameters[0].placements


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"model.layers.*.mlp.gate": "colwise"}, r"tp_plan pattern 'model.layers.\*.mlp.gate' matches no parameter"),
        ({"lm_head": "columns"}, "the style 'columns' of 'lm_head' is not supported; legal are colwise"),
        (
            {"model.norm": "sequence_parallel"},
            r"tp_plan\['model.norm'\]: the style refers to a sharded sequence; set sequence_parallel=True",
        ),
        (
            {"lm_head": ColwiseParallel(input_layouts=Shard(1))},
            "the style refers to a sharded sequence; set sequence_parallel=True",
        ),
        (
            {"lm_head": PrepareModuleInput(input_layouts=Shard(2), desired_input_layouts=Replicate())},
            "is not supported; legal",
        ),
        ({"lm_head": ColwiseParallel(input_layouts=Shard(0))}, "is not supported; legal are names of styles"),
        ({}, "is dict; legal is a dict of module patterns"),
        ("no.such.module", "tp_plan='no.such.module': cannot be imported.*no such module"),
        (f"{__name__}.NOTHING", "has no NOTHING.*legal is the import path of a dict or of a function"),
        (f"{__name__}.NOT_A_PLAN", "is int; legal is a dict of module patterns to styles, the import path of such a dict"),
    ],
    ids=str,
)
def test_a_given_plan_that_is_wrong_is_refused(given: Any, expected: str) -> None:
    with pytest.raises(PlanError, match=expected):
        planned(tp_plan=given)


def test_a_norm_that_is_not_on_the_residual_stream_cannot_be_sequence_parallel() -> None:
    text = refused(tp_plan={**MLP_ONLY, "model.layers.*.self_attn.o_proj": "sequence_parallel"}, sequence_parallel=True)
    assert "'model.layers.0.self_attn.o_proj' has the style sequence_parallel, but is not on the residual stream" in text


def test_regions_whose_matrices_are_not_all_given_compute_whole() -> None:
    """Attention is not in the plan: every rank computes it, from and to its part of the sequence."""
    rows = {row.module: row for row in planned(tp_plan=MLP_ONLY, sequence_parallel=True).tensor_parallel}
    attention, mlp = rows["model.layers.0.self_attn"], rows["model.layers.0.mlp"]
    assert (attention.entry, attention.exit) == ("gather_sequence_whole", "split_sequence")
    assert (mlp.entry, mlp.exit) == ("gather_sequence", "none")
    assert rows["model.layers.0.mlp.down_proj"].exit == "scatter_sequence"
    assert rows["model.norm"].exit == "gather_sequence_whole"
    assert "lm_head" not in rows


def test_every_style_of_transformers_is_carried_out_or_refused_by_its_name() -> None:
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    known = STYLES.keys() | {"sequence_parallel"}
    assert len(known & set(ALL_PARALLEL_STYLES)) >= 10
    for style in set(ALL_PARALLEL_STYLES) - known:
        text = refused(tp_plan={"model.layers.*.mlp.up_proj": style})
        assert f"the style {style!r} of 'model.layers.*.mlp.up_proj' is not supported; legal are colwise, " in text


ATTENTION = {f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"} | {
    "model.layers.*.self_attn.o_proj": "rowwise"
}
EXPERTS = {
    "model.layers.*.mlp.experts": "moe_tp_experts",
    "model.layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "model.layers.*.mlp.experts.down_proj": "rowwise",
}


UNSOUND = {
    "q alone": (
        "llama", {"model.layers.*.self_attn.q_proj": "colwise"}, "q_proj' has the style colwise, so its output stays sliced",
    ),
    "gate without up": (
        "llama", {"model.layers.*.mlp.gate_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"},
        "up_proj.weight' has no style, but 'model.layers.*.mlp' is split over tp",
    ),
    "a parameter alone": (
        "llama", {"model.layers.*.mlp.gate_proj.weight": "colwise"},
        "is sliced (colwise), but 'model.layers.0.mlp.gate_proj' has no style to compute",
    ),
    "a norm of whole states": (
        "llama", {**MLP_ONLY, "model.norm": "replicated_with_grad_allreduce"},
        "'model.norm' has the style replicated_with_grad_allreduce, but no module beside it is sliced",
    ),
    "packed, and is not": (
        "llama", {**MLP_ONLY, "model.layers.*.mlp.up_proj": "packed_colwise"},
        "has the style packed_colwise, but the model declares colwise",
    ),
    "norms of queries forgotten": (
        "qwen3", ATTENTION, "q_norm.weight' has no style, but 'model.layers.*.self_attn' is split over tp; legal are repl",
    ),
    "norms of queries replicated": (
        "qwen3", {**ATTENTION, "model.layers.*.self_attn.*_norm": "replicate"},
        "has the style replicate, but computes with slices",
    ),
    "sinks forgotten": ("gpt_oss", ATTENTION, "sinks' has no style"),
    "not packed, and is": (
        "phi3", {"model.layers.*.mlp.gate_up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"},
        "has the style colwise, but the model declares packed_colwise",
    ),
    "experts whole": (
        "mixtral", {"model.layers.*.mlp.experts": "moe_tp_experts"},
        "gate_up_proj' is not sliced, but the ranks of tp sum the outputs of 'model.layers.0.mlp.experts'",
    ),
    "shared experts whole": (
        "deepseek_v3", EXPERTS, "shared_experts.gate_proj.weight' is beside experts whose outputs are summed over tp",
    ),
    "one name of a tied one": (
        "qwen2", {"model.embed_tokens": "embedding_rowwise"}, "'lm_head.weight' (tied to 'model.embed_tokens.weight')",
    ),
    "tied, sliced both ways": (
        "qwen2", {"model.embed_tokens": "embedding_colwise", "lm_head": "colwise_rep"},
        "modules that share a parameter need styles that slice the same dimension",
    ),
    "heads that the attention counts": (
        "opt",
        {
            **{f"model.decoder.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
            "model.decoder.layers.*.self_attn.out_proj": "rowwise",
        },
        "v_proj' has the style colwise, but 'model.decoder.layers.*.self_attn' uses num_heads of the whole model",
    ),
    "a statistic over features": (
        "gemma3n_text", MLP_ONLY, "'model.layers.*.mlp' is sliced over features, but its code takes their mean",
    ),
}  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("family", "given", "expected"), UNSOUND.values(), ids=UNSOUND)
def test_styles_that_would_give_wrong_gradients_are_refused(family: str, given: Any, expected: str) -> None:
    """Each ran without an error, or failed only after the start, before there were these checks."""
    model, spec = make(family, meta=True)
    with pytest.raises(PlanError) as error:
        resolve(spec, model, TP2, ParallelOptions(tp_plan=given))
    assert expected in str(error.value)


def test_declared_styles_of_an_attention_that_counts_heads_are_refused() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n_heads = 4
            for name in "qkvo":
                setattr(self, f"{name}_proj", nn.Linear(8, 8))

        def forward(self, x: Any) -> Any:
            return [getattr(self, f"{name}_proj")(x).view(*x.shape[:-1], self.n_heads, -1) for name in "qkv"]

    layer = nn.ModuleDict({"self_attn": Attention()})
    layer["mlp"] = nn.ModuleDict({f"{name}_proj": nn.Linear(8, 8) for name in ("gate", "up", "down")})
    model = nn.ModuleDict({"layers": nn.ModuleList([layer])})
    declared = {f"layers.*.self_attn.{name}_proj": "rowwise" if name == "o" else "colwise" for name in "qkvo"}
    with pytest.raises(PlanError, match=r"self_attn.*uses n_heads of the whole model"):
        resolve(ParallelSpec("mine", layers=("layers.*",), tp_styles=declared), model, TP2, ParallelOptions())


def test_an_mlp_that_takes_a_statistic_over_its_features_is_whole_where_the_model_declares_it_sliced() -> None:
    """transformers declares Gemma 3n's so, and gradients were off by 1.7."""
    model, spec = make("gemma3n_text", meta=True)
    assert spec.tp_styles["model.layers.*.mlp.gate_proj"] == "colwise"
    plan = resolve(spec, model, TP2, ParallelOptions())
    assert plan.tp_passed_over[-1] == ("model.layers.*.mlp", "takes the mean of its features")
    styles = {row.name: row.tp_style for row in plan.parameters}
    assert styles["model.layers.0.mlp.down_proj.weight"] is None
    assert styles["model.layers.0.self_attn.o_proj.weight"] == "rowwise"
    assert not any(".mlp" in row.module for row in plan.tensor_parallel)


class Normalized(nn.Module):
    """Between its two matrices stands a child that has no parameters."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.up, self.between, self.down = nn.Linear(8, 8), child, nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return self.down(self.between(self.up(x)))


def test_a_norm_with_parameters_has_a_style_of_its_own() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            return self.down(self.up(self.norm(x)))

    assert mixes_features(inspect_model(ParallelSpec("inner", ()), Inner()), "") == ""


@pytest.mark.parametrize(
    ("child", "whole"), [(nn.GELU(), False), (nn.Softmax(-1), True), (nn.LayerNorm(8, elementwise_affine=False), True)]
)
def test_a_child_without_parameters_may_take_the_statistic(child: nn.Module, whole: bool) -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"mlp": Normalized(child)})])})
    styles = {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}
    plan = resolve(ParallelSpec("mine", layers=("blocks.*",), tp_styles=styles), model, TP2, ParallelOptions())
    assert (plan.parameter("blocks.0.mlp.up.weight").tp_style is None) is whole


def test_gemma_4_whose_global_layers_have_heads_of_their_own() -> None:
    model, spec = make("gemma4_text", meta=True, num_global_key_value_heads=1, attention_k_eq_v=True)
    with pytest.raises(PlanError, match="tp=2: 1 key/value head of a layer cannot be divided by 2; legal is 1"):
        resolve(spec, model, TP2, ParallelOptions())


def test_subclasses_have_the_structure_of_their_family() -> None:
    model, _ = make("phi3", meta=True)
    model.__class__ = type("MyPhi", (type(model),), {})
    assert resolve(spec_of(model), model, TP2, ParallelOptions(sequence_parallel=True)).tp_level == "family"


def test_biases_of_packed_matrices_are_packed_too_and_refused_where_fsdp_would_shard_them() -> None:
    block = {"mlp": nn.ModuleDict({"gate_up": nn.Linear(8, 8), "down": nn.Linear(4, 8)})}
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict(block)])})
    styles = {"blocks.*.mlp.gate_up": "packed_colwise", "blocks.*.mlp.down": "rowwise"}
    spec = ParallelSpec("mine", layers=("blocks.*",), tp_styles=styles)
    row = resolve(spec, model, TP2, ParallelOptions()).parameter("blocks.0.mlp.gate_up.bias")
    assert (row.placements, row.local_shape) == ((("tp", "StridedShard(0, 2)"),), (4,))
    with pytest.raises(
        PlanError, match=r"gate_up.bias' packs matrices along its rows, which tp slices, so FSDP can shard no other"
    ):
        resolve(spec, model, Layout(tp=2, dp_shard=2), ParallelOptions())


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(4, 16, 6))
        self.down_proj = nn.Parameter(torch.empty(4, 6, 8))

    def forward(self, x: Any) -> Any:
        gate, up = (x @ self.gate_up_proj.mT).chunk(2, dim=-1)
        return (gate * up) @ self.down_proj.mT


class SharedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.empty(2, 8, 6))
        self.down_proj = nn.Parameter(torch.empty(2, 6, 8))

    def forward(self, x: Any, gammas: Any) -> Any:
        return ((x @ self.up_proj.mT) * gammas @ self.down_proj.mT).sum(0)


def test_declared_styles_of_experts_are_carried_out_as_their_code_computes() -> None:
    """Inkling declares the two matrices of its experts as one, and that its shared experts sum what they put out."""
    moe = nn.ModuleDict({"experts": Experts(), "shared": SharedExperts()})
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"moe": moe})])})
    declared = {
        "layers.*.moe.experts.gate_up_proj": "colwise",
        "layers.*.moe.experts.down_proj": "rowwise",
        "layers.*.moe.experts": "moe_tp_experts",
        "layers.*.moe.shared.up_proj": "colwise",
        "layers.*.moe.shared.down_proj": "rowwise",
        "layers.*.moe.shared": "all_reduce",
    }
    plan = resolve(ParallelSpec("mine", layers=("layers.*",), tp_styles=declared), model, TP2, ParallelOptions())
    own = {row.name.partition(".moe.")[2]: row.tp_style for row in plan.parameters}
    assert own == {
        "experts.gate_up_proj": "packed_colwise",
        "experts.down_proj": "rowwise",
        "shared.up_proj": "colwise",
        "shared.down_proj": "rowwise",
    }
    rows = {row.module.rpartition(".")[2]: (row.entry, row.exit) for row in plan.tensor_parallel}
    assert rows == dict.fromkeys(("experts", "shared"), (Move.ENTER, Move.LEAVE))
    del declared["layers.*.moe.shared.down_proj"]  # then its sum would be of whole outputs
    with pytest.raises(PlanError, match=r"the style 'all_reduce' of .*shared' is not supported"):
        resolve(ParallelSpec("mine", layers=("layers.*",), tp_styles=declared), model, TP2, ParallelOptions())

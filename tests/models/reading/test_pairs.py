"""Pairs of matrices, and regions of layers, that a trace finds: what can be sliced is, and what cannot is named."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from maintain.default_configs import MISSING_DEFAULTS, model_types
from maintain.tiny import HEADS
from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.models.reading.module_runs import count_runs
from meshwright.models.reading.tensor.pairs import trace_pairs
from meshwright.models.reading.tensor.regions import trace_regions
from meshwright.models.specs.registry import spec_of
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.given.sliceable_pairs import Pair
from meshwright.plan.resolver import resolve
from meshwright.plan.result.program import Assign
from meshwright.plan.result.sharding_plan import ShardingPlan
from tests.tiny import tiny_model

LAYERS = ["model.layers.0", "model.layers.1"]


class Changed(nn.Module):
    """The MLP of a Llama with something between its matrices, or around them."""

    def __init__(self, inner: nn.Module, between: object, around: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = inner.gate_proj, inner.up_proj, inner.down_proj
        self.scale = nn.Parameter(torch.ones(1, device="meta"))
        self.between, self.around = between, around

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden)
        output = self.down_proj(self.between(self, inner))
        return output + hidden if self.around else output


def changed(between: object, around: bool = False, **sizes: int) -> LlamaForCausalLM:
    model = tiny_model("llama", meta=True, **sizes)
    for layer in model.model.layers:
        layer.mlp = Changed(layer.mlp, between, around)
    return model


def test_the_pairs_of_a_llama() -> None:
    model = tiny_model("llama", meta=True)
    found = []
    for layer in LAYERS:
        inputs = tuple(f"{layer}.self_attn.{name}_proj" for name in "kqv")
        found.append(Pair(inputs, f"{layer}.self_attn.o_proj", model.config.num_key_value_heads))
        gated = (f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj")
        found.append(Pair(gated, f"{layer}.mlp.down_proj", model.config.intermediate_size))
    assert trace_pairs(model, LAYERS).found == tuple(found)


def test_norms_of_each_head_stand_beside_their_pair() -> None:
    """Each rank has a part of their gradients. What they do to anything else would have all of it, and be summed too."""
    model = tiny_model("qwen3", meta=True)
    (attention,) = [pair for pair in trace_pairs(model, LAYERS).found if pair.second == f"{LAYERS[0]}.self_attn.o_proj"]
    norms = tuple(f"{LAYERS[0]}.self_attn.{name}_norm.weight" for name in "kq")
    assert attention.beside == norms
    inner = model.model.layers[0].self_attn
    before = inner.forward

    def forward(hidden_states: torch.Tensor, *args: object, **kwargs: object) -> object:
        width = inner.q_norm.weight.shape[0]
        return before(hidden_states + inner.q_norm.weight.repeat(hidden_states.shape[-1] // width), *args, **kwargs)

    inner.forward = forward
    assert [pair.second for pair in trace_pairs(model, LAYERS).found if "self_attn" in pair.second] == [
        f"{LAYERS[1]}.self_attn.o_proj"
    ]


def test_norms_that_a_model_has_under_one_of_its_settings_are_sliced_with_their_attention() -> None:
    sizes = {**HEADS, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
             "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "use_qk_norm": True}  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("glm4_moe", **sizes))
    model.config.use_cache = False
    for sequence_parallel in (False, True):
        options = ParallelOptions(param_dtype=None, sequence_parallel=sequence_parallel)
        plan = resolve(spec_of(model), model, Layout(tp=2, dp_shard=1), options)
        assert plan.tp_level == "model"
        rows = {row.module: row for row in plan.tensor_parallel}
        for name in "kq":
            row = rows[f"model.layers.1.self_attn.{name}_norm"]
            assert (row.style, row.sums) == ("replicated_with_grad_allreduce", ("weight",))


class Attention(nn.Module):
    """The attention of a Llama, which counts its heads, with something that changes the scores or the output."""

    def __init__(
        self,
        inner: nn.Module,
        change: Callable[["Attention", torch.Tensor], torch.Tensor],
        before: Callable[["Attention", torch.Tensor], torch.Tensor] = lambda _, hidden: hidden,
    ) -> None:
        super().__init__()
        self.before = before
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = inner.q_proj, inner.k_proj, inner.v_proj, inner.o_proj
        self.num_heads, self.head_dim, self.change = 4, inner.head_dim, change
        self.slopes = nn.Parameter(torch.ones(4, 1, 1, device="meta"))
        self.scale = nn.Parameter(torch.ones(1, device="meta"))

    def forward(self, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        hidden_states = self.before(self, hidden_states)
        rows, length, _ = hidden_states.shape
        shape = (rows, length, self.num_heads, self.head_dim)
        query, value = (projection(hidden_states).view(shape).transpose(1, 2) for projection in (self.q_proj, self.v_proj))
        key = self.k_proj(hidden_states).view(rows, length, -1, self.head_dim).transpose(1, 2)
        scores = self.change(self, query @ key.transpose(2, 3)).softmax(-1)
        output = (scores @ value).transpose(1, 2)
        return self.o_proj(output.reshape(rows, length, self.num_heads * self.head_dim)), None


CHANGES: list[tuple[Callable[[Attention, torch.Tensor], torch.Tensor], bool]] = [
    (lambda module, scores: scores / 8.0, True),
    (lambda module, scores: scores / module.head_dim**0.5, True),
    (lambda module, scores: scores / module.num_heads, False),  # a rank has another number
    (lambda module, scores: scores / torch.full([], module.num_heads**0.5, device="meta"), False),
    (lambda module, scores: scores / torch.tensor(module.num_heads, device="meta"), False),
    (lambda module, scores: scores / torch.ones(module.num_heads, device="meta").sum(), False),
    (lambda module, scores: scores + module.slopes, False),  # of all heads
    (lambda module, scores: scores + torch.arange(4, device="meta").view(4, 1, 1), False),
    (lambda module, scores: scores * module.scale, False),  # every head has a part of its gradient
    (lambda module, scores: scores.softmax(1), False),
    (lambda module, scores: scores - scores.mean(1, keepdim=True), False),
    (lambda module, scores: scores.flip(1), False),
    (lambda module, scores: scores.masked_fill(torch.ones(scores.shape[-2:], device="meta").triu(1).bool(), -1e9), True),
    (lambda module, scores: scores.transpose(1, 2).contiguous().transpose(1, 2), True),
    (lambda module, scores: scores.reshape(-1, *scores.shape[2:]).view(scores.shape), True),
    (lambda module, scores: torch.stack([scores, scores]).sum(0), True),
    (lambda module, scores: torch.cat(scores.chunk(2, dim=1), dim=1), False),
    (lambda module, scores: scores.flatten(1, 2).view(scores.shape), True),
]


@pytest.mark.parametrize(("change", "sliced"), CHANGES)
def test_heads_are_followed(change: Callable[[Attention, torch.Tensor], torch.Tensor], sliced: bool) -> None:
    model = tiny_model("llama", meta=True, num_key_value_heads=4)
    for layer in model.model.layers:
        layer.self_attn = Attention(layer.self_attn, change)
    found = {pair.second: pair for pair in trace_pairs(model, LAYERS).found}
    assert {f"{layer}.mlp.down_proj" for layer in LAYERS} <= set(found)
    for layer in LAYERS:
        pair = found.get(f"{layer}.self_attn.o_proj")
        assert (pair is not None) is sliced
        assert pair is None or (pair.blocks, pair.counts) == (4, ((f"{layer}.self_attn", "num_heads", 4),))


def test_attributes_that_count_heads_keep_value_and_order() -> None:
    model = tiny_model("llama", meta=True, num_key_value_heads=4)
    for layer in model.model.layers:
        layer.self_attn = Attention(layer.self_attn, lambda _, scores: scores)
    before = {name: [*vars(module).items()] for name, module in model.named_modules()}
    assert any(pair.counts for pair in trace_pairs(model, LAYERS).found)
    assert {name: [*vars(module).items()] for name, module in model.named_modules()} == before


@pytest.mark.parametrize(
    "before",
    [
        lambda module, hidden: hidden / module.num_heads,
        lambda module, hidden: nn.functional.normalize(hidden.unflatten(-1, (module.num_heads, -1)), dim=-1).flatten(-2),
    ],
)
def test_a_count_that_code_on_whole_features_uses_is_not_replaced(
    before: Callable[[Attention, torch.Tensor], torch.Tensor],
) -> None:
    """The number of a rank's heads would change what every rank is to compute alike."""
    model = tiny_model("llama", meta=True, num_key_value_heads=4)
    for layer in model.model.layers:
        layer.self_attn = Attention(layer.self_attn, lambda _, scores: scores, before)
    assert not [pair for pair in trace_pairs(model, LAYERS).found if "self_attn" in pair.second]


@pytest.mark.parametrize(
    ("between", "sliced"),
    [
        (lambda module, inner: torch.tanh(inner) * 2.0, True),
        (lambda module, inner: inner.unflatten(-1, (2, -1)).flatten(-2), False),  # always in two parts
        (lambda module, inner: inner.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2), False),
        (lambda module, inner: torch.cat(inner.chunk(2, -1)[::-1], -1), False),
        (lambda module, inner: inner / inner.norm(dim=-1, keepdim=True), False),
        (lambda module, inner: inner - inner.mean(-1, keepdim=True), False),
        (lambda module, inner: inner.softmax(-1), False),
        (lambda module, inner: inner + torch.ones(inner.shape[-1], device="meta"), False),
        (lambda module, inner: inner * module.scale, False),
        (lambda module, inner: inner.flip(-1), False),
        (lambda module, inner: inner.sort(-1).values, False),
    ],
)
def test_what_mixes_features_is_no_pair(between: object, sliced: bool) -> None:
    found = {pair.second for pair in trace_pairs(changed(between), LAYERS).found}
    assert {name for name in found if "mlp" in name} == ({f"{layer}.mlp.down_proj" for layer in LAYERS} if sliced else set())


class Norm(nn.Module):
    """A norm over the features between the matrices of an MLP."""

    def __init__(self, width: int, compute: Callable[["Norm", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.compute = nn.Parameter(torch.ones(width, device="meta")), compute
        self.kept: torch.Tensor | None = None

    def forward(self, inner: torch.Tensor) -> torch.Tensor:
        return self.compute(self, inner)


def mean_of_squares(inner: torch.Tensor) -> torch.Tensor:
    return inner.pow(2).mean(-1, keepdim=True)


def keeping(norm: Norm, inner: torch.Tensor) -> torch.Tensor:
    norm.kept = mean_of_squares(inner)
    return norm.weight * inner * norm.kept


@pytest.mark.parametrize(
    ("compute", "means"),
    [
        (lambda norm, inner: norm.weight * (inner * torch.rsqrt(mean_of_squares(inner) + 1e-6)), 1),
        (lambda norm, inner: (1.0 + norm.weight.float()) * inner.double() * mean_of_squares(inner).rsqrt(), 1),
        (lambda norm, inner: (inner - inner.mean(-1, keepdim=True)) * mean_of_squares(inner) * norm.weight, 2),
        (lambda norm, inner: norm.weight * inner, 0),
        (lambda norm, inner: norm.weight * inner / inner.pow(2).sum(-1, keepdim=True), None),  # a sum grows with the ranks
        (lambda norm, inner: norm.weight * inner * inner.mean(1, keepdim=True), 0),  # of each feature alone
        (lambda norm, inner: norm.weight * inner * inner.mean((-1, -2), keepdim=True), None),
        (lambda norm, inner: norm.weight.flip(0) * inner * mean_of_squares(inner), None),
        (lambda norm, inner: norm.weight * inner * (mean_of_squares(inner) * norm.weight.sum()), None),
        (lambda norm, inner: inner * mean_of_squares(inner), None),  # nobody reads the parameter
        (lambda norm, inner: norm.weight * inner * mean_of_squares(inner).expand(inner.shape), None),
        (lambda norm, inner: mean_of_squares(inner).expand(inner.shape), None),
        (keeping, None),  # and another module adds what it keeps
    ],
)
def test_norms_that_take_means_alone_are_computed_on_slices(
    compute: Callable[[Norm, torch.Tensor], torch.Tensor], means: int | None
) -> None:
    model = changed(lambda module, inner: module.norm(inner) + (0.0 if module.norm.kept is None else module.norm.kept))
    for layer in model.model.layers:
        layer.mlp.norm = Norm(model.config.intermediate_size, compute)
    found = {pair.second: pair.norms for pair in trace_pairs(model, LAYERS).found}
    expected = {f"{layer}.mlp.down_proj": ((f"{layer}.mlp.norm", means),) for layer in LAYERS if means is not None}
    assert {second: norms for second, norms in found.items() if "mlp" in second} == expected


def test_a_narrow_pair_with_a_norm_stays_whole() -> None:
    for width, sliced in ((48, True), (16, False)):
        model = tiny_model("llama", meta=True)
        for layer in model.model.layers:
            layer.mlp = nn.Sequential(
                nn.Linear(model.config.hidden_size, width, device="meta"),
                Norm(width, lambda own, inner: own.weight * (inner * mean_of_squares(inner))),
                nn.Linear(width, model.config.hidden_size, device="meta"),
            )
        assert bool([pair for pair in trace_pairs(model, LAYERS).found if "mlp" in pair.second]) is sliced


def test_a_norm_that_runs_twice_or_is_that_of_two_layers_is_not_sliced() -> None:
    norm = Norm(
        tiny_model("llama", meta=True).config.intermediate_size,
        lambda own, inner: own.weight * (inner * mean_of_squares(inner)),
    )
    for between in (lambda module, inner: module.norm(module.norm(inner)), lambda module, inner: module.norm(inner)):
        model = changed(between)
        model.model.layers[0].mlp.norm = model.model.layers[1].mlp.norm = norm
        assert not [pair for pair in trace_pairs(model, LAYERS).found if "mlp" in pair.second]


NORM = "model.layers.*.mlp.norm"


@pytest.mark.parametrize(
    ("style", "problem"),
    [
        ({}, "the legal style is norm_of_features"),
        ({NORM: "norm_of_features"}, ""),
        ({NORM: "replicate"}, "the legal style is norm"),
    ],
)
def test_a_plan_of_ones_own_says_that_a_norm_is_sliced(style: dict[str, str], problem: str) -> None:
    model = changed(lambda module, inner: module.norm(inner))
    for layer in model.model.layers:
        layer.mlp.norm = Norm(model.config.intermediate_size, lambda own, inner: own.weight * (inner * mean_of_squares(inner)))
    pair = {f"model.layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")} | {
        "model.layers.*.mlp.down_proj": "rowwise"
    }

    def rows(styles: dict[str, str]) -> dict[str, str]:
        options = ParallelOptions(param_dtype=None, tp_plan=styles)
        plan = resolve(spec_of(model), model, Layout(tp=2, dp_shard=1), options)
        return {row.module: row.style for row in plan.tensor_parallel}

    scale = {"model.layers.*.mlp.scale": "replicate"}
    if problem:
        with pytest.raises(PlanError, match=problem):
            rows({**pair, **scale, **style})
    else:
        assert rows({**pair, **scale, **style})[f"{LAYERS[0]}.mlp.norm"] == "norm_of_features"
    with pytest.raises(PlanError, match="the legal style is replicate"):  # its features are whole
        rows({NORM: "norm_of_features", "model.layers.*.self_attn.q_proj": "colwise_gather_output"})


def test_a_norm_on_slices_of_other_widths_is_refused() -> None:
    model = changed(lambda module, inner: module.norm(inner), intermediate_size=45)
    for layer in model.model.layers:
        layer.mlp.norm = Norm(45, lambda own, inner: own.weight * (inner * mean_of_squares(inner)))
        del layer.mlp.scale
    options = ParallelOptions(param_dtype=None)  # the styles that Llama declares
    with pytest.raises(PlanError, match="takes means over slices of 45 features or heads, which tp must divide"):
        resolve(spec_of(model), model, Layout(tp=2, dp_shard=1), options)


@pytest.mark.parametrize(
    ("between", "operator"),
    [
        (lambda module, inner: inner - inner.mean(-1, keepdim=True), "aten.mean.dim"),
        (lambda module, inner: inner.softmax(-1), "aten._softmax.default"),
        (lambda module, inner: inner.cumsum(-1), "aten.cumsum.default"),
    ],
)
def test_declared_styles_that_cannot_be_right_are_refused_with_the_operator(between: object, operator: str) -> None:
    """The styles that Llama declares, for an MLP that they do not fit. The code of the module does not show its statistic."""
    model = changed(between)
    with pytest.raises(PlanError) as error:
        resolve(spec_of(model), model, Layout(tp=2, dp_shard=1), ParallelOptions(), world_size=2)
    wanted = f"'model.layers.0.mlp.gate_proj' has the style colwise, but {operator} mixes its features"
    assert any(wanted in problem for problem in error.value.problems)


def test_a_region_with_a_residual_inside_is_not_split() -> None:
    def same(module: nn.Module, inner: torch.Tensor) -> torch.Tensor:
        return inner

    found = trace_regions(changed(same), LAYERS)
    assert (found.problem, found.with_residual, found.tokenwise) == ("", (), ("model.norm",))
    assert found.regions == tuple(f"{layer}.{part}" for layer in LAYERS for part in ("self_attn", "mlp"))
    assert trace_regions(changed(same, around=True), LAYERS).with_residual == tuple(f"{layer}.mlp" for layer in LAYERS)


def test_what_mixes_tokens_on_the_stream_is_refused() -> None:
    model = tiny_model("llama", meta=True)
    norm = model.model.layers[1].input_layernorm
    norm.forward = lambda hidden: hidden.cumsum(1)
    assert "an operator mixes the tokens of a slice (aten.cumsum.default)" in trace_regions(model, LAYERS).problem


def test_how_often_modules_run() -> None:
    model = tiny_model("llama", meta=True)
    body = model.model
    inner = body.layers[1].forward
    body.layers[1].forward = lambda *args, **kwargs: inner(inner(*args, **kwargs), *args[1:], **kwargs)
    runs = count_runs(model)
    assert (runs["model.layers.0"], runs["model.layers.0.mlp"], runs["model.layers.1.mlp"]) == ((1, 1), (1, 1), (2, 2))
    gemma = AutoConfig.for_model("gemma3")
    with torch.device("meta"):
        runs = count_runs(AutoModelForCausalLM.from_config(gemma))
    assert (runs["model.vision_tower"], runs["model.language_model"]) == ((0, 0), (1, 1))


def derived(model_type: str, tp: int, **sizes: int) -> tuple[dict[str, str], ShardingPlan]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))
    plan = resolve(spec_of(model), model, Layout(tp=tp, dp_shard=1), ParallelOptions(), world_size=tp)
    assert plan.tp_level == "derived"
    return {row.module: row.style for row in plan.tensor_parallel}, plan


def test_styles_of_a_model_that_declares_none() -> None:
    """Its attention counts heads, so that a rank's gets the number of its own. What does not divide is computed whole."""
    vocabulary = {"transformer.wte": "embedding_rowwise", "lm_head": "colwise_gather_output"}
    mlp, attention = (
        {f"transformer.h.{layer}.{name}": style for layer in (0, 1) for name, style in styles}
        for styles in (
            [("mlp.fc_in", "colwise"), ("mlp.fc_out", "rowwise")],
            [(f"attn.{name}_proj", "rowwise" if name == "out" else "colwise") for name in ("q", "k", "v", "out")],
        )
    )
    sizes = {"n_layer": 2, "n_embd": 48, "rotary_dim": 8}
    styles, plan = derived("gptj", 2, n_head=4, **sizes)
    assert styles == vocabulary | mlp | attention
    counts = {action.module: action.values for action in plan.program if isinstance(action, Assign)}
    assert counts["transformer.h.1.attn"] == (("num_attention_heads", 2),)
    styles, _ = derived("gpt2", 2, n_layer=2, n_embd=48, n_head=4)
    assert {styles["transformer.h.0.mlp.c_fc"], styles["transformer.h.1.mlp.c_proj"]} == {
        "colwise_transposed", "rowwise_transposed",
    }  # fmt: skip


def test_a_model_without_pairs_has_no_styles() -> None:
    with torch.device("meta"):
        sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba2", **sizes))
    with pytest.raises(
        PlanError, match="derived: no linear layer puts out features that enter another one without being mixed"
    ):
        resolve(spec_of(model), model, Layout(tp=2, dp_shard=1), ParallelOptions(), world_size=2)


@pytest.mark.thorough
def test_an_embedding_that_another_module_reads_is_whole() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma4"))
    name = "model.language_model.embed_tokens"
    plan = resolve(spec_of(model), model, Layout(tp=2, dp_shard=1), ParallelOptions(), world_size=2)
    assert dict(plan.tp_passed_over)[name] == "another module reads its matrix"
    assert plan.parameter(f"{name}.weight").tp_style is None
    given = ParallelOptions(tp_plan={name: "embedding_rowwise", "lm_head": "colwise_gather_output"})
    with pytest.raises(PlanError, match="embed_tokens' is sliced, but another module reads its matrix; leave it out"):
        resolve(spec_of(model), model, Layout(tp=2, dp_shard=1), given, world_size=2)


def test_the_odd_ones_are_model_types() -> None:
    assert set(MISSING_DEFAULTS) <= set(model_types())


def test_a_matrix_that_is_stored_transposed_has_styles_of_its_own() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=2, n_embd=32, n_head=4))
    for styles, wanted in (
        (
            {"transformer.h.*.mlp.c_fc": "colwise", "transformer.h.*.mlp.c_proj": "rowwise"},
            r"its weight is \[in, out\]; legal are",
        ),
        ({"transformer.h.*.mlp.c_fc": "colwise_gather_output"}, r"its weight is \[in, out\]; legal are colwise_transposed"),
        ({"lm_head": "colwise_transposed"}, r"its weight is \[out, in\]; legal are colwise"),
    ):
        with pytest.raises(PlanError, match=wanted):
            resolve(spec_of(model), model, Layout(tp=2, dp_shard=1), ParallelOptions(tp_plan=styles), world_size=2)


def test_a_trace_draws_the_same_numbers_each_time_and_leaves_the_generator() -> None:
    """Some models draw on the host whether a layer is left out. A second trace tries what the first one found."""
    model = tiny_model("llama")
    drawn: list[float] = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: drawn.append(float(torch.rand((), device="cpu"))))
    before = torch.get_rng_state()
    trace_pairs(model, [f"model.layers.{index}" for index in range(len(model.model.layers))])
    assert len(drawn) > 1
    assert len(set(drawn)) == 1
    assert torch.equal(torch.get_rng_state(), before)


def test_matrices_that_layers_share_are_sliced_if_all_of_these_layers_can() -> None:
    """The MLP of Zamba's layers is one; where one of two layers mixes the features of its own, neither is a pair."""
    for mixed in (False, True):
        model = tiny_model("llama", meta=True)
        first, second = (layer.mlp for layer in model.model.layers)
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(second, name).weight = getattr(first, name).weight
        if mixed:
            model.model.layers[1].mlp = Changed(second, lambda module, inner: inner.cumsum(-1))
        seconds = {pair.second for pair in trace_pairs(model, LAYERS).found}
        assert seconds == {
            f"{layer}.{part}" for layer in LAYERS for part in ("self_attn.o_proj", *(() if mixed else ("mlp.down_proj",)))
        }


def test_a_declared_plan_that_leaves_a_parameter_out_gives_way_to_the_trace() -> None:
    """Doge's attention has a vector of one value for each head, to which its declared plan gives no style."""

    class Scaled(LlamaAttention):
        def __init__(self, inner: LlamaAttention) -> None:
            super().__init__(inner.config, inner.layer_idx)
            self.scale = nn.Parameter(torch.ones(inner.config.num_attention_heads * inner.head_dim))

        def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> object:
            output, weights = super().forward(hidden_states, *args, **kwargs)
            return output * self.scale[0], weights

    model = tiny_model("llama", meta=True)
    model.__class__ = type("OddForCausalLM", (LlamaForCausalLM,), {})
    with torch.device("meta"):
        for layer in model.model.layers:
            layer.self_attn = Scaled(layer.self_attn)
    spec = replace(spec_of(model), structure=None)
    plan = resolve(spec, model, Layout(tp=2, dp_shard=1), ParallelOptions(), world_size=2)
    assert plan.tp_level == "derived"
    level, why = plan.tp_passed_over[-1]
    assert level == "model"
    assert why.startswith("its plan cannot be carried out: 'model.layers.*.self_attn.scale' has no style")
    sliced = {row.module for row in plan.tensor_parallel if row.style == "rowwise"}
    assert sliced == {f"{layer}.{part}" for layer in LAYERS for part in ("self_attn.o_proj", "mlp.down_proj")}


class NormedEmbedding(nn.Embedding):
    def __init__(self, inner: nn.Embedding) -> None:
        super().__init__(inner.num_embeddings, inner.embedding_dim)
        self.norm = nn.LayerNorm(inner.embedding_dim)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(input))


def test_an_embedding_with_a_norm_inside_is_whole() -> None:
    """Each rank would take the norm of its partial sums."""
    model = tiny_model("llama", meta=True)
    with torch.device("meta"):
        model.model.embed_tokens = NormedEmbedding(model.model.embed_tokens)
    plan = resolve(spec_of(model), model, Layout(tp=2, dp_shard=1), ParallelOptions(), world_size=2)
    assert ("model.embed_tokens", "'model.embed_tokens.norm' in it computes with its rows") in plan.tp_passed_over
    assert not any("embed_tokens" in row.module for row in plan.tensor_parallel)


class OwnLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input @ self.weight.T


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) / self.out_features


def test_a_class_of_its_own_that_computes_like_a_linear_layer_is_one() -> None:
    """Falcon's is. One that reads its number of features is not, which a rank would get wrong."""
    for kind, sliced in ((OwnLinear, True), (Doubled, False)):
        model = tiny_model("llama", meta=True)
        for layer in model.model.layers:
            for name in ("gate_proj", "up_proj", "down_proj"):
                getattr(layer.mlp, name).__class__ = kind
        found = {pair.second for pair in trace_pairs(model, LAYERS).found if "mlp" in pair.second}
        assert found == ({f"{layer}.mlp.down_proj" for layer in LAYERS} if sliced else set())


def test_heads_that_tp_does_not_divide_are_computed_whole_where_a_trace_says_what_is_sliced() -> None:
    """Falcon has 71 heads. Whoever gives a plan of their own means the heads, too."""
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "gpt_neox", hidden_size=24, num_attention_heads=3, intermediate_size=32, num_hidden_layers=2, vocab_size=64
        )
    )
    spec = replace(spec_of(model), tp_styles={}, structure=None)
    plan = resolve(spec, model, Layout(tp=2, dp_shard=1), ParallelOptions(), world_size=2)
    assert plan.tp_level == "derived"
    assert {row.module.rpartition(".")[2] for row in plan.tensor_parallel if row.style == "rowwise"} == {"dense_4h_to_h"}
    given = {"gpt_neox.layers.*.mlp.dense_h_to_4h": "colwise", "gpt_neox.layers.*.mlp.dense_4h_to_h": "rowwise"}
    with pytest.raises(PlanError, match="3 attention heads cannot be divided by 2"):
        resolve(spec, model, Layout(tp=2, dp_shard=1), ParallelOptions(tp_plan=given), world_size=2)

"""Pairs of matrices, and regions of layers, that a trace finds: what can be sliced is, and what cannot is named."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.models.defaults import ODD, model_types
from meshwright.models.pairs import trace_pairs
from meshwright.models.regions import trace_regions
from meshwright.models.registry import spec_of
from meshwright.models.tracing import count_runs
from meshwright.plan.options import ParallelOptions
from meshwright.plan.resolver import resolve
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


def changed(between: object, around: bool = False) -> LlamaForCausalLM:
    model = tiny_model("llama", meta=True)
    for layer in model.model.layers:
        layer.mlp = Changed(layer.mlp, between, around)
    return model


def test_the_pairs_of_a_gated_mlp() -> None:
    model = tiny_model("llama", meta=True)
    assert trace_pairs(model, LAYERS).found == tuple(
        ((f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj") for layer in LAYERS
    )


@pytest.mark.parametrize(
    ("between", "sliced"),
    [
        (lambda module, inner: torch.tanh(inner) * 2.0, True),
        (lambda module, inner: inner.unflatten(-1, (2, -1)).flatten(-2), False),
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
    assert bool(trace_pairs(changed(between), LAYERS).found) is sliced


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
    assert (found.problem, found.around, found.tokenwise) == ("", (), ("model.norm",))
    assert found.regions == tuple(f"{layer}.{part}" for layer in LAYERS for part in ("self_attn", "mlp"))
    assert trace_regions(changed(same, around=True), LAYERS).around == tuple(f"{layer}.mlp" for layer in LAYERS)


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


def test_styles_of_a_model_that_declares_none() -> None:
    """MLP and vocabulary are sliced, the attention is computed whole."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gptj", n_layer=2, n_embd=32, n_head=2, rotary_dim=8))
    plan = resolve(spec_of(model), model, Layout(tp=2, dp_shard=1), ParallelOptions(), world_size=2)
    assert plan.tp_level == "derived"
    styles = {row.module: row.style for row in plan.tensor_parallel}
    vocabulary = {"transformer.wte": "embedding_rowwise", "lm_head": "colwise_gather_output"}
    assert styles == vocabulary | {
        f"transformer.h.{layer}.mlp.{name}": style
        for layer in (0, 1) for name, style in (("fc_in", "colwise"), ("fc_out", "rowwise"))
    }  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", num_hidden_layers=2, hidden_size=32))
    with pytest.raises(
        PlanError, match="derived: no linear layer puts out features that enter another one without being mixed"
    ):
        resolve(spec_of(model), model, Layout(tp=2, dp_shard=1), ParallelOptions(), world_size=2)


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
    assert set(ODD) <= set(model_types())

"""Layers that repeat others: what a trace of a few finds of all is what a trace of all finds."""

from collections.abc import Callable
from functools import partial
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

from maintain.cells import deepened
from meshwright.models.reading.model_traces import ModelTraces
from meshwright.models.reading.pipeline import halves
from meshwright.models.reading.repeated_layers import RepeatedLayers
from meshwright.models.reading.tracing import Tracer, traced
from meshwright.models.specs.decoder import declared_structure
from meshwright.models.specs.registry import spec_of
from meshwright.plan.given.names import match_names
from tests.tiny import FAMILIES, tiny_model

LAYERS = 8
KNOWN = [family for family in FAMILIES if declared_structure(type(tiny_model(family, meta=True)))]


def deep_model(family: str, adapter: bool = False, layers: int = LAYERS) -> Any:
    kinds = len(set(FAMILIES[family].get("layer_types", [0])))
    changes = deepened(FAMILIES[family], kinds * layers)
    model = tiny_model(family, meta=True, **{key: value for key, value in changes.items() if key != "model_type"})
    if not adapter:
        return model
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"), low_cpu_mem_usage=True)


def findings(traces: ModelTraces, layers: list[str]) -> Any:
    return traces.attentions, traces.head, traces.pairs(layers), traces.stages(layers)


def compare(model: Any) -> ModelTraces:
    spec = spec_of(model)
    assert spec.traces is not None
    few, whole = spec.traces(model), ModelTraces(model, spec.experts)
    assert isinstance(few, ModelTraces)
    names = [name for name, _ in model.named_modules()]
    layers = [name for pattern in spec.layers for name in match_names(pattern, names)]
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    assert findings(few, layers) == findings(whole, layers)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    return few


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("family", "adapter"),
    [(family, adapter) for family in KNOWN for adapter in (False, True) if (family, adapter) != ("gemma3n_text", True)],
)  # Gemma 3n with adapters takes a minute
def test_what_is_found_of_a_few_layers_is_what_is_found_of_all(family: str, adapter: bool) -> None:
    model = deep_model(family, adapter)
    assert not compare(model).reads_all
    # A layer of Gemma 3n takes more than a hidden state, and those that reuse keys differ from the others.
    assert bool(RepeatedLayers(model)) == (family != "gemma3n_text")


@pytest.mark.parametrize("family", ["gpt2", "nemotron_h"])
def test_a_model_whose_structure_is_unknown_is_read_whole(family: str) -> None:
    traces = spec_of(tiny_model(family, meta=True)).traces
    assert isinstance(traces, partial)
    assert traces.keywords["reads_all"]


class Ran(Tracer):
    """Notes which modules run."""

    def __init__(self, inputs: Any) -> None:
        super().__init__(inputs)
        self.names: list[str] = []

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.names.append(name)


def test_three_layers_of_a_kind_run() -> None:
    model = deep_model("llama")
    with RepeatedLayers(model).passed_over():
        ran, why = traced(model, (), Ran)
    assert ran is not None, why
    assert [name for name in ran.names if name.endswith(".mlp")] == [
        f"model.layers.{index}.mlp" for index in (0, 1, LAYERS - 1)
    ]


def test_layers_of_a_stage_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[bool] = []
    failed: list[str] = []

    def layers_of(part: nn.Module) -> RepeatedLayers:
        passed.append(bool(found := RepeatedLayers(part)))
        return found

    def noting(*given: Any, **more: Any) -> Any:
        found = traced(*given, **more)
        failed.append(found[1])
        return found

    monkeypatch.setattr(halves, "RepeatedLayers", layers_of)
    monkeypatch.setattr(halves, "traced", noting)
    compare(deep_model("llama", layers=12))
    assert passed == [True, True]
    assert failed == [""] * 4  # each half once with few layers, and once with all


class Cumulated(nn.Module):
    """An activation in one layer, which mixes tokens there."""

    def __init__(self, on: bool) -> None:
        super().__init__()
        self._on = on

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.cumsum(1) if self._on else hidden


class OddAttention(LlamaAttention):
    """Mixes tokens in each fourth layer."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, weights = super().forward(*args, **kwargs)
        return (output.cumsum(1), weights) if self.layer_idx % 4 == 3 else (output, weights)


def cumulated(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output.cumsum(1)


def softmax(module: nn.Module, args: Any) -> torch.Tensor:
    return args[0].softmax(-1)


def odd_forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return hidden_states + hidden_states.cumsum(1) if self.self_attn.layer_idx % 4 == 3 else hidden_states


CHANGES: dict[str, tuple[bool, Callable[[Any, pytest.MonkeyPatch], object]]] = {
    "attribute": (True, lambda layers, _: setattr(layers[3].self_attn, "scaling", 2.0)),
    "module": (True, lambda layers, _: setattr(layers[3].mlp, "act_fn", nn.Softmax(-1))),
    "size": (True, lambda layers, _: [
        setattr(layers[3].mlp, name, nn.Linear(*sizes, bias=False, device="meta"))
        for name, sizes in {"gate_proj": (32, 40), "up_proj": (32, 40), "down_proj": (40, 32)}.items()
    ]),
    "frozen": (True, lambda layers, _: layers[3].self_attn.q_proj.weight.requires_grad_(False)),
    "shared": (False, lambda layers, _: setattr(layers[3].mlp.down_proj, "weight", layers[4].mlp.down_proj.weight)),
    "hook": (True, lambda layers, _: layers[3].mlp.register_forward_hook(cumulated)),
    "pre-hook": (True, lambda layers, _: layers[3].mlp.down_proj.register_forward_pre_hook(softmax)),
    "hooks": (False, lambda layers, _: [layer.mlp.register_forward_hook(cumulated) for layer in layers]),
    "own module": (False, lambda layers, _: [
        setattr(layer.mlp, "act_fn", Cumulated(index == 3)) for index, layer in enumerate(layers)
    ]),
    "own class": (False, lambda layers, _: [setattr(layer.self_attn, "__class__", OddAttention) for layer in layers]),
    "own forward": (False, lambda _, patch: patch.setattr(LlamaDecoderLayer, "forward", odd_forward)),
}  # fmt: skip
"""What is done to layers, and whether others of them are passed over still."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_looks_otherwise_is_read(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep_model("llama")
    others, make = CHANGES[change]
    make(model.model.layers, monkeypatch)
    kinds = RepeatedLayers(model)._kinds
    assert all("model.layers.3" not in kind for kind in kinds)
    assert bool(kinds) == others
    compare(model)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_layers_that_are_given_something_else_are_read(family: str) -> None:
    model = deep_model(family)
    kinds = model.config.layer_types
    kinds[5] = next(kind for kind in ("sliding_attention", "full_attention") if kind != kinds[5])
    model.config.sliding_window = model.model.config.sliding_window = 8
    model.model.has_sliding_layers = True
    layers = RepeatedLayers(model)
    assert any("model.layers.5" in kind for kind in layers._kinds)
    with layers.passed_over():
        ran, why = traced(model, (), Ran)
    assert ran is None
    assert "given different arguments" in why
    compare(model)


def test_a_layer_that_returns_more_than_a_hidden_state_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep_model("llama")
    own = LlamaDecoderLayer.forward

    def in_tuple(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (own(self, *args, **kwargs),)

    in_tuple.__module__ = own.__module__
    monkeypatch.setattr(LlamaDecoderLayer, "forward", in_tuple)
    layers = RepeatedLayers(model)
    assert layers
    with layers.passed_over():
        ran, why = traced(model, (), Ran)
    assert ran is None
    assert "something else than a hidden state" in why


def test_what_two_layers_that_look_alike_do_not_share_is_for_no_layer() -> None:
    layers = RepeatedLayers(deep_model("llama"))
    ran = [f"model.layers.{index}.mlp" for index in (0, 1, LAYERS - 1)]
    assert layers.spread(("before", *ran, "after")) == ("before", *(f"model.layers.{i}.mlp" for i in range(LAYERS)), "after")
    assert layers.spread(tuple((name, 1) for name in ran)) == tuple((f"model.layers.{i}.mlp", 1) for i in range(LAYERS))
    assert layers.spread((*ran[:2], f"model.layers.{LAYERS - 1}.self_attn")) is None
    assert layers.spread(ran[:2]) is None
    assert layers.spread(((ran[0], ran[1]),)) is None

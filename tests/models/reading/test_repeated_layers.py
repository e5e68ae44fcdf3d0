"""Layers that repeat others: what a trace of a few finds of all is what a trace of all finds."""

from functools import partial
from typing import Any

import peft
import pytest
from torch import nn

from maintain.cells import deepened
from meshwright.models.reading.model_traces import ModelTraces
from meshwright.models.reading.repeated_layers import RepeatedLayers
from meshwright.models.specs.decoder import declared_structure
from meshwright.models.specs.registry import spec_of
from meshwright.plan.given.names import match_names
from tests.tiny import FAMILIES, tiny_model

LAYERS = 8
KNOWN = [family for family in FAMILIES if declared_structure(type(tiny_model(family, meta=True)))]


def deep_model(family: str, adapter: bool = False) -> Any:
    kinds = len(set(FAMILIES[family].get("layer_types", [0])))
    changes = deepened(FAMILIES[family], kinds * LAYERS)
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


@pytest.mark.sampled(12)
@pytest.mark.parametrize("adapter", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("family", KNOWN)
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


def test_three_layers_of_a_kind_run() -> None:
    model = deep_model("llama")
    calls: list[int] = []
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(lambda *_, index=index: calls.append(index))
    traces = spec_of(model).traces
    assert traces is not None
    assert traces(model).head is not None
    assert calls == [0, 1, LAYERS - 1]


@pytest.mark.parametrize("change", ["attribute", "module", "size", "frozen", "shared", "outputs"])
def test_a_layer_that_looks_otherwise_is_read(change: str) -> None:
    model = deep_model("llama")
    layers = model.model.layers
    match change:
        case "attribute":
            layers[3].self_attn.scaling = 2.0
        case "module":
            layers[3].mlp.act_fn = nn.Softmax(-1)
        case "size":
            layers[3].mlp.gate_proj = nn.Linear(32, 40, bias=False, device="meta")
            layers[3].mlp.up_proj = nn.Linear(32, 40, bias=False, device="meta")
            layers[3].mlp.down_proj = nn.Linear(40, 32, bias=False, device="meta")
        case "frozen":
            layers[3].self_attn.q_proj.weight.requires_grad_(False)
        case "shared":
            layers[3].mlp.down_proj.weight = layers[4].mlp.down_proj.weight
        case "outputs":
            for layer in layers:
                layer.register_forward_hook(lambda *_: None)
                inner = layer.forward
                layer.forward = lambda *args, inner=inner, **kwargs: inner(*args, **kwargs)
    kinds = RepeatedLayers(model)._kinds
    assert all("model.layers.3" not in kind for kind in kinds)
    assert bool(kinds) == (change not in ("shared", "outputs"))
    compare(model)


def test_what_two_layers_that_look_alike_do_not_share_is_for_no_layer() -> None:
    layers = RepeatedLayers(deep_model("llama"))
    ran = [f"model.layers.{index}.mlp" for index in (0, 1, LAYERS - 1)]
    assert layers.spread(("before", *ran, "after")) == ("before", *(f"model.layers.{i}.mlp" for i in range(LAYERS)), "after")
    assert layers.spread(tuple((name, 1) for name in ran)) == tuple((f"model.layers.{i}.mlp", 1) for i in range(LAYERS))
    assert layers.spread((*ran[:2], f"model.layers.{LAYERS - 1}.self_attn")) is None
    assert layers.spread(ran[:2]) is None
    assert layers.spread(((ran[0], ran[1]),)) is None

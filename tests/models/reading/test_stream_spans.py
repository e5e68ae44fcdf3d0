"""Where the whole sequence is needed in layers that have no module for it, and what is refused: read from a model's forward."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright.models.reading.tensor.regions import trace_regions
from meshwright.models.specs.registry import spec_of
from meshwright.plan.given.names import match_names
from meshwright.plan.given.traces import RegionFacts

BERT: dict[str, Any] = {
    "is_decoder": True, "vocab_size": 67, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4,
}  # fmt: skip
OPT: dict[str, Any] = {
    "vocab_size": 67, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "word_embed_proj_dim": 32,
}  # fmt: skip


def meta(model_type: str, **config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config))


def regions_of(model: Any, like: Any = None) -> RegionFacts:
    """What is read of a model, with the pairs of one like it if that is given."""
    spec, names = spec_of(model), [name for name, _ in model.named_modules()]
    layers = [name for pattern in spec.layers for name in match_names(pattern, names)]
    assert spec.traces is not None
    traces = spec.traces(like or model)
    return trace_regions(model, layers, pairs=lambda: traces.pairs(layers))


def test_a_span_ends_in_another_module() -> None:
    """Residual and norm of BERT are in the module of the second matrix. It has no norm after its layers, but in its head."""
    found = regions_of(meta("bert", **BERT))
    layer = "bert.encoder.layer.0"
    assert (found.problem, found.problem_in_stages, found.regions, found.tokenwise) == ("", "", (), ())
    spans = [(span.entries, span.exit, span.flat) for span in found.spans if span.exit.startswith(layer)]
    assert spans == [
        ((f"{layer}.attention.self",), f"{layer}.attention.output.dense", False),
        ((f"{layer}.intermediate",), f"{layer}.output.dense", False),
    ]
    norms = {f"{layer}.{part}output.LayerNorm.{own}" for part in ("attention.", "") for own in ("weight", "bias")}
    assert {name for name in found.on_slices if name.startswith(layer)} == norms


def test_matrices_may_be_in_the_layer_itself_and_rows_be_one_dimension() -> None:
    found = regions_of(meta("opt", **OPT))
    layer = "model.decoder.layers.0"
    assert (found.problem, found.tokenwise) == ("", ("model.decoder.final_layer_norm",))
    spans = [(span.entries, span.exit, span.flat) for span in found.spans if span.exit.startswith(layer)]
    assert spans == [
        ((f"{layer}.self_attn",), f"{layer}.self_attn.out_proj", False),
        ((f"{layer}.fc1",), f"{layer}.fc2", True),
    ]


def changed(module: nn.Module, change: Any) -> None:
    inner = module.forward
    module.forward = lambda *args, **kwargs: change(inner(*args, **kwargs))


def test_what_leaves_a_span_or_a_region_elsewhere_is_refused() -> None:
    """The mean of what was computed of the whole sequence has a shape that fits any slice."""

    def leaks(inner: nn.Module, outer: nn.Module) -> None:
        kept: list[torch.Tensor] = []
        changed(inner, lambda features: kept.append(features.detach().mean()) or features)
        changed(outer, lambda hidden: hidden + kept.pop())

    bert = meta("bert", **BERT)
    leaks(bert.bert.encoder.layer[0].intermediate, bert.bert.encoder.layer[0].output.dropout)
    assert (
        "the whole sequence of 'bert.encoder.layer.0.output.dense' meets slices of it at "
        in regions_of(bert, meta("bert", **BERT)).problem
    )
    llama = meta("llama", **LLAMA)
    leaks(llama.model.layers[0].self_attn.q_proj, llama.model.layers[0].post_attention_layernorm)
    problem = "what 'model.layers.0.self_attn' made of the whole sequence is used outside of it at "
    assert problem in regions_of(llama).problem


def test_rows_that_are_one_dimension_and_mixed_are_refused() -> None:
    model = meta("opt", **OPT)
    changed(model.model.decoder.layers[0].fc1, lambda features: features.cumsum(0))
    problem = regions_of(model).problem
    assert "an operator mixes the tokens of all rows before 'model.decoder.layers.0.fc2' (aten.cumsum.default)" in problem


@pytest.mark.parametrize("where", ["layer", "head"])
def test_a_parameter_whose_gradient_would_be_that_of_a_slice_is_refused(where: str) -> None:
    """One that is read outside of its module, and one that is in no layer."""
    model = meta("opt", **OPT)
    decoder = model.model.decoder
    owner = decoder.layers[1].fc1 if where == "layer" else decoder.embed_positions
    changed(decoder.layers[0].self_attn_layer_norm, lambda hidden: hidden * owner.weight.sum())
    assert "is used on a slice, in 'model.decoder.layers.0" in regions_of(model).problem


def test_a_norm_that_runs_before_the_layers_too_leaves_the_gathering_to_the_last_layer() -> None:
    found = regions_of(meta("nanochat", **LLAMA))
    assert (found.problem, found.tokenwise, found.spans) == ("", (), ())


def test_a_refusal_names_the_line_of_the_model() -> None:
    """The layers of XLNet have the sequence first."""
    xlnet = {"vocab_size": 67, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}
    assert " at modeling_xlnet.py:" in regions_of(meta("xlnet", **xlnet)).problem

"""How the attentions of models are called, as one forward without values shows it."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright.models.registry import spec_of
from meshwright.plan.attentions import Attentions
from tests.tiny import tiny_model

MASKS = {
    "llama": [(True, None)] * 2,
    "mistral": [(True, 8)] * 2,
    "gemma3_text": [(True, 8), (True, None)],
    "gpt_oss": [(True, 8), (True, None)],
    "opt": [(True, None)] * 2,
}


def attentions_of(model: torch.nn.Module) -> Attentions:
    trace = spec_of(model).attentions
    assert trace is not None
    return trace(model)


def built(model_type: str, **config: object) -> torch.nn.Module:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4, "vocab_size": 67}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**sizes, **config}))


@pytest.mark.parametrize("family", MASKS)
def test_masks(family: str) -> None:
    found = attentions_of(tiny_model(family, meta=True))
    assert [(row.causal, row.window) for row in found.rows] == MASKS[family]
    assert not found.problems
    assert not any(row.problem for row in found.rows)
    assert all(row.sinks == (family == "gpt_oss") for row in found.rows)
    assert found.kernel in ("sdpa", "eager")


def test_a_window_may_be_larger_than_any_sequence_of_a_test() -> None:
    assert {row.window for row in attentions_of(built("mistral", sliding_window=4097)).rows} == {4097}


def test_heads_and_widths() -> None:
    (row, _) = attentions_of(tiny_model("deepseek_v3", meta=True)).rows
    assert (row.heads, row.kv_heads, row.key_size, row.value_size) == (4, 4, 16, 8)


def test_dropout_is_a_fact() -> None:
    assert {row.dropout for row in attentions_of(tiny_model("llama", meta=True, attention_dropout=0.25)).rows} == {0.25}


@pytest.mark.parametrize(
    ("model_type", "config", "problem"),
    [
        ("mamba", {"state_size": 4}, "'backbone.layers.0.mixer' mixes tokens outside of an attention (aten.convolution"),
        ("bloom", {"n_layer": 2}, "'transformer.h.0.self_attention' mixes tokens outside of an attention (aten._softmax"),
        ("falcon", {}, "mixes tokens outside of an attention"),
        ("gptj", {"n_embd": 64, "n_head": 4, "n_layer": 2, "rotary_dim": 8}, "aten._softmax"),
        ("phi3", {"rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 32}, "pad_token_id": 0}, "(longrope) changes with the largest position"),
    ],
)  # fmt: skip
def test_what_mixes_tokens_elsewhere_is_named(model_type: str, config: dict[str, object], problem: str) -> None:
    assert any(problem in line for line in attentions_of(built(model_type, **config)).problems)


def test_chunks_are_neither_a_window_nor_causal() -> None:
    model = built("llama4_text", attention_chunk_size=16, num_local_experts=2, intermediate_size=32, intermediate_size_mlp=32)
    assert any(row.problem for row in attentions_of(model).rows)


def test_a_model_is_not_changed() -> None:
    model = tiny_model("mixtral")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    implementation = model.config._attn_implementation
    assert attentions_of(model).rows
    assert model.config._attn_implementation == implementation
    assert all(torch.equal(tensor, before[name]) and not tensor.is_meta for name, tensor in model.state_dict().items())
    assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())
    ids = torch.arange(8)[None]
    assert model(input_ids=ids, position_ids=ids).logits.isfinite().all()

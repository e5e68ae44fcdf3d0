"""How the attentions of models are called, as one forward without values shows it."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright.models.reading.context.attention_calls import trace_uncached
from meshwright.models.reading.context.cached_calls import trace_cached
from meshwright.models.reading.context.trace_context import trace_attentions
from meshwright.models.specs.registry import spec_of
from meshwright.plan.given.attentions import Attentions
from tests.tiny import tiny_model

MASKS = {
    "llama": [(True, None)] * 2,
    "mistral": [(True, 8)] * 2,
    "gemma3_text": [(True, 8), (True, None)],
    "gpt_oss": [(True, 8), (True, None)],
    "opt": [(True, None)] * 2,
}


def attentions_of(model: torch.nn.Module) -> Attentions:
    traces = spec_of(model).traces
    assert traces is not None
    attentions = traces(model).attentions
    assert attentions is not None
    return attentions


def said_of(model: torch.nn.Module) -> list[str]:
    """What is said to mix tokens outside of attentions: in mixers, and elsewhere."""
    found = attentions_of(model)
    return [*found.problems, *(mixes for _, mixes in found.states)]


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
        ("openai-gpt", {"n_embd": 64, "n_head": 4, "n_layer": 2},
         "(aten.slice.Tensor, models/openai/modeling_openai.py:"),
        ("xlnet", {"d_head": 16, "d_inner": 32}, "are not those of the tokens, one after another"),
        ("phi3", {"rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 32}, "pad_token_id": 0}, "(longrope) changes with the largest position"),
    ],
)  # fmt: skip
def test_what_mixes_tokens_elsewhere_is_named(model_type: str, config: dict[str, object], problem: str) -> None:
    assert any(problem in line for line in said_of(built(model_type, **config)))


class Mixing(torch.nn.Module):
    """An MLP that also mixes tokens."""

    def __init__(self, inner: torch.nn.Module, mix: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.mix = inner, mix

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden) + self.mix(hidden)


def distances(hidden: torch.Tensor) -> torch.Tensor:
    places = torch.arange(hidden.shape[1], device=hidden.device).to(hidden.dtype)
    return places[:, None] - places


MIXES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "shift": lambda x: torch.nn.functional.pad(x, (0, 0, 1, -1)),
    "mean": lambda x: x.mean(1, keepdim=True),
    "scan": lambda x: torch.stack(list(x.unbind(1)), dim=1),
    "gather": lambda x: x[:, torch.arange(x.shape[1], device=x.device)],
    "index_select": lambda x: x.index_select(1, torch.zeros(x.shape[1], dtype=torch.long, device=x.device)),
    "scores": lambda x: torch.einsum("bld,bmd,bme->ble", x, x, x),
    "norm over tokens": lambda x: torch.nn.functional.layer_norm(x.transpose(1, 2), (x.shape[1],)).transpose(1, 2),
    "unfold": lambda x: torch.nn.functional.pad(x.unfold(1, 2, 1).mean(-1), (0, 0, 1, 0)),
    "positions backwards": lambda x: x * torch.arange(x.shape[1], 0, -1, device=x.device)[None, :, None],
    "distances": lambda x: x + distances(x).sum(-1)[None, :, None],
}


@pytest.mark.parametrize("mix", MIXES)
def test_an_operator_that_mixes_tokens_is_found(mix: str) -> None:
    model = tiny_model("llama", meta=True)
    model.model.layers[1].mlp = Mixing(model.model.layers[1].mlp, MIXES[mix])
    problems = said_of(model)
    assert any("'model.layers.1.mlp'" in line for line in problems), problems


def test_a_recurrent_layer_is_found() -> None:
    model = tiny_model("llama", meta=True)
    with torch.device("meta"):
        gru = torch.nn.GRU(32, 32, batch_first=True)
    model.model.layers[1].mlp.add_module("gru", gru)
    model.model.layers[1].mlp = Mixing(model.model.layers[1].mlp, lambda x: gru(x)[0])
    assert any("mixes tokens" in line for line in said_of(model))


@pytest.mark.parametrize("model_type", ["bart", "mbart", "plbart"])
def test_positions_of_its_own(model_type: str) -> None:
    """Their decoders count positions by themselves: where is known by the line of their code."""
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 32, "vocab_size": 67}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))
    found = trace_attentions(model)
    assert not found.problems
    assert {(module, file) for module, (file, _) in found.counted} == {
        ("model.decoder", f"models/{model_type}/modeling_{model_type}.py")
    }


NOT_FOLLOWED: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "no mask": (lambda attend, q, k, v, mask: attend(q, k, v, None), "attends to the keys of its cache without the mask"),
    "a triangle": (
        lambda attend, q, k, v, mask: attend(q, k, v, mask + torch.ones(q.shape[2], k.shape[2], device="meta").tril()),
        "makes a mask of its own (aten.tril",
    ),
    "tokens of a rank": (lambda attend, q, k, v, mask: attend(q + q.mean(2, True), k, v, mask), "mixes tokens"),
    "the first entries": (
        lambda attend, q, k, v, mask: attend(q * torch.ones(64, 1, device="meta")[: q.shape[2]], k, v, mask),
        "takes as many entries as it has tokens, from the first on (aten.slice",
    ),
}


def test_attention_that_computes_itself_is_followed_through_its_cache() -> None:
    found = attentions_of(built("gptj", n_embd=64, n_head=4, n_layer=2, rotary_dim=8))
    assert [(row.module, row.heads, row.key_size, row.causal, row.cached) for row in found.rows] == [
        (f"transformer.h.{layer}.attn", 4, 16, True, True) for layer in range(4)
    ]


def test_dropout_of_attention_that_computes_itself_is_a_fact() -> None:
    model = built("gptj", n_embd=64, n_head=4, n_layer=2, rotary_dim=8, attn_pdrop=0.25)
    assert {row.dropout for row in attentions_of(model).rows} == {0.25}


@pytest.mark.parametrize("case", NOT_FOLLOWED)
def test_what_is_not_shown_through_a_cache_is_refused(case: str) -> None:
    change, words = NOT_FOLLOWED[case]
    model = built("gptj", n_embd=64, n_head=4, n_layer=2, rotary_dim=8)
    attention = model.transformer.h[1].attn
    attention._attn = partial(change, attention._attn)
    refused = trace_cached(model, ())
    assert isinstance(refused, str)
    assert refused.startswith("'transformer.h.1.attn' ")
    assert words in refused


def test_arguments_that_are_not_known() -> None:
    model = tiny_model("llama", meta=True)
    inner = model.model.layers[0].self_attn.forward
    model.model.layers[0].self_attn.forward = lambda *args, **kwargs: inner(*args, logit_cap=30.0, **kwargs)
    assert "with 'logit_cap'" in trace_uncached(model).rows[0].problem
    assert all(row.cached and not row.problem for row in attentions_of(model).rows)  # the model's own code knows it


def test_dropout_is_that_of_training_whatever_the_mode() -> None:
    model = tiny_model("gpt2", meta=True, attn_pdrop=0.1).eval()
    assert {row.dropout for row in attentions_of(model).rows} == {0.1}
    assert not any(module.training for module in model.modules())


def test_chunks_are_neither_a_window_nor_causal() -> None:
    model = built("llama4_text", attention_chunk_size=16, num_local_experts=2, intermediate_size=32, intermediate_size_mlp=32)
    assert any(row.problem for row in trace_uncached(model).rows)
    assert all(row.cached and not row.problem for row in attentions_of(model).rows)  # but a rule of places


def test_a_mask_may_be_passed_by_keyword() -> None:
    model = built("afmoe", intermediate_size=64, num_dense_layers=4)
    assert [(row.problem, row.causal) for row in attentions_of(model).rows] == [("", True)] * 4


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

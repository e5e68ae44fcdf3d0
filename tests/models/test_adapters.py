"""Which matrices get an adapter, what is frozen and in which dtype, and what is refused."""

from typing import Any

import pytest
import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.layout import Layout
from meshwright.models.adapters import adapt, bare, initialize_adapters, merge
from meshwright.models.config import AdapterConfig
from meshwright.models.registry import spec_of
from meshwright.plan.options import ParallelOptions
from meshwright.plan.resolver import resolve
from tests.tiny import batches, summed_loss, tiny_model

LAYER = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def adapted(family: str = "llama", param_dtype: str | None = None, meta: bool = True, **options: Any) -> nn.Module:
    model = tiny_model(family, meta=meta, **options.pop("config", {}))
    adapt(model, AdapterConfig(**{"rank": 3, "alpha": 6, **options}), param_dtype)
    return model


def ends(model: nn.Module) -> set[str]:
    """The last components of the names of the matrices that have an adapter."""
    return {name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "lora_A")}


@pytest.mark.parametrize(
    ("family", "targets", "found"),
    [
        ("llama", "all-linear", LAYER),
        ("qwen3_moe", "all-linear", LAYER - {"gate_proj", "up_proj", "down_proj"}),  # no router, no head
        ("gpt2", "all-linear", {"c_attn", "c_proj", "c_fc"}),  # stored transposed
        ("llama", ["q_proj", "lm_head"], {"q_proj", "lm_head"}),
        ("llama", ["model.layers.*.mlp.**"], {"gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_targets(family: str, targets: Any, found: set[str]) -> None:
    model = adapted(family, targets=targets)
    assert ends(model) == found
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"targets": ["q_prj"]},
            r"adapter\.targets: 'q_prj' matches no matrix; did you mean 'q_proj'\? legal are all-linear, down",
        ),
        (
            {"targets": ["lm_head"], "config": {"tie_word_embeddings": True}},
            r"'model.embed_tokens.weight' is also 'lm_head.weight', and each would get an adapter of its own",
        ),
        (
            {"targets": ["lm_head"], "save_modules": ["lm_head"]},
            r"adapter\.save_modules: 'lm_head' is trained whole, and is among adapter\.targets; name it in one of them",
        ),
        ({"save_modules": ["head"]}, r"adapter\.save_modules: 'head' is no module of LlamaForCausalLM"),
        (
            {"save_modules": ["lm_head"], "config": {"tie_word_embeddings": True}},
            r"'lm_head.weight' is tied to 'model.embed_tokens.weight'; name both, so that they stay tied, or neither",
        ),
    ],
)
def test_names_that_do_not_fit_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        adapted(**options)


def test_tied_modules_are_trained_together() -> None:
    model = adapted(save_modules=["lm_head", "embed_tokens"], config={"tie_word_embeddings": True})
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad and "lora_" not in name}
    assert trained == {"model.embed_tokens.weight"}
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_frozen_parameters_have_the_dtype_of_compute_and_trained_ones_fp32() -> None:
    model = adapted(param_dtype="bfloat16", save_modules=["lm_head"])
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16), name
    plan = resolve(spec_of(model), model, Layout(dp_shard=2), ParallelOptions(param_dtype="bfloat16"))
    rows = {row.name: row for row in plan.parameters}
    assert not rows["model.layers.0.self_attn.q_proj.base_layer.weight"].trainable
    assert rows["model.layers.0.self_attn.q_proj.lora_A.default.weight"].trainable
    assert rows["lm_head.weight"].trainable


def test_without_its_wrappers_a_model_has_the_names_of_its_files() -> None:
    model, plain = adapted(), tiny_model("llama", meta=True)
    with bare(model):
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert ends(model) == LAYER


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_new_adapter_changes_nothing_and_a_merged_one_computes_the_same(family: str, kind: str) -> None:
    plain, model = tiny_model(family, seed=3), adapted(family, meta=False, kind=kind, scaling="rs")
    with bare(model):
        model.load_state_dict(plain.state_dict())
    initialize_adapters(model, torch.device("cpu"), 0)
    (batch,) = batches(1, length=12)
    torch.testing.assert_close(summed_loss(model, batch), summed_loss(plain, batch), rtol=1e-5, atol=1e-5)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    before = summed_loss(model, batch).detach()
    assert abs(float(before - summed_loss(plain, batch))) > 1e-2
    merge(model)
    assert not ends(model)
    torch.testing.assert_close(summed_loss(model, batch).detach(), before, rtol=1e-5, atol=1e-4)

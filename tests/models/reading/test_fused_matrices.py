"""Which weights are several matrices, and which have heads: as the code of each model takes their output features apart."""

import pytest

from maintain.tiny import TINY_MODELS
from meshwright.models.model_config import ModelConfig
from meshwright.models.specs.registry import spec_of
from meshwright.models.weights.build import build_on_meta, pretrained_config
from meshwright.plan.given.names import match_names
from meshwright.plan.update.matrices import Apart

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 67}
OTHERS = {"gpt_neox": {**SMALL, "intermediate_size": 64}, "bloom": {**SMALL, "n_head": 4}, "glm4": TINY_MODELS["llama"].config}

FUSED = {
    "llama": {},
    "qwen3": {},
    "deepseek_v3": {
        "self_attn.kv_a_proj_with_mqa.weight": ((16, 8), 1),
        "self_attn.kv_b_proj.weight": ((8, 8), 4),
        "mlp.experts.gate_up_proj": ((32, 32), 1),
    },
    "phi3": {"self_attn.qkv_proj.weight": ((32, 16, 16), 1), "mlp.gate_up_proj.weight": ((48, 48), 1)},
    "gpt2": {"attn.c_attn.weight": ((32, 32, 32), 1)},
    "gpt_oss": {"mlp.experts.gate_up_proj": ((1, 1), 64)},  # gate and up take turns
    "mixtral": {"mlp.experts.gate_up_proj": ((64, 64), 1)},
    "nemotron_h": {"mixer.in_proj.weight": ((32, 64, 4), 1)},  # gate; what is convolved; steps
    "gpt_neox": {"attention.query_key_value.weight": ((8, 8, 8), 4)},  # those of a head lie behind each other
    "bloom": {"self_attention.query_key_value.weight": ((8, 8, 8), 4)},
    "glm4": {"mlp.gate_up_proj.weight": ((48, 48), 1)},
}
"""Family: what is several matrices, with their sizes and how often these are repeated."""

HEADS = {
    "llama": {"q_proj": (4,), "k_proj": (2,), "v_proj": (2,)},
    "mixtral": {"q_proj": (4,), "k_proj": (2,), "v_proj": (2,)},
    "phi3": {"qkv_proj": (4, 2, 2)},
    "gpt2": {"c_attn": (4, 4, 4)},
    "gpt_neox": {"query_key_value": (4, 4, 4)},
    "deepseek_v3": {"q_b_proj": (4,), "kv_b_proj": (1, 4)},
}


def fused(family: str) -> dict[str, Apart]:
    config = OTHERS.get(family) or TINY_MODELS[family].config
    source = ModelConfig(config={"model_type": family, **config})
    model = build_on_meta(source, pretrained_config(source))
    spec = spec_of(model)
    assert spec.traces is not None
    modules = [name for name, _ in model.named_modules()]
    found = spec.traces(model).fused([name for pattern in spec.layers for name in match_names(pattern, modules)])
    parameters = dict(model.named_parameters())
    assert found.keys() <= parameters.keys()
    for name, (sizes, runs, _) in found.items():
        assert sum(sizes) * runs in parameters[name].shape
    return dict(found)


@pytest.mark.parametrize("family", FUSED)
def test_weights_are_taken_apart_as_the_code_does(family: str) -> None:
    several = {name: own for name, own in fused(family).items() if len(own.sizes) > 1}
    assert {
        own: (sizes, runs) for name, (sizes, runs, _) in several.items() for own in FUSED[family] if name.endswith(own)
    } == (FUSED[family])
    assert all(any(name.endswith(own) for own in FUSED[family]) for name in several)


@pytest.mark.parametrize("family", HEADS)
def test_queries_keys_and_values_have_heads(family: str) -> None:
    heads = {name.split(".")[-2]: own.heads for name, own in fused(family).items() if own.heads}
    assert heads == HEADS[family]

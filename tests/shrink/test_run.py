"""shrink(): published models of many families become small ones of the same structure, on layouts of few processes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from meshwright.errors import ConfigError, LayoutError, ModelError
from meshwright.layout import Layout
from meshwright.models.specs.registry import spec_of
from meshwright.models.weights.build import build_on_meta, materialize, pretrained_config
from meshwright.plan.given.inspection import model_sizes
from meshwright.plan.given.names import generalize
from meshwright.shrink.run import SMALL, Change, shrink
from meshwright.train.config import RunConfig, load_config
from meshwright.train.start.setup import make_setup
from tests.harness import OF_PINNED, refuses, run_ranks

SLIDING, FULL = "sliding_attention", "full_attention"
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "rope_parameters": LLAMA3,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009],
}  # fmt: skip
MISTRAL = {
    "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "sliding_window": 4096,
}  # fmt: skip
MIXTRAL = {
    **MISTRAL, "model_type": "mixtral", "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2,
    "router_jitter_noise": 0.1,
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
    "vocab_size": 151936,
}  # fmt: skip
GEMMA3 = {
    "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "head_dim": 256,
    "num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 512, "vocab_size": 262144,
}  # fmt: skip

MULTIMODAL: dict[str, Any] = {
    "model_type": "gemma3", "image_token_index": 262144, "mm_tokens_per_image": 256,
    "text_config": {**GEMMA3, "hidden_size": 2560, "num_hidden_layers": 34, "num_attention_heads": 8,
                    "num_key_value_heads": 4, "vocab_size": 262208},
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
                      "num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 896, "patch_size": 14},
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": LLAMA,
    "mistral-7b": MISTRAL,
    "mixtral-8x7b": MIXTRAL,
    "qwen2-7b": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "bos_token_id": 151643,
    },
    "qwen2-sliding": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 14,
        "num_hidden_layers": 28, "vocab_size": 151936,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128,
        "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True, "vocab_size": 151936,
    },
    "qwen3-30b": QWEN3_MOE,
    "qwen3-moe-some-dense": {**QWEN3_MOE, "mlp_only_layers": [0, 1, 47]},
    "qwen3-moe-every-third": {**QWEN3_MOE, "decoder_sparse_step": 3},
    "gemma2-9b": {
        "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42, "head_dim": 256,
        "num_attention_heads": 16, "num_key_value_heads": 8, "sliding_window": 4096,
    },
    "gemma3-1b": GEMMA3,
    "gemma4-e2b": {
        "model_type": "gemma4_text", "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True, "layer_types": ([SLIDING] * 4 + [FULL]) * 7, "final_logit_softcapping": 30.0,
    },
    "phi3-mini-128k": {
        "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 32, "vocab_size": 32064, "max_position_embeddings": 131072, "sliding_window": 262144,
        "original_max_position_embeddings": 4096, "embd_pdrop": 0.1,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1 + n / 50 for n in range(48)],
            "long_factor": [1.0 + n for n in range(48)],
        },
    },
    "gpt2-xl": {"model_type": "gpt2", "hidden_size": 1600, "num_hidden_layers": 48, "n_head": 25},
    "gpt-neox-20b": {
        "model_type": "gpt_neox", "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44,
        "num_attention_heads": 64, "vocab_size": 50432, "hidden_dropout": 0.1,
    },
    "olmo2-7b": {"model_type": "olmo2", "vocab_size": 100352, "eos_token_id": 100257, "pad_token_id": 100277},
    "deepseek-v3": {"model_type": "deepseek_v3"},
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": None,
        "n_group": 1, "topk_group": 1, "topk_method": "greedy",
    },
    "glm4-moe": {
        "model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
        "num_attention_heads": 96, "num_key_value_heads": 8, "n_routed_experts": 128, "first_k_dense_replace": 1,
    },
    "gpt-oss-20b": {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32},
    "starcoder2-3b": {
        "model_type": "starcoder2", "hidden_size": 3072, "num_hidden_layers": 30, "num_attention_heads": 24,
        "num_key_value_heads": 2, "residual_dropout": 0.1, "sliding_window": 4096, "bos_token_id": 0, "eos_token_id": 0,
    },
    "falcon-7b": {"model_type": "falcon", "bos_token_id": 11, "eos_token_id": 11},
    "falcon-40b": {
        "model_type": "falcon", "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8,
        "new_decoder_architecture": True,
    },
    "cohere2": {"model_type": "cohere2", "hidden_size": 4096, "num_hidden_layers": 32, "num_key_value_heads": 8},
    "granite-8b": {"model_type": "granite", "intermediate_size": 12800, "num_hidden_layers": 40, "vocab_size": 49155},
    "smollm3": {"model_type": "smollm3"},
    "llama4-scout": {"model_type": "llama4_text", "num_hidden_layers": 48, "num_local_experts": 16},
    "llama4-maverick": {"model_type": "llama4_text", "num_hidden_layers": 48, "interleave_moe_layer_step": 2},
    "nemotron": {"model_type": "nemotron", "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128},
    "qwen3-next": {"model_type": "qwen3_next"},
    "jamba": {"model_type": "jamba"},
    "nemotron-h": {"model_type": "nemotron_h", "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * 12},
    "mamba2": {"model_type": "mamba2"},
    "kimi-linear": {"model_type": "kimi_linear"},
    **{kind: {"model_type": kind} for kind in (
        "bloom", "exaone4", "gptj", "gpt_neo", "minimax_m2", "mpt", "olmoe", "opt", "phi", "phimoe", "qwen2_moe", "stablelm",
    )},
}  # fmt: skip


def run_config(model: dict[str, Any] | None = None, *, layout: Any = None, nproc: int | None = None, **more: Any) -> RunConfig:
    """A run of a model; ``more`` are training, data and parallel values by section."""
    training = {"steps": 3, "global_batch_size": 1024, **more.get("training", {})}
    return RunConfig.model_validate(
        {
            "output": "nowhere",
            "model": more.get("source") or {"config": model or LLAMA},
            "layout": layout or {},
            "data": {"corpus": "python-stdlib", "sequence_length": 4096, **more.get("data", {})},
            "tokenizer": {"vocab_size": 50257},
            "training": training,
            "parallel": more.get("parallel", {}),
            "optimizer": more.get("optimizer", {}),
            "launch": {"nproc": nproc},
        }
    )


def with_vocabulary(model: dict[str, Any]) -> dict[str, Any]:
    """The family's own vocabulary, where the published config leaves it out: no tokenizer is asked then."""
    from transformers import AutoConfig

    return {"vocab_size": AutoConfig.for_model(model["model_type"]).vocab_size, **model}


def built(config: RunConfig) -> Any:
    return build_on_meta(config.model, pretrained_config(config.model))


def shrunk(model: dict[str, Any], world_size: int | None = 2, **more: Any) -> tuple[RunConfig, dict[str, Change]]:
    small, _, changes = shrink(run_config(with_vocabulary(model), **more), world_size)
    return small, {change.key: change for change in changes}


def whole_numbers(value: Any) -> list[int]:
    if isinstance(value, (list, tuple)):
        return [number for item in value for number in whole_numbers(item)]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else []


# -- models ---------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_becomes_small_and_stays_itself(name: str) -> None:
    config = run_config(with_vocabulary(FAMILIES[name]))
    small_config, world_size, changes = shrink(config, 2)
    small = make_setup(small_config, world_size).model  # a run like any other, with a plan
    large = built(config)
    assert sum(parameter.numel() for parameter in small.parameters()) < 2_000_000
    assert {type(module) for module in small.modules()} == {type(module) for module in large.modules()}
    for names in ("named_parameters", "named_buffers"):
        assert {generalize(key) for key, _ in getattr(small, names)()} == {
            generalize(key) for key, _ in getattr(large, names)()
        }
    assert len(small.all_tied_weights_keys) > 0 or not large.all_tied_weights_keys

    assert "model.path" not in [change.key for change in changes]
    for change in changes:
        assert change.before != change.after
        assert max(whole_numbers(change.after), default=0) <= max(whole_numbers(change.before), default=10**9), change
    old, new = large.config.get_text_config().to_dict(), small.config.get_text_config().to_dict()
    assert new["vocab_size"] % 8 == old["vocab_size"] % 8
    for key, value in new.items():
        if re.search("dropout|pdrop|jitter", key):
            assert not value, key
        if key.endswith("_token_id"):
            assert all(0 <= token < new["vocab_size"] for token in whole_numbers(value))
            assert (value is None) == (old[key] is None)
        if key in ("sliding_window", "attention_chunk_size") and value:
            assert value < small_config.data.sequence_length
        if isinstance(old[key], (bool, str)):
            assert value == old[key], key
    before, after = model_sizes(spec_of(large), large), model_sizes(spec_of(small), small)
    if before.heads and before.kv_heads:
        assert after.heads is not None
        assert after.kv_heads is not None
        assert (before.heads > before.kv_heads) == (after.heads > after.kv_heads)
        assert (before.kv_heads == 1) == (after.kv_heads == 1)
        assert after.heads % after.kv_heads == 0
    if before.experts:
        assert after.experts
        chosen = next(new[key] for key in ("num_experts_per_tok", "num_experts_per_token") if key in new)
        assert 4 <= after.experts > chosen


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma4-e2b", "deepseek-v3", "phi3-mini-128k", "gpt-oss-20b"])
def test_a_small_configuration_survives_yaml(name: str) -> None:
    small, _ = shrunk(FAMILIES[name])
    assert RunConfig.model_validate(yaml.safe_load(small.to_yaml())) == small


def _computes(rank: int, configs: list[RunConfig]) -> list[tuple[str, list[str]]]:
    """For each: what is wrong with one forward and backward."""
    wrong = []
    for config in configs:
        hf_config = pretrained_config(config.model)
        model = build_on_meta(config.model, hf_config)
        materialize(model, config.model, torch.device("cpu"), seed=0)
        ids = torch.randint(3, hf_config.vocab_size, (2, config.data.sequence_length))
        loss = torch.nn.functional.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), ids.flatten())
        loss.backward()
        bad = [name for name, item in model.named_parameters() if item.grad is None or not item.grad.isfinite().all()]
        wrong.append((type(model).__name__, bad if loss.isfinite() else ["loss"]))
    return wrong


@pytest.mark.parametrize(
    "names",
    [
        ["mixtral-8x7b", "gemma3-1b", "gpt2-xl", "deepseek-v3", "falcon-7b", "nemotron-h"],
        pytest.param(
            [
                "llama-3.1-8b", "qwen3-moe-every-third", "gemma2-9b", "gemma4-e2b", "phi3-mini-128k", "gpt-neox-20b",
                "glm4-moe", "gpt-oss-20b", "falcon-40b", "smollm3", "llama4-maverick", "qwen3-next",
            ],
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["some", "others"],
)  # fmt: skip
def test_small_models_compute(names: list[str]) -> None:
    configs = [shrunk(FAMILIES[name])[0] for name in names]
    (outcome,) = run_ranks(_computes, 1, configs, group=False)
    assert [item for item in outcome if item[1]] == []


@pytest.mark.thorough
def test_layers_of_every_kind_stay_in_their_order() -> None:
    def text(name: str, **changes: Any) -> dict[str, Any]:
        small, _ = shrunk({**FAMILIES[name], **changes})
        assert small.model.config is not None
        return small.model.config

    assert text("gemma3-1b")["layer_types"] == [SLIDING, FULL]
    assert text("qwen2-sliding")["layer_types"] == [FULL, SLIDING]
    assert text("qwen2-sliding")["max_window_layers"] == 1
    assert text("deepseek-v3")["first_k_dense_replace"] == 1
    assert text("qwen3-moe-some-dense")["mlp_only_layers"] == [0]
    every_third = text("qwen3-moe-every-third")
    assert (every_third["num_hidden_layers"], every_third["decoder_sparse_step"]) == (3, 3)
    maverick = text("llama4-maverick")  # dense or experts, with rope in chunks or without
    assert (maverick["moe_layers"], maverick["no_rope_layers"]) == ([1, 2], [1, 1, 0])
    shared = text("gemma4-e2b")  # makes its keys; makes them and hands them on; takes those of another
    assert (shared["layer_types"], shared["num_kv_shared_layers"]) == ([SLIDING, FULL] * 3, 2)
    assert text("jamba")["num_hidden_layers"] == 5  # up to the first layer with attention


def test_layers_for_every_pipeline_stage() -> None:
    small, _ = shrunk(GEMMA3, 4, layout={"pp": 4, "dp_shard": None})
    assert small.model.config is not None
    assert small.model.config["layer_types"] == [SLIDING] * 3 + [FULL]


@pytest.mark.thorough
def test_numbers_of_special_kinds() -> None:
    rope = shrunk(FAMILIES["phi3-mini-128k"])[0].model.config["rope_parameters"]  # type: ignore[index]
    assert len(rope["short_factor"]) == len(rope["long_factor"]) == 8
    assert shrunk(LLAMA)[0].model.config["rope_parameters"] == LLAMA3  # type: ignore[index]
    deepseek = shrunk(FAMILIES["deepseek-v3"])[1]
    groups = {key: deepseek[f"model.config.{key}"].after for key in ("n_group", "topk_group", "n_routed_experts")}
    assert groups == {"n_group": 4, "topk_group": 2, "n_routed_experts": 8}
    tokens = shrunk(LLAMA)[1]["model.config.eos_token_id"].after
    assert len(set(tokens)) == 3
    gpt = shrunk(FAMILIES["gpt2-xl"])[1]
    assert gpt["model.config.bos_token_id"].after == gpt["model.config.eos_token_id"].after
    assert gpt["model.config.attn_pdrop"].why == "masks of one process cannot be those of N"


def test_a_small_model_stays() -> None:
    tiny = {"model_type": "mistral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 67,
            "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 64, "attention_dropout": 0.1,
            "eos_token_id": 2, "bos_token_id": 1}  # fmt: skip
    small, world_size, changes = shrink(run_config(tiny, training={"global_batch_size": 4}, data={"sequence_length": 48}), 2)
    assert world_size == 2
    assert {change.key: change.after for change in changes} == {
        "model.config.attention_dropout": 0.0, "model.config.sliding_window": 12
    }  # fmt: skip
    assert small.model.config == {**tiny, "attention_dropout": 0.0, "sliding_window": 12}
    assert sum(parameter.numel() for parameter in built(small).parameters()) < SMALL


def test_a_tokenizer_says_the_vocabulary_of_a_new_model() -> None:
    small, _, _ = shrink(run_config({key: value for key, value in LLAMA.items() if not re.search("vocab|token", key)}), 2)
    values = small.model.config
    assert values is not None
    assert (values["vocab_size"] % 8, values["pad_token_id"], values["bos_token_id"]) == (50257 % 8, 0, 1)


def write(folder: Path, model: dict[str, Any]) -> dict[str, Any]:
    folder.joinpath("config.json").write_text(json.dumps(model))
    return {"path": str(folder)}


def test_a_pretrained_model_becomes_a_new_one(tmp_path: Path) -> None:
    """Keys that transformers does not declare (head_dim of Qwen3-MoE, what others wrote into a config) are left out."""
    published = {**QWEN3_MOE, "head_dim": 128, "torch_dtype": "bfloat16", "architectures": ["Qwen3MoeForCausalLM"], "x_size": 9}
    config = run_config(source=write(tmp_path, published))
    small, world_size, changes = shrink(config, 2)
    assert changes[2] == Change("model.path", str(tmp_path), None, "random weights")
    assert (small.model.path, type(make_setup(small, world_size).model).__name__) == (None, "Qwen3MoeForCausalLM")
    assert "x_size" not in (small.model.config or {})


def test_sections_of_a_multimodal_model_shrink(tmp_path: Path) -> None:
    small, _, changes = shrink(run_config(source=write(tmp_path, MULTIMODAL)), 2)
    after = {change.key: change.after for change in changes}
    assert after["model.config.text_config.layer_types"] == [SLIDING, FULL]
    assert after["model.config.vision_config.num_hidden_layers"] == 2
    assert after["model.config.image_token_index"] < after["model.config.text_config.vocab_size"]
    assert sum(parameter.numel() for parameter in built(small).parameters()) < 2_000_000


@OF_PINNED
def test_layers_with_a_config_of_their_own(tmp_path: Path) -> None:
    """Gemma 4: wider heads in layers of full attention, said by per_layer_config."""
    small, _, changes = shrink(run_config(source=write(tmp_path, {"model_type": "gemma4"})), 2)
    after = {change.key: change.after for change in changes}
    assert after["model.config.text_config.per_layer_config"] == {"1": {"head_dim": 16}}
    assert after["model.config.text_config.head_dim"] == 8
    assert built(small).config.get_text_config().num_hidden_layers == 2


def test_what_would_be_lost_is_named() -> None:
    with pytest.raises(ModelError, match=r"BltForCausalLM cannot be shrunk: .*--full audits it as it is"):
        shrunk({"model_type": "blt"}, 2)
    with refuses(ConfigError, "model.config.type"):
        shrink(run_config({"model_type": "lama", "vocab_size": 100}), 2)


def test_attention_of_gpus_is_left_out() -> None:
    _, _, changes = shrink(run_config(source={"config": LLAMA, "attn_implementation": "flash_attention_2"}), 2)
    assert changes[0] == Change("model.attn_implementation", "flash_attention_2", None, "not for CPUs")


# -- layouts --------------------------------------------------------------------------------------------------------------

LAYOUTS: list[tuple[dict[str, int | None], int | None, int, dict[str, int]]] = [
    # layout, --nproc, processes, axes above 1
    ({}, None, 2, {"dp_shard": 2}),
    ({"dp_shard": 512}, None, 2, {"dp_shard": 2}),
    ({"dp_shard": 512}, 4, 4, {"dp_shard": 4}),
    ({"dp_replicate": 8, "dp_shard": 64}, None, 4, {"dp_replicate": 2, "dp_shard": 2}),
    ({"dp_replicate": 64, "dp_shard": 8}, 8, 8, {"dp_replicate": 2, "dp_shard": 4}),
    ({"dp_replicate": 9, "dp_shard": 8}, None, 6, {"dp_replicate": 3, "dp_shard": 2}),
    ({"dp_replicate": 8, "dp_shard": None, "tp": 4}, 8, 8, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
    ({"dp_replicate": 8, "dp_shard": None, "tp": 4}, None, 8, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
    ({"dp_shard": None, "tp": 8}, 8, 8, {"tp": 8}),  # resolves: it stays
    ({"dp_shard": None, "tp": 8}, 4, 4, {"dp_shard": 2, "tp": 2}),
    ({"dp_shard": 16, "tp": None}, 8, 8, {"dp_shard": 2, "tp": 4}),
    ({"dp_shard": 2, "pp": 4, "cp": 8}, None, 8, {"dp_shard": 2, "pp": 2, "cp": 2}),
    ({"dp_shard": 64, "ep": 8}, None, 4, {"dp_shard": 4, "ep": 2}),  # experts keep FSDP of their own
    ({"dp_shard": 64, "ep": 8}, 2, 2, {"dp_shard": 2, "ep": 2}),
    ({"dp_shard": 8, "ep": 8}, None, 2, {"dp_shard": 2, "ep": 2}),  # they had none
    ({"dp_shard": None, "tp": 2, "ep": 8}, None, 4, {"dp_shard": 2, "tp": 2, "ep": 2}),
    ({"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2}, 16, 16, {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2}),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("layout", "nproc", "processes", "above"), LAYOUTS, ids=str)
def test_layouts(layout: dict[str, int | None], nproc: int | None, processes: int, above: dict[str, int]) -> None:
    config = run_config(MIXTRAL, layout=layout, training={"global_batch_size": 72 * 1024})
    small, world_size, changes = shrink(config, nproc)
    resolved = make_setup(small, world_size).layout
    sizes = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1, **above}
    assert (world_size, resolved) == (processes, Layout(**sizes))
    assert {change.key for change in changes if change.key.startswith("layout.")} == {
        f"layout.{axis}" for axis, size in layout.items() if size is not None and size != above[axis]
    }
    for axis, size in layout.items():
        assert (getattr(small.layout, axis) is None) == (size is None)
    assert small.training.global_batch_size == 3 * resolved.size("dp")


@pytest.mark.parametrize(("nproc", "given", "expected"), [(4, None, 4), (4, 2, 2), (1, None, 2), (64, None, 2)])
def test_processes_of_the_run(nproc: int, given: int | None, expected: int) -> None:
    assert shrink(run_config(nproc=nproc), given)[1] == expected


@pytest.mark.parametrize(
    ("layout", "nproc", "message"),
    [
        ({"dp_replicate": 8, "dp_shard": None, "tp": 4}, 4, "layout.tp: stay above 1; the smallest legal --nproc is 8"),
        ({"dp_shard": 27}, 2, "layout.dp_shard: stays above 1; the smallest legal --nproc is 3, legal are 3"),
        ({"pp": 2, "dp_replicate": 3, "dp_shard": 8, "tp": 2}, None, "which needs at least 24 processes; ask for them"),
        ({"dp_shard": 1}, 2, "nothing to compare"),
        ({}, 1, "--nproc=1: an audit compares one process with at least 2"),
        ({"tp": 64}, 2, "tp=64: 32 attention heads cannot be divided by 64"),
        ({"pp": 40, "dp_shard": 2}, 4, "pp=40: 32 layers make at most 32 stages"),
        ({"ep": 3}, 2, "ep=3: 8 experts cannot be divided by 3; legal are 1, 2, 4, 8"),
        ({"dp_shard": 3, "ep": 2}, 2, "ep=2: a replica has dp_shard * cp * tp = 3"),
        ({"dp_shard": None, "tp": None}, 2, "only one can be inferred"),
        ({"tp": 0}, 2, "tp=0: must be a positive whole number"),
    ],
)
def test_layouts_that_cannot_be_audited(layout: dict[str, Any], nproc: int | None, message: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        shrink(run_config(MIXTRAL, layout=layout, training={"global_batch_size": 27 * 1024}), nproc)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b", "qwen3-30b", "glm4-moe", "gpt-oss-20b", "deepseek-v3"])
@pytest.mark.parametrize("sizes", [{"tp": 8}, {"tp": 4, "dp_shard": 2}, {"pp": 8}, {"ep": 8}, {"ep": 4, "tp": 2}], ids=str)
def test_what_a_layout_divides_stays_divisible(name: str, sizes: dict[str, int]) -> None:
    layout = {"dp_shard": None, **sizes}
    if name.startswith("llama") and "ep" in sizes:
        layout.pop("ep")
    if sizes.get("tp") == 8 and name.startswith("qwen3"):
        layout["tp"] = 4  # it has four heads of keys
    small, _ = shrunk(FAMILIES[name], 8, layout=layout)
    setup = make_setup(small, 8)
    assert model_sizes(setup.spec, setup.model).problems(setup.layout) == []
    assert setup.layout == Layout(**layout).resolve(8)  # type: ignore[arg-type]


def test_heads_that_a_layout_does_not_divide_are_refused_as_in_training() -> None:
    with pytest.raises(
        LayoutError, match="tp=3: 4 key/value heads cannot be divided by 3; legal are 1, 2, 4, and multiples of 4"
    ):
        shrink(run_config(QWEN3_MOE, layout={"tp": 3}), 2)


# -- batches --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "batch", "micro", "expected"),
    [
        ({"dp_shard": 512}, 1024, 1, (1, 4)),  # 2 microbatches
        ({"dp_shard": 512}, 1024, 2, (2, 4)),  # 1
        ({"dp_shard": 512}, 65536, 8, (2, 12)),  # 16, of which 3 are kept
        ({}, 1024, 4, (2, 12)),  # of an unknown number of ranks
        ({}, 2, 1, (1, 2)),
        ({"dp_shard": 1, "tp": 2}, 5, 1, (1, 3)),
    ],
)
def test_batches(layout: dict[str, Any], batch: int, micro: int, expected: tuple[int, int]) -> None:
    config = run_config(layout=layout, training={"global_batch_size": batch, "microbatch_size": micro})
    small, _, _ = shrink(config)
    assert (small.training.microbatch_size, small.training.global_batch_size) == expected
    assert (small.data.sequence_length, small.training.steps) == (64, config.training.steps)


def test_batches_that_training_refuses_are_refused() -> None:
    with pytest.raises(ConfigError, match="global_batch_size=1000 is no multiple"):
        shrink(run_config(layout={"dp_shard": 512}, training={"global_batch_size": 1000}))
    with pytest.raises(ConfigError, match="global_batch_size=1 is no multiple of microbatch_size=1 x 2 data ranks"):
        shrink(run_config(training={"global_batch_size": 1}))


def test_sequences_for_context_parallel() -> None:
    small, _, _ = shrink(run_config(layout={"cp": 3, "dp_shard": 1}, data={"sequence_length": 4092}))
    assert small.data.sequence_length == 60


# -- patterns -------------------------------------------------------------------------------------------------------------


def patterns(model: dict[str, Any], **parallel: Any) -> tuple[list[str], dict[str, str], int]:
    small, changes = shrunk(model, parallel=parallel)
    make_setup(small, 2)  # the patterns match
    assert ("parallel.freeze" in changes) == (small.parallel.freeze != parallel.get("freeze", []))
    assert small.model.config is not None
    return small.parallel.freeze, dict(small.parallel.sync_units), small.model.config["num_hidden_layers"]


def test_patterns_without_a_number_stay() -> None:
    freeze = ["model.embed_tokens.weight", "model.layers.*.mlp.**"]
    assert patterns(LLAMA, freeze=freeze, sync_units={"model.layers.*": "reduce_each"}) == (
        freeze, {"model.layers.*": "reduce_each"}, 2
    )  # fmt: skip


@pytest.mark.thorough
def test_numbered_patterns_name_the_layer_of_the_same_kind_that_stays() -> None:
    frozen = [f"model.layers.{index}.**" for index in range(16)]
    assert patterns(LLAMA, freeze=frozen) == (["model.layers.0.**"], {}, 2)
    assert patterns(LLAMA, freeze=["model.layers.31.self_attn.**"]) == (["model.layers.1.self_attn.**"], {}, 2)
    assert patterns(LLAMA, freeze=["model.layers.1*.mlp.**"]) == (["model.layers.1.mlp.**"], {}, 2)
    assert patterns(LLAMA, sync_units={"model.layers.*": "defer", "model.layers.30": "reduce_each"}) == (
        [], {"model.layers.*": "defer", "model.layers.1": "reduce_each"}, 2
    )  # fmt: skip
    # Three kinds: sliding and frozen, sliding, full.
    assert patterns(GEMMA3, freeze=["model.layers.0.**", "model.layers.1.**"]) == (["model.layers.0.**"], {}, 3)
    # Where layers keep their places, all up to the last kind stay.
    moe = FAMILIES["qwen3-moe-every-third"]
    assert patterns(moe, freeze=["model.layers.3.**"]) == (["model.layers.3.**"], {}, 4)


def test_layers_that_are_recomputed_otherwise_stay() -> None:
    modes = {"model.layers.*": "selective", "model.layers.0": "none", "model.layers.31": "full"}
    small, _ = shrunk(LLAMA, parallel={"activation_checkpointing_layers": modes, "sync_units": {"model.layers.5": "defer"}})
    assert small.parallel.activation_checkpointing_layers == {
        "model.layers.*": "selective", "model.layers.0": "none", "model.layers.3": "full"
    }  # fmt: skip
    assert small.parallel.sync_units == {"model.layers.2": "defer"}
    assert [make_setup(small, 2).plan.unit(f"model.layers.{index}").activation_checkpointing for index in range(4)] == [
        "none", "selective", "selective", "full"
    ]  # fmt: skip


def test_parameters_that_are_not_decayed_stay_so() -> None:
    small, changes = shrunk(LLAMA, optimizer={"no_decay": ["model.layers.31.mlp.**", "lm_head.weight"]})
    assert small.optimizer.no_decay == ["model.layers.1.mlp.**", "lm_head.weight"]
    assert "optimizer.no_decay" in changes
    excepted = {row.name for row in make_setup(small, 2).plan.parameters if not row.decayed and len(row.shape) > 1}
    assert excepted == {"lm_head.weight", *(f"model.layers.1.mlp.{own}_proj.weight" for own in ("gate", "up", "down"))}


def test_patterns_of_other_lists_keep_their_numbers() -> None:
    assert patterns(FAMILIES["mamba2"], freeze=["backbone.layers.63.mixer.conv1d.*"])[0] == ["backbone.layers.1.mixer.conv1d.*"]
    assert patterns(FAMILIES["opt"], freeze=["model.decoder.layers.*.fc1.*"])[0] == ["model.decoder.layers.*.fc1.*"]


def test_a_number_that_no_layer_has_stays_an_error_of_the_plan() -> None:
    small, _ = shrunk(LLAMA, parallel={"freeze": ["model.layers.32.**"]})
    assert small.parallel.freeze == ["model.layers.32.**"]


def test_patterns_that_cannot_be_rewritten_are_refused(tmp_path: Path) -> None:
    """Only the language model's layers are followed; of others the first two stay."""
    source = write(tmp_path, MULTIMODAL)
    tower = "model.vision_tower.encoder.layers"
    for pattern in (f"{tower}.*.**", f"{tower}.1.**"):
        shrink(run_config(source=source, parallel={"freeze": [pattern]}), 2)
    with pytest.raises(ConfigError, match=r"keeps only layers 0, 5, .* 'model\.vision_tower.*' would match nothing"):
        shrink(run_config(source=source, parallel={"freeze": [f"{tower}.7.**"]}), 2)


# -- examples -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("example", "world_size", "batch"), [("llama_8b", 2, 6), ("quickstart", 2, 8)])
def test_examples(example: str, world_size: int, batch: int) -> None:
    config = load_config(Path(__file__).parents[2] / "examples" / f"{example}.yaml")
    small, processes, changes = shrink(config)
    assert (processes, small.training.global_batch_size) == (world_size, batch)
    assert make_setup(small, processes).model.num_parameters() < 200_000
    assert small.optimizer == config.optimizer
    chunks = [change for change in changes if change.key == "parallel.loss_chunks"]
    assert [(change.before, change.after) for change in chunks] == (
        [(None, 3)] if example == "llama_8b" else []
    )  # 16 of the 8B
    others = (change.key.split(".")[0] for change in changes if change not in chunks)
    assert set(others) <= {"model", "data", "training"}

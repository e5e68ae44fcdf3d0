"""The default configs of the causal language models of transformers, and what some of them lack."""

from collections.abc import Mapping
from typing import Any

__all__ = ["MISSING_DEFAULTS", "model_types"]

_DECODER: Mapping[str, Any] = {"is_decoder": True}
_INDEXER: Mapping[str, Any] = {
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 64, "indexer_compress_ratio": 16,
}  # fmt: skip
_ALONE: Mapping[str, Any] = {"is_decoder": True, "is_encoder_decoder": False}

MISSING_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(
        ("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "reformer",
         "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
        _DECODER,
    ),
    **dict.fromkeys(
        ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart",
         "prophetnet"),
        _ALONE,
    ),
    "xlm": {"causal": True},
    "xmod": {**_DECODER, "default_language": "en_XX"},
    "big_bird": {**_DECODER, "attention_type": "original_full"},  # the other kind draws random blocks
    "bigbird_pegasus": {**_ALONE, "attention_type": "original_full"},
    "nemotron": {"num_key_value_heads": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "ministral": {"head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "dbrx": {"attn_config": {"rope_theta": 10000.0}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
}  # fmt: skip
"""Values that a default config lacks for a causal language model, by model type."""


def model_types() -> list[str]:
    """Return the types of all causal language models that the installed transformers knows."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

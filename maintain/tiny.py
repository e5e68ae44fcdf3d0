"""Tiny models for the support matrix: one row for each family, with what makes the family different from the others.

Another one is added here as an entry. Keys are those of its config in transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["HEADS", "TINY", "TINY_MODELS", "TinyModel"]


@dataclass(frozen=True)
class TinyModel:
    """A model that one process trains in seconds.

    Attributes:
        config: its config, without ``model_type`` unless that is not the name of the row.
        twins: whether it has a stack that runs twice, under two names.
        whole_logits: whether its head is not known, so that its logits cannot stay sharded.
    """

    config: Mapping[str, Any]
    twins: bool = False
    whole_logits: bool = False

    @property
    def sparse(self) -> bool:
        """Whether it has experts."""
        return any("experts" in key for key in self.config.get("text_config", self.config))


TINY: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes that most families share. The vocabulary is no multiple of any number of ranks, so shards are uneven."""

HEADS = {**TINY, "head_dim": 8}

_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": HEADS,
    "mistral": {**HEADS, "sliding_window": 8},
    "qwen2": {**TINY, "tie_word_embeddings": True},  # biases of queries, keys and values; tied
    "qwen3": HEADS,  # norms of queries and keys
    "gemma3_text": {**HEADS, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},  # tied
    "gemma4_text": {
        **HEADS, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "global_head_dim": 16,
    },
    "gemma4_moe": {
        **HEADS, "model_type": "gemma4_text", "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "global_head_dim": 16,
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
    },  # experts beside a dense MLP
    "gemma3n_text": {
        **HEADS, "intermediate_size": [48] * 4, "num_hidden_layers": 4, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0], "num_kv_shared_layers": 2, "laurel_rank": 4,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 67,
    },  # statistics over the features of an MLP, keys shared between layers, an embedding for each layer
    "phi3": {**TINY, "resid_pdrop": 0.0},  # one matrix for queries, keys and values
    "olmo2": TINY,  # norms after the sublayers
    "gpt2": {
        "vocab_size": 67, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    },  # biases everywhere, learned positions, tied
    "opt": {
        "vocab_size": 67, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    },  # an attention that counts its heads, learned positions
    "mixtral": {**HEADS, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **TINY, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0],
    },  # a dense layer, then experts
    "gpt_oss": {
        **HEADS, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "rope_theta": 1e4,
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        },
    },  # attention sinks, experts with biases
    "deepseek_v3": {
        **TINY, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 32,
    },  # latent attention, grouped routing, shared expert
    "nemotron_h": {
        **{key: value for key, value in HEADS.items() if key != "num_hidden_layers"},
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "conv_kernel": 4, "chunk_size": 16,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32, "moe_latent_size": 16,
    },  # one block each of Mamba-2, experts behind a projection, attention and an MLP
    "diffusion_gemma": {
        "canvas_length": 8,
        "text_config": {
            **HEADS, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "global_head_dim": 16,
            "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
        },
        "vision_config": {
            "model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16,
        },
    },  # a stack of experts that runs three times in a step, under two names; it denoises blocks
}  # fmt: skip

TINY_MODELS = {
    name: TinyModel(config, twins=name == "diffusion_gemma", whole_logits=name in ("gpt2", "opt"))
    for name, config in _CONFIGS.items()
}
"""Rows of the support matrix: ``model_type``, or another name for a further model of the same type, to the model."""

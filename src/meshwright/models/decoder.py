"""Decoders built like Llama: what is known of the inside of their layers, for tensor, sequence and loss parallel.

In all of them a layer adds to the residual stream what its attention makes of a norm of it, then what its MLP (or its experts)
makes of another; norms stand before, after or on both sides. So the attention and the MLP are the regions that need the whole
sequence, and all else treats each token alone. A family that is not like this does not belong here.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from meshwright.plan.spec import Structure

__all__ = ["declared_structure", "global_heads", "structure_of"]

LLAMA = Structure(
    regions=("model.layers.*.self_attn", "model.layers.*.mlp"),
    tokenwise=("model.norm",),
    head="lm_head",
    kv_projections=("model.layers.*.self_attn.k_proj", "model.layers.*.self_attn.v_proj"),
    uses_all_parameters=True,
)
"""Also of what differs from Llama only in norms, biases, windows or experts."""

_REPLICATED_ATTENTION = replace(LLAMA, kv_projections=())
"""Attention that every rank computes whole: latent (DeepSeek), or with norms across all heads (OLMo 2)."""

_MATRICES = {
    "model.embed_tokens": "embedding_rowwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}


def _phi3(config: Any) -> Structure:
    """One matrix makes queries, keys and values, and one makes gate and up; transformers leaves both parts replicated."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads, kv_heads = config.num_attention_heads * width, config.num_key_value_heads * width
    qkv = "model.layers.*.self_attn.qkv_proj"
    return replace(
        LLAMA,
        styles={**_MATRICES, qkv: "fused_colwise", "model.layers.*.mlp.gate_up_proj": "packed_colwise"},
        kv_projections=(),
        fused={qkv: (heads, kv_heads, kv_heads)},
    )


def _gpt_oss(config: Any) -> Structure:
    """Attention over heads, each with its sink; experts are computed whole, for their gate and up are interleaved."""
    attention = "model.layers.*.self_attn"
    colwise = {f"{attention}.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj", "sinks")}
    styles = {name: style for name, style in _MATRICES.items() if ".mlp." not in name}
    return replace(LLAMA, styles={**styles, **colwise})


def global_heads(config: Any) -> tuple[tuple[str, int], ...]:
    """Heads of keys and values that layers of a Gemma 4 have, as what ``tp`` must divide."""
    layers = getattr(config, "per_layer_config", None)  # transformers 5.17 had one number for all global layers
    heads = (
        {getattr(config, "num_global_key_value_heads", None)}
        if layers is None
        else {getattr(layers[index], "num_key_value_heads", None) for index in range(config.num_hidden_layers)}
    )
    return tuple(("key/value heads of a layer", number) for number in sorted(filter(None, heads)))


def _gemma4(config: Any) -> Structure:
    """Its global layers have heads of their own, so keys and values are not shared by groups of ranks."""
    known = replace(LLAMA, kv_projections=(), divisible=global_heads(config))
    if getattr(config, "hidden_size_per_layer_input", 0):
        return replace(
            known, no_sequence_parallel="each layer adds an embedding of the whole sequence (hidden_size_per_layer_input)"
        )
    if getattr(config, "enable_moe_block", False):
        return replace(known, no_sequence_parallel="its router reads the residual stream itself (enable_moe_block)")
    return known


_GEMMA3N = Structure(
    head="lm_head", no_sequence_parallel="each layer adds an embedding of the whole sequence (hidden_size_per_layer_input)"
)
"""Its layers carry several streams (AltUp) and reuse keys of others, so their inside is not that of a Llama."""

_KNOWN: dict[str, Structure | Callable[[Any], Structure]] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "Qwen2ForCausalLM": LLAMA,
    "Qwen3ForCausalLM": LLAMA,
    "Gemma3ForCausalLM": LLAMA,
    "Gemma3nForCausalLM": _GEMMA3N,
    "MixtralForCausalLM": LLAMA,
    "Qwen3MoeForCausalLM": LLAMA,
    "Olmo2ForCausalLM": _REPLICATED_ATTENTION,
    "DeepseekV3ForCausalLM": _REPLICATED_ATTENTION,
    "Phi3ForCausalLM": _phi3,
    "GptOssForCausalLM": _gpt_oss,
    "Gemma4ForCausalLM": _gemma4,
}


def structure_of(names: Sequence[str], config: Any) -> Structure | None:
    """Of the first model class that is known, of those that a model inherits from; ``None`` where none is."""
    known = next((_KNOWN[name] for name in names if name in _KNOWN), None)
    return known(config) if callable(known) else known


def declared_structure(kind: type) -> bool:
    """Whether a class itself is one of transformers that is known here, and not one that inherits from it."""
    return kind.__name__ in _KNOWN and kind.__module__.startswith("transformers.")

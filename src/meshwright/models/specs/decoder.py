"""Decoders built like Llama: the known structure of their layers, for tensor, sequence and loss parallel.

In all of them, a layer computes attention of a norm of the residual stream and adds the result to the stream, then does the
same with its MLP (or its experts) and another norm. Norms are before, after, or on both sides. So attention and MLP are the
regions that need the whole sequence, and everything else treats each token separately. A family with another structure does not
belong here.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from meshwright.plan.given.spec import Structure

__all__ = ["declared_structure", "global_heads", "structure_of"]

LLAMA = Structure(
    regions=("model.layers.*.self_attn", "model.layers.*.mlp"),
    tokenwise=("model.norm",),
    head="lm_head",
    kv_projections=("model.layers.*.self_attn.k_proj", "model.layers.*.self_attn.v_proj"),
    uses_all_parameters=True,
)
"""Also for families that differ from Llama only in norms, biases, windows or experts."""

_REPLICATED_ATTENTION = replace(LLAMA, kv_projections=())
"""For attention that every rank computes whole: latent attention (DeepSeek), or with norms across all heads (OLMo 2)."""

_MATRICES = {
    "model.embed_tokens": "embedding_rowwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}


def _phi3(config: Any) -> Structure:
    """Return the structure for models with one matrix for queries, keys and values, and one for gate and up.

    transformers leaves both replicated.
    """
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
    """Return the structure for attention with a sink for each head. Experts stay whole: their gate and up are interleaved.

    Up to transformers 5.23, its model makes masks without positions, so that packed documents see each other.
    """
    attention = "model.layers.*.self_attn"
    colwise = {f"{attention}.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj", "sinks")}
    styles = {name: style for name, style in _MATRICES.items() if ".mlp." not in name}
    return replace(LLAMA, styles={**styles, **colwise}, leaks_documents=True)


def global_heads(config: Any) -> tuple[tuple[str, int], ...]:
    """Return the numbers of key/value heads that layers of a Gemma 4 have, with a description: ``tp`` must divide them."""
    layers = getattr(config, "per_layer_config", None)  # transformers 5.17 had one number for all global layers
    heads = (
        {getattr(config, "num_global_key_value_heads", None)}
        if layers is None
        else {getattr(layers[index], "num_key_value_heads", None) for index in range(config.num_hidden_layers)}
    )
    return tuple(("key/value head of a layer", number) for number in sorted(filter(None, heads)))


def _gemma4(config: Any) -> Structure:
    """Return the structure of Gemma 4.

    Its global layers have a number of key/value heads of their own, which ``tp`` must divide, too. Several ranks do not share a
    key/value head.
    """
    known = replace(LLAMA, kv_projections=(), divisible=global_heads(config))
    if getattr(config, "hidden_size_per_layer_input", 0):
        return replace(
            known, no_sequence_parallel="each layer adds an embedding of the whole sequence (hidden_size_per_layer_input)"
        )
    if getattr(config, "enable_moe_block", False):
        return replace(known, stream_traced=True)  # its router and its experts read the residual stream itself
    return known


_GEMMA3N = Structure(
    head="lm_head", no_sequence_parallel="each layer adds an embedding of the whole sequence (hidden_size_per_layer_input)"
)
"""Its layers have several streams (AltUp) and reuse keys of other layers, so their structure is not that of a Llama."""

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
    """Return the structure of the first known class among the classes that a model inherits from; ``None`` if none is known.

    Args:
        names: names of the classes, nearest first.
        config: the config of the model.
    """
    known = next((_KNOWN[name] for name in names if name in _KNOWN), None)
    return known(config) if callable(known) else known


def declared_structure(kind: type) -> bool:
    """Return whether a class itself is a class of transformers that is known here, and not a subclass of one."""
    return kind.__name__ in _KNOWN and kind.__module__.startswith("transformers.")

"""A tiny DiffusionGemma, and tiny runs of it."""

from typing import Any

import torch

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 64,
}
VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "position_embedding_size": 16,
}
CONFIG = {"model_type": "diffusion_gemma", "canvas_length": 8, "text_config": TEXT, "vision_config": VISION}
TOKENS = {"vocab_size": 67, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

RUN = (f"model.config={CONFIG}", "data.packing=pad")
"""Overrides that make a tiny run one of DiffusionGemma."""


def tiny_diffusion_gemma(attention: str = "sdpa", *, seed: int = 0, **text: Any) -> Any:
    """In fp32, with weights that make attention and experts matter, and a scalar of its own in each layer of both stacks."""
    from transformers import AutoConfig, DiffusionGemmaForBlockDiffusion

    config = AutoConfig.for_model(**{**CONFIG, "text_config": {**TEXT, **TOKENS, "initializer_range": 0.3, **text}})
    torch.manual_seed(seed)
    model = DiffusionGemmaForBlockDiffusion._from_config(config, dtype=torch.float32, attn_implementation=attention)
    model.config.use_cache = False
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.9 if "decoder" in name else 0.8)
    return model


def texts(rows: int, length: int, prompts: tuple[int, ...] = (), seed: int = 1) -> dict[str, torch.Tensor]:
    """A batch as a loader gives it: random tokens, labels shifted; ``prompts``: tokens of each row that are not learned."""
    ids = torch.randint(3, TOKENS["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.roll(-1, dims=1)
    labels[:, -1] = -100
    for row, prompt in enumerate(prompts):
        labels[row, : max(0, prompt - 1)] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(length).expand(rows, length).clone()}

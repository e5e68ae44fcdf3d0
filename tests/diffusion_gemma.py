"""A tiny DiffusionGemma, and tiny runs of it."""

from typing import Any

import torch

from maintain.tiny import TINY_MODELS

TINY = TINY_MODELS["diffusion_gemma"].config
TOKENS = {key: value for key, value in TINY["text_config"].items() if key == "vocab_size" or key.endswith("_token_id")}
TEXT = {key: value for key, value in TINY["text_config"].items() if key not in TOKENS}  # a tokenizer says the others
CONFIG = {"model_type": "diffusion_gemma", **TINY, "text_config": TEXT}

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

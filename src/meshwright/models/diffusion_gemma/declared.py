"""The family of DiffusionGemma, as the rest of the package sees it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshwright.models.diffusion_gemma.generation import denoise
from meshwright.models.diffusion_gemma.shared_stack import DiffusionGemmaParallelizationStrategy
from meshwright.models.families.family import Family, Sampling
from meshwright.models.families.tiny import HEADS, TinyModel
from meshwright.models.objective import Objective

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["FAMILY"]

_TINY = {
    "canvas_length": 8,
    "text_config": {
        **HEADS, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "global_head_dim": 16,
        "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
    },
    "vision_config": {
        "model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16,
    },
}  # fmt: skip
"""A stack of experts that runs three times in a step, under two names; it denoises blocks."""


class _DiffusionGemma(Family):
    def objective(self) -> type[Objective]:
        """Return block diffusion."""
        from meshwright.models.diffusion_gemma.block_diffusion import BlockDiffusion  # imported on use, to stay light

        return BlockDiffusion

    def auto_class(self) -> Any:
        """Return the auto class of models that also read images; no other one knows this model."""
        from transformers import AutoModelForImageTextToText

        return AutoModelForImageTextToText

    def generate(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        inputs: "Mapping[str, torch.Tensor]",
        sampling: Sampling,
    ) -> str:
        """Continue a prompt canvas by canvas."""
        return denoise(model, tokenizer, inputs["input_ids"], sampling)


FAMILY = _DiffusionGemma(
    "diffusion_gemma",
    ("DiffusionGemmaForBlockDiffusion",),
    DiffusionGemmaParallelizationStrategy,
    TinyModel(_TINY, twins=True),
)

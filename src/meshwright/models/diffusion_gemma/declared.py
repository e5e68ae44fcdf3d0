"""The family of DiffusionGemma, as the rest of the package sees it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshwright.models.diffusion_gemma.generation import denoise
from meshwright.models.diffusion_gemma.shared_stack import DiffusionGemmaParallelizationStrategy
from meshwright.models.families.family import Family, Sampling
from meshwright.models.objective import Objective

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["FAMILY"]


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
)

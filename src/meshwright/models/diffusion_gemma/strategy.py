"""How DiffusionGemma is sharded: what of its spec differs from the derived one."""

from dataclasses import replace

from torch import nn

from meshwright.distributed.strategy import ParallelizationStrategy, register_parallel_strategy
from meshwright.models.spec import derived_spec
from meshwright.plan.spec import ParallelSpec

__all__ = ["DiffusionGemmaParallelizationStrategy"]

_STACKS = ("model.encoder.language_model.layers.", "model.decoder.layers.")


@register_parallel_strategy("DiffusionGemmaForBlockDiffusion")
class DiffusionGemmaParallelizationStrategy(ParallelizationStrategy):
    """Of ``DiffusionGemmaForBlockDiffusion`` of transformers.

    A layer of the encoder and the decoder's layer of the same number are two modules with the same parameters, so neither can
    be a unit alone: both stacks are left to the root, which is gathered once a step.
    """

    def spec(self, model: nn.Module, param_dtype: str | None = "bfloat16") -> ParallelSpec:
        """What the model declares of itself, without the layers of the two stacks, and without the plans for one of them."""
        derived = derived_spec(model, param_dtype)
        layers = tuple(pattern for pattern in derived.layers if not pattern.startswith(_STACKS))
        return replace(derived, layers=layers, tp_styles={}, ep_styles={})

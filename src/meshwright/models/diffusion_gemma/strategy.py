"""How DiffusionGemma is sharded: what of its spec differs from the derived one."""

from dataclasses import replace

from torch import nn

from meshwright.distributed.strategy import ParallelizationStrategy, register_parallel_strategy
from meshwright.models.spec import derived_spec
from meshwright.plan.spec import ParallelSpec

__all__ = ["DiffusionGemmaParallelizationStrategy"]


@register_parallel_strategy("DiffusionGemmaForBlockDiffusion")
class DiffusionGemmaParallelizationStrategy(ParallelizationStrategy):
    """Of ``DiffusionGemmaForBlockDiffusion`` of transformers.

    The one unit beside the root is the MLP of self-conditioning. All else is left to the root, which is gathered once a step:

    - a layer of the encoder and the decoder's layer of the same number are two modules with the same parameters, so neither
      can be a unit alone;
    - the vision tower never runs in training on text, and torch's FSDP fails at a unit that never ran, where gradients are
      kept from one microbatch to the next in another dtype than they are reduced in.
    """

    def spec(self, model: nn.Module, param_dtype: str | None = "bfloat16") -> ParallelSpec:
        """What the model declares of itself, with that unit, and without the plans of tensor and expert parallel, which name
        the encoder alone.
        """
        derived = derived_spec(model, param_dtype)
        return replace(derived, layers=("model.decoder.self_conditioning",), units=(), tp_styles={}, ep_styles={})

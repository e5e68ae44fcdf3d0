"""How DiffusionGemma is sharded: what of its spec differs from the derived one.

A layer of the encoder and the decoder's layer of the same number are two modules with the same parameters, so the two stacks
are twins. In a training step the decoder runs twice, the first time without gradient.

The embedding is used outside of its own forward, by self-conditioning, and is the output head too. So it is whole on every
rank of `tp` and belongs to the root unit, which stays gathered. The model's own tensor parallel styles name the encoder alone;
the decoder's are the same.
"""

from dataclasses import replace

from torch import nn

from meshwright.distributed.mesh import ParallelMesh
from meshwright.distributed.strategy import ParallelizationStrategy
from meshwright.models.decoder import global_heads
from meshwright.models.diffusion_gemma.fsdp import enable_generate
from meshwright.models.spec import derived_spec
from meshwright.plan.sharding_plan import ROOT, ShardingPlan
from meshwright.plan.spec import ParallelSpec, Structure, TwinStacks, UnitRule

__all__ = ["DECODER", "ENCODER", "DiffusionGemmaParallelizationStrategy"]

ENCODER = "model.encoder.language_model.layers.*"
DECODER = "model.decoder.layers.*"
_VISION = ("model.encoder.vision_tower.**", "model.encoder.embed_vision")


class DiffusionGemmaParallelizationStrategy(ParallelizationStrategy):
    """Of ``DiffusionGemmaForBlockDiffusion`` of transformers."""

    def spec(self, model: nn.Module, param_dtype: str | None = "bfloat16") -> ParallelSpec:
        """What the model declares of itself, completed for the decoder; what reads images has units of its own, at rest."""
        derived = derived_spec(model, param_dtype)
        styles = {
            pattern.replace(ENCODER, stack): style
            for stack in (ENCODER, DECODER)
            for pattern, style in derived.tp_styles.items()
            if pattern.startswith(ENCODER)
        }
        structure = Structure(
            styles=styles,
            regions=tuple(f"{stack}.{part}" for stack in (ENCODER, DECODER) for part in ("self_attn", "mlp")),
            divisible=global_heads(model.config.get_text_config()),  # type: ignore[union-attr, operator]
            no_sequence_parallel="its two stacks have sequences of different lengths, and its router reads the residual stream",
        )
        return replace(
            derived,
            units=(*derived.units, UnitRule("model.encoder.embed_vision")),
            twins=(TwinStacks(ENCODER, DECODER, forwards=2),),
            idle=_VISION,
            tp_styles=styles,
            structure=structure,
        )

    def carry_out(self, model: nn.Module, plan: ShardingPlan, mesh: ParallelMesh) -> nn.Module:
        """As always; and the model generates, and a loss of one's own may leave the encoder's output out."""
        from meshwright.models.diffusion_gemma.model import enable  # it registers this strategy

        model = super().carry_out(model, plan, mesh)
        enable(model, plan.unit(ROOT).output_dtype)
        enable_generate(model)
        return model

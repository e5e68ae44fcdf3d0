"""How DiffusionGemma is sharded: how its spec differs from the derived one.

A layer of the encoder and the decoder's layer with the same number are two modules with the same parameters, so the two stacks
are twins. In a training step the decoder runs twice, the first time without gradient.

The embedding is used outside of its own forward, by self-conditioning, and it is the output head too. So it is whole on every
rank of `tp`, and belongs to the root unit, which stays gathered. The tensor parallel styles that the model declares name only
the encoder; those of the decoder are the same.
"""

from dataclasses import replace
from functools import partial

from torch import nn

from meshwright.distributed.data.fsdp_units import enter_by
from meshwright.distributed.mesh import ParallelMesh
from meshwright.distributed.pipeline.cut import cut_of_model
from meshwright.distributed.pipeline.passes import set_passes
from meshwright.models.diffusion_gemma.model import enable
from meshwright.models.diffusion_gemma.stack_traces import StackTraces
from meshwright.models.diffusion_gemma.stage_passes import StagePasses
from meshwright.models.specs.decoder import global_heads
from meshwright.models.specs.derived import DefaultParallelizationStrategy, derived_spec, is_transformers
from meshwright.models.specs.plain_module import inferred_spec
from meshwright.plan.given.names import match_names
from meshwright.plan.given.spec import ParallelSpec, Structure, TwinStacks, UnitRule
from meshwright.plan.result.sharding_plan import ROOT, ShardingPlan

__all__ = ["DECODER", "ENCODER", "EXPERTS", "DiffusionGemmaParallelizationStrategy"]

ENCODER = "model.encoder.language_model.layers.*"
DECODER = "model.decoder.layers.*"
_VISION = ("model.encoder.vision_tower.**", "model.encoder.embed_vision")


EXPERTS = ("experts", "moe.experts")
"""Names of the experts in a layer: of transformers, and of NeMo AutoModel."""


class DiffusionGemmaParallelizationStrategy(DefaultParallelizationStrategy):
    """The strategy of ``DiffusionGemmaForBlockDiffusion`` of transformers.

    If a model has this class name but is not of transformers, its layers and their experts are units.
    """

    def spec(self, model: nn.Module, param_dtype: str | None = "bfloat16") -> ParallelSpec:
        """Return the declared spec, completed for the decoder. The modules that read images are idle, in units of their own."""
        if not is_transformers(model):
            plain, names = inferred_spec(model), [name for name, _ in model.named_modules()]
            experts = [f"{layer}.{inner}" for layer in plain.layers for inner in EXPERTS]
            return replace(plain, units=tuple(UnitRule(pattern) for pattern in experts if match_names(pattern, names)))
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
            stream_traced=True,
        )
        traces = partial(StackTraces, experts=derived.experts)
        return replace(
            derived,
            units=(*derived.units, UnitRule("model.encoder.embed_vision")),
            twins=(TwinStacks(ENCODER, DECODER, forwards=2),),
            idle=_VISION,
            tp_styles=styles,
            structure=structure,
            traces=traces,
        )

    def carry_out(self, model: nn.Module, plan: ShardingPlan, mesh: ParallelMesh) -> nn.Module:
        """Carry out a plan as usual, and prepare the model with :meth:`ready`."""
        return self.ready(super().carry_out(model, plan, mesh), plan.unit(ROOT).output_dtype, plan.sequence_multiple)

    def ready(self, model: nn.Module, output_dtype: str | None, multiple: int = 1) -> nn.Module:
        """Prepare a sharded model for ``generate``, and for a loss that does not use the encoder's output; return the model.

        Args:
            model: the model, whose root is a unit.
            output_dtype: dtype that the root casts outputs to.
            multiple: number that must divide the columns of a canvas.
        """
        if is_transformers(model):
            enable(model, output_dtype, multiple)
            if (cut := cut_of_model(model)) is not None and cut.passes > 1:
                set_passes(model, StagePasses(model))
            enter_by(model, "generate")  # it calls encoder and decoder directly, without the hooks of the root
        return model

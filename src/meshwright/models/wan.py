"""Wan: the video transformer of diffusers. It is no model of transformers, and declares nothing that a spec can use.

Tensor parallel splits the pairs of matrices with an elementwise function between them: the feed-forward of every block, the
text and time embedders, and the image embedder if there is one. `time_proj` and `proj_out` are single matrices between modules
that need whole tensors, so each is split along the dimension for which less has to be sent.

Attention stays whole on every rank. Its norms of queries and keys (`rms_norm_across_heads`) take the root mean square over all
heads of a token together. With heads split over ranks, each rank would normalize its own heads by themselves: this would raise
no error and give plausible losses, but compute another function than the one that was trained.

Under bf16, FSDP casts the floating-point inputs of a unit. So pass integer timesteps: in bf16, 999 becomes 1000. The angles of
the rotary embedding are cast too, as in language models.
"""

from torch import nn

from meshwright.distributed.names import class_name
from meshwright.errors import ModelError
from meshwright.models.family import Family
from meshwright.models.strategy import ParallelizationStrategy
from meshwright.plan.names import match_names
from meshwright.plan.spec import ParallelSpec, Structure, UnitRule

__all__ = ["FAMILY", "WanParallelizationStrategy"]

_TP_STYLES = {
    "blocks.*.ffn.net.0.proj": "colwise",
    "blocks.*.ffn.net.2": "rowwise",
    "condition_embedder.text_embedder.linear_1": "colwise",
    "condition_embedder.text_embedder.linear_2": "rowwise",
    "condition_embedder.time_embedder.linear_1": "colwise",
    "condition_embedder.time_embedder.linear_2": "rowwise",
    "condition_embedder.time_proj": "colwise_gather_output",  # six times as wide as its input, which has one row a sample
    "proj_out": "rowwise_split_input",  # its output, a patch, is far narrower than its input
}

_IMAGE_TP_STYLES = {
    "condition_embedder.image_embedder.ff.net.0.proj": "colwise",
    "condition_embedder.image_embedder.ff.net.2": "rowwise",
}
"""For models that take an image in addition to the text."""

_FP32 = (
    "condition_embedder.time_embedder",
    "blocks.*.norm2",
    "condition_embedder.image_embedder.norm1",
    "condition_embedder.image_embedder.norm2",
)
"""The modules with parameters among those that the class lists in `_keep_in_fp32_modules`. The list also has the tables of
shifts and scales. These are bare parameters of their blocks, which FSDP cannot cast separately, so they compute in the dtype of
the block."""


class WanParallelizationStrategy(ParallelizationStrategy):
    """The strategy of ``WanTransformer3DModel`` of diffusers."""

    def spec(self, model: nn.Module, param_dtype: str | None = "bfloat16") -> ParallelSpec:
        """Return the spec of a model of this class, of any size, with or without image input."""
        modules = dict(model.named_modules())
        if fused := [name for name, module in modules.items() if getattr(module, "fused_projections", False)]:
            raise ModelError(f"{fused[0]}: holds its projections twice, fused and not; call unfuse_projections() first")
        with_parameters = [name for name, module in modules.items() if any(True for _ in module.parameters())]
        image = {pattern: style for pattern, style in _IMAGE_TP_STYLES.items() if match_names(pattern, with_parameters)}
        return ParallelSpec(
            family=class_name(model),
            layers=("blocks.*",),
            # It runs first in forward and last in backward. In the root it would stay gathered all the time in between.
            units=(UnitRule("condition_embedder"),),
            fp32=tuple(pattern for pattern in _FP32 if match_names(pattern, with_parameters)),
            structure=Structure(
                styles={**_TP_STYLES, **image},
                no_sequence_parallel="its tokens are patches of a video, and its attention stays whole on every rank",
            ),
        )


FAMILY = Family("wan", ("WanTransformer3DModel",), WanParallelizationStrategy)

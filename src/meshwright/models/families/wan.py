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

from meshwright.distributed.class_names import class_name
from meshwright.errors import ModelError
from meshwright.models.families.family import Family
from meshwright.models.specs.plain_module import inferred_layers
from meshwright.models.specs.strategy import ParallelizationStrategy
from meshwright.plan.given.names import match_names
from meshwright.plan.given.spec import ParallelSpec, Structure, UnitRule

__all__ = ["FAMILY", "WanParallelizationStrategy"]

_PAIRS = (
    ("blocks.*.ffn.net.0.proj", "blocks.*.ffn.net.2"),
    ("condition_embedder.text_embedder.linear_1", "condition_embedder.text_embedder.linear_2"),
    ("condition_embedder.time_embedder.linear_1", "condition_embedder.time_embedder.linear_2"),
    ("condition_embedder.image_embedder.ff.net.0.proj", "condition_embedder.image_embedder.ff.net.2"),
)
"""Pairs of matrices with an elementwise function between them: colwise, then rowwise."""

_SINGLE = {
    "condition_embedder.time_proj": "colwise_gather_output",  # six times as wide as its input, which has one row a sample
    "proj_out": "rowwise_split_input",  # its output, a patch, is far narrower than its input
}
"""Styles of matrices between modules that need whole tensors."""

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
            raise ModelError(
                "model.fused", f"{fused[0]}: holds its projections twice, fused and not; call unfuse_projections() first"
            )
        with_parameters = [name for name, module in modules.items() if any(True for _ in module.parameters())]

        def has(*patterns: str) -> bool:  # a class of this name may lack an embedder, or all of them
            return all(match_names(pattern, with_parameters) for pattern in patterns)

        styles = {pattern: style for pattern, style in _SINGLE.items() if has(pattern)}
        for first, second in _PAIRS:
            styles |= {first: "colwise", second: "rowwise"} if has(first, second) else {}
        is_called = not isinstance(modules.get("condition_embedder"), nn.ModuleList | nn.ModuleDict)
        return ParallelSpec(
            family=class_name(model),
            layers=("blocks.*",) if has("blocks.*") else inferred_layers(model),
            # It runs first in forward and last in backward. In the root it would stay gathered all the time in between.
            units=(UnitRule("condition_embedder"),) if has("condition_embedder") and is_called else (),
            fp32=tuple(filter(has, _FP32)),
            structure=Structure(
                styles=styles,
                no_sequence_parallel="its tokens are patches of a video, and its attention stays whole on every rank",
            ),
        )


FAMILY = Family("wan", ("WanTransformer3DModel",), WanParallelizationStrategy)

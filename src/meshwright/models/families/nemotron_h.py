"""NemotronH: blocks of four kinds in one list (Mamba-2, attention, MLP, mixture of experts), distinguished by their mixer.

Tensor parallel splits the blocks that are a pair of matrices (MLP blocks, shared experts, routed experts), and the two
vocabulary matrices. How heads of Mamba mixers divide is read from their code (:mod:`meshwright.plan.axes.tensor.channels`).
They stay whole where `tp` does not divide their groups. Attention stays whole too: only one block in ten is attention, and it
has as few as two key/value heads, which would limit `tp` for everything else.
"""

from dataclasses import replace

from torch import nn

from meshwright.distributed.class_names import class_name
from meshwright.errors import ModelError
from meshwright.models.families.family import Family
from meshwright.models.specs.derived import derived_spec, is_transformers
from meshwright.models.specs.strategy import ParallelizationStrategy
from meshwright.plan.given.names import generalize, match_names
from meshwright.plan.given.spec import ParallelSpec, Structure

__all__ = ["FAMILY", "NemotronHParallelizationStrategy"]

_TP_STYLES = {
    "layers.*.mixer.up_proj": "colwise",  # MLP blocks: no other mixer has such a child
    "layers.*.mixer.down_proj": "rowwise",
    "layers.*.mixer.shared_experts.up_proj": "colwise",
    "layers.*.mixer.shared_experts.down_proj": "rowwise",
}
"""Styles in addition to those that the model declares, of modules inside the body."""

_DECLARED = {
    "embeddings": "embedding_rowwise",
    "layers.*.mixer.experts.up_proj": "colwise",
    "layers.*.mixer.experts.down_proj": "rowwise",
    "layers.*.mixer.experts": "moe_tp_experts",
}
"""Styles that the model declares in transformers 5.23, but not in 5.17."""


class NemotronHParallelizationStrategy(ParallelizationStrategy):
    """The strategy of ``NemotronHForCausalLM``. Every block is a unit, and a layer that can be recomputed.

    Several classes have this name: that of transformers, whose blocks are in ``model.layers``, and those that come with the
    weights or with NeMo AutoModel, whose blocks are in ``backbone.layers`` or ``model.layers``, a list or a dict. The latter
    need not be models of transformers.
    """

    def spec(self, model: nn.Module, param_dtype: str | None = "bfloat16") -> ParallelSpec:
        """Return the spec that the model declares, completed by the styles that it leaves out.

        Raises:
            ModelError: the model has no blocks in ``backbone.layers`` or ``model.layers``.
        """
        body = "backbone" if isinstance(getattr(model, "backbone", None), nn.Module) else "model"
        if is_transformers(model):
            derived = derived_spec(model, param_dtype)
        elif isinstance(getattr(getattr(model, body, None), "layers", None), nn.ModuleList | nn.ModuleDict):
            derived = ParallelSpec(family=class_name(model), layers=(f"{body}.layers.*",), fp32=_strict_fp32(model))
        else:
            raise ModelError(
                "model.layers",
                f"{class_name(model)}: has neither backbone.layers nor model.layers, a ModuleList or a ModuleDict of its "
                "blocks; pass a ParallelSpec that names its layers",
            )
        names = [name for named in (model.named_modules(), model.named_parameters()) for name, _ in named]

        def present(styles: dict[str, str]) -> dict[str, str]:
            inside = {f"{body}.{pattern}": style for pattern, style in styles.items()}
            return {pattern: style for pattern, style in inside.items() if match_names(pattern, names)}

        # Experts of transformers are stacked in one tensor. Those of other classes are modules of their own, and stay whole.
        declared = {**(present(_DECLARED) if is_transformers(model) else {}), **derived.tp_styles}
        # Attention is whole on every rank, so its heads do not limit tp.
        sizes = {field: attribute for field, attribute in derived.sizes.items() if field not in ("heads", "kv_heads")}
        head = {"lm_head": "colwise_gather_output"} if "lm_head" in names else {}
        structure = Structure(
            styles={**declared, **present(_TP_STYLES), **head},
            head="lm_head" if head else None,
            no_sequence_parallel="" if is_transformers(model) else "its code is not that of transformers, and is not traced",
        )
        return replace(derived, tp_styles=declared, sizes=sizes, structure=structure)


def _strict_fp32(model: nn.Module) -> tuple[str, ...]:
    """Return the modules that a model of no library computes in fp32, by the attribute that transformers reads."""
    wanted = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    named = [name for name, module in model.named_modules() if any(True for _ in module.parameters())]
    return tuple(dict.fromkeys(generalize(name) for name in named if name.rpartition(".")[2] in wanted))


FAMILY = Family("nemotron_h", ("NemotronHForCausalLM",), NemotronHParallelizationStrategy)

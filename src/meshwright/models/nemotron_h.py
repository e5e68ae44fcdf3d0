"""NemotronH: blocks of four kinds in one list (Mamba-2, attention, MLP, mixture of experts), distinguished by their mixer.

Tensor parallel splits the blocks that are a pair of matrices (MLP blocks, shared experts, routed experts), and the two
vocabulary matrices. Mamba mixers stay whole: their input projection is five matrices of different widths in one, and their
gated norm works on groups that a slice would cut. Attention stays whole too: only one block in ten is attention, and it has as
few as two key/value heads, which would limit `tp` for everything else.
"""

from dataclasses import replace

from torch import nn

from meshwright.models.family import Family
from meshwright.models.spec import derived_spec
from meshwright.models.strategy import ParallelizationStrategy
from meshwright.models.tiny import HEADS, TinyModel
from meshwright.plan.names import match_names
from meshwright.plan.spec import ParallelSpec, Structure

__all__ = ["FAMILY", "NemotronHParallelizationStrategy"]

_TP_STYLES = {
    "model.layers.*.mixer.up_proj": "colwise",  # MLP blocks: no other mixer has such a child
    "model.layers.*.mixer.down_proj": "rowwise",
    "model.layers.*.mixer.shared_experts.up_proj": "colwise",
    "model.layers.*.mixer.shared_experts.down_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}
"""Styles in addition to those that the model declares."""

_DECLARED = {
    "model.embeddings": "embedding_rowwise",
    "model.layers.*.mixer.experts.up_proj": "colwise",
    "model.layers.*.mixer.experts.down_proj": "rowwise",
    "model.layers.*.mixer.experts": "moe_tp_experts",
}
"""Styles that the model declares in transformers 5.23, but not in 5.17."""


class NemotronHParallelizationStrategy(ParallelizationStrategy):
    """The strategy of ``NemotronHForCausalLM`` of transformers. Every block is a unit, and a layer that can be recomputed."""

    def spec(self, model: nn.Module, param_dtype: str | None = "bfloat16") -> ParallelSpec:
        """Return the spec that the model declares, completed by the styles that it leaves out."""
        derived = derived_spec(model, param_dtype)
        names = [name for named in (model.named_modules(), model.named_parameters()) for name, _ in named]

        def present(styles: dict[str, str]) -> dict[str, str]:
            return {pattern: style for pattern, style in styles.items() if match_names(pattern, names)}

        declared = {**present(_DECLARED), **derived.tp_styles}
        # Attention is whole on every rank, so its heads do not limit tp.
        sizes = {field: attribute for field, attribute in derived.sizes.items() if field not in ("heads", "kv_heads")}
        structure = Structure(
            styles={**declared, **present(_TP_STYLES)},
            head="lm_head",
            no_sequence_parallel="Mamba blocks carry a state from token to token, so that each rank needs the whole sequence",
        )
        return replace(derived, tp_styles=declared, sizes=sizes, structure=structure)


_TINY = {
    **{key: value for key, value in HEADS.items() if key != "num_hidden_layers"},
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "conv_kernel": 4, "chunk_size": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32, "moe_latent_size": 16,
}  # fmt: skip
"""One block each of Mamba-2, experts behind a projection, attention and an MLP."""

FAMILY = Family("nemotron_h", ("NemotronHForCausalLM",), NemotronHParallelizationStrategy, tiny=TinyModel(_TINY))

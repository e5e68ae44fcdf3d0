"""Tensor parallel styles: what each slices, and its moves where no region overrides them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from meshwright.errors import Problems
from meshwright.plan.axes.tensor.move_kinds import Move
from meshwright.plan.given.inspection import Inspection, ParameterFacts
from meshwright.plan.given.names import holder_of, match_names
from meshwright.plan.given.sliceable_pairs import Pair

__all__ = [
    "CHANNELS",
    "DERIVED",
    "FIRST",
    "HEAD",
    "INNER",
    "NORM",
    "ON_SLICES",
    "PARTIAL",
    "SECOND",
    "SPAN",
    "STYLES",
    "Style",
    "canonical",
    "styles_of_norms",
    "styles_of_parameters",
    "tp_dim",
    "tp_placement",
]


class Style(NamedTuple):
    """What a style does where no region overrides it.

    Attributes:
        dim: dimension of the weight that is sliced, from its end; ``None``: each rank stores it whole. A bias, which has one
            dimension, is sliced if the style slices rows. 0: the first dimension of whatever it has.
        entry: move of the input.
        exit: move of the output.
        pieces: number of matrices that are concatenated in the weight (gate and up); each of them is sliced.
        transposed: whether the weight is [in, out], as in the ``Conv1D`` of transformers. A bias is then sliced if the style
            slices columns.
    """

    dim: int | None
    entry: Move = Move.NONE
    exit: Move = Move.NONE
    pieces: int = 1
    transposed: bool = False


STYLES: dict[str, Style] = {
    "colwise": Style(-2, Move.ENTER),
    "colwise_gather_output": Style(-2, Move.ENTER, Move.GATHER_FEATURES),
    "colwise_rep": Style(-2, Move.ENTER, Move.GATHER_FEATURES),
    "packed_colwise": Style(-2, Move.ENTER, pieces=2),
    "fused_colwise": Style(-2, Move.ENTER, Move.EXCHANGE_FEATURES),
    "rowwise": Style(-1, exit=Move.LEAVE),
    "rowwise_split_input": Style(-1, Move.SPLIT_FEATURES, Move.LEAVE),
    "rowwise_rep": Style(-1, Move.SPLIT_FEATURES, Move.LEAVE),
    "colwise_transposed": Style(-1, Move.ENTER, transposed=True),
    "rowwise_transposed": Style(-2, exit=Move.LEAVE, transposed=True),
    "embedding_rowwise": Style(-2, exit=Move.LEAVE),
    "embedding_colwise": Style(-1, exit=Move.GATHER_FEATURES),
    "packed_rowwise": Style(-1, pieces=2),
    "mla_kv_a_proj": Style(None, exit=Move.ENTER_LAST),
    "local_params": Style(None),
    "replicated_with_grad_allreduce": Style(None),
    "moe_tp_experts": Style(None, Move.ENTER, Move.LEAVE),
    "norm_of_features": Style(-2),
    "rowwise_within": Style(-1, exit=Move.SUM),
    "channels": Style(0),
    "replicate": Style(None),
}
"""The tensor parallel styles that are carried out."""

DERIVED: dict[str, Style] = {
    "grouped_colwise": Style(None, Move.ENTER),
    "router": Style(None, exit=Move.COUNT_ONCE),
    "whole_on_parts": Style(None),
}
"""Styles that the resolver derives from others."""

FIRST = {"colwise", "colwise_transposed", "packed_colwise", "fused_colwise", "grouped_colwise"}
"""Styles that begin a region that is split over heads or features."""

SECOND = {"rowwise", "rowwise_transposed"}
"""Styles that end such a region."""

NORM = "norm_of_features"
"""Style of a norm over features that are sliced: its means are those of all ranks."""

ON_SLICES = {*FIRST, *SECOND, NORM, "replicated_with_grad_allreduce"}
"""Styles that all that has parameters in a region has, if the region is split."""

PARTIAL = {*SECOND, "rowwise_split_input", "rowwise_rep", "whole_on_parts"}
"""Styles whose output is a partial sum on each rank."""

SPAN = {"span": "on_parts", "whole_span": "on_whole"}
"""Styles of the modules where a span begins and ends that have no slices of their own, to those of the modules in it: the ranks
have slices of features and partial sums in a ``span``, and the same in a ``whole_span``."""

CHANNELS = "channels"
"""Style of what a mixer has for each of its channels, or heads."""

INNER = {*SPAN.values(), CHANNELS}
"""Styles of modules that compute as they are; they tell what a rank has there."""

HEAD = {"colwise", "colwise_gather_output", "colwise_rep"}
"""Styles of an output head whose logits can stay sharded."""


def tp_dim(style: str | None, shape: Sequence[int]) -> int | None:
    """Return the dimension of a parameter that a style slices; ``None``: it slices none."""
    dim = STYLES[style].dim if style in STYLES else None
    if dim is None:
        return None
    if len(shape) == 1 and dim:
        return 0 if (dim == -2) != STYLES[style or ""].transposed else None
    return dim % len(shape)


def tp_placement(style: str | None, dim: int) -> str:
    """Return the placement over `tp`, as the plan writes it."""
    pieces = STYLES[style].pieces if style in STYLES else 1
    return f"StridedShard({dim}, {pieces})" if pieces > 1 else f"Shard({dim})"


def styles_of_parameters(
    where: str, patterns: Mapping[str, str], parameters: Sequence[ParameterFacts]
) -> tuple[dict[str, str], Problems]:
    """Return parameter name to style, and a message for each pattern that matches nothing.

    A pattern names modules or parameters. A pattern of parameters wins over a pattern of modules; otherwise the first one wins.
    """
    problems = Problems()
    styles: dict[str, str] = {}
    names = {canonical(name): parameter.name for parameter in parameters for name in parameter.names}
    module_styles: dict[str, str] = {}
    holders = list(dict.fromkeys(map(holder_of, names)))
    for pattern, style in patterns.items():
        exactly = [names[name] for name in match_names(pattern, names)]
        matched = set(match_names(pattern, holders))
        inside = [own for name, own in names.items() if holder_of(name) in matched]
        if not exactly and not inside and style in STYLES:  # an unknown style is refused by itself, where tp > 1
            problems.add("plan.pattern", f"{where} pattern {pattern!r} matches no parameter")
        for name in exactly:
            styles.setdefault(name, style)
        for name in inside:
            module_styles.setdefault(name, style)
    return {**module_styles, **styles}, problems


def styles_of_norms(pairs: Iterable[Pair], styles: Mapping[str, str], model: Inspection) -> dict[str, str]:
    """Return the style of each norm that has none, in regions whose matrices are sliced, by name of the module.

    Some models leave out norms of heads, because they have them only under some of their settings. A trace shows that such a
    norm treats each head alike, so that each rank has a part of its gradient; or that it takes means over all features.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        if all(styles.get(name) in FIRST for name in pair.firsts):
            found |= {name: NORM for name, _ in pair.norms if name not in styles}
            for name in dict.fromkeys(map(holder_of, pair.beside)):
                own = {f"{name}.{item}" for item in model.modules[name].parameters}
                if name not in styles and own <= set(pair.beside):
                    found[name] = "replicated_with_grad_allreduce"
    return found


def canonical(name: str) -> str:
    """Return the name of a module or parameter as it was before peft put an adapter around the module."""
    return name.replace(".base_layer", "")

"""Which parameters Muon updates, and how they are held, from what a plan knows."""

import re
from collections.abc import Iterable

from meshwright.layout import Layout
from meshwright.plan.axes.tensor.styles import STYLES, styles_of_parameters
from meshwright.plan.draft import Draft
from meshwright.plan.given.inspection import ParameterFacts
from meshwright.plan.given.names import holder_of, within
from meshwright.plan.result.rows import ParameterRow
from meshwright.plan.update.matrices import Apart, Cut, Form, Held

__all__ = ["forms_of", "held_of", "indices_of_rank", "muon_problem", "takes"]

_PLACEMENT = re.compile(r"(Strided)?Shard\((\d+)(?:, (\d+))?\)")


def takes(draft: Draft, parameter: ParameterFacts) -> bool:
    """Return whether Muon updates a parameter, if nobody says: it is a matrix inside of a layer.

    These are the weights of linear layers, of adapters too, and the matrices of experts. Embeddings, the output head, norms,
    biases, routers, convolutions and tables are none: what they are multiplied with is no activation, or few of their rows are
    used at a time (Jordan et al. 2024, section "When should Muon be used?").
    """
    if not within(parameter.name, draft.layers) or muon_problem(draft, parameter):
        return False
    in_stack, module = within(parameter.name, draft.mixtures), draft.model.modules[holder_of(parameter.name)]
    if not in_stack and (parameter.name.rpartition(".")[2] != "weight" or module.embedding or module.norm):
        return False
    return not within(parameter.name, {row.router for row in draft.experts if row.router})


def muon_problem(draft: Draft, parameter: ParameterFacts) -> str:
    """Return why Muon cannot update a parameter; empty: it can."""
    in_stack = within(parameter.name, draft.mixtures)
    shape = parameter.shape[in_stack:]
    if len(shape) != 2 or min(shape) == 1:
        return f"has the shape {list(parameter.shape)}, and muon updates matrices and stacks of them in experts"
    if len(draft.stages.holding.get(parameter.name, ())) > 1:
        return "is in several stages of pp, which would not compute the same batches; adamw updates each copy alike"
    return ""


def forms_of(draft: Draft, names: Iterable[str], *, by_head: bool = False) -> dict[str, Form]:
    """Return what each weight of some parameters is, by their first names.

    How the model's code takes its output features apart is traced. Without a trace, packed matrices are those that the styles
    of the family or of the model say (gate and up).

    Args:
        draft: has the facts of the model.
        names: first names of the parameters.
        by_head: whether queries, keys and values are a matrix for each head.
    """
    fused = draft.model.traces.fused(draft.layers)
    styles, _ = styles_of_parameters("", draft.structure.styles or draft.spec.tp_styles, draft.parameters)
    found = {}
    for name in names:
        facts = draft.model.parameter_of[name]
        transposed = draft.model.modules[holder_of(name)].transposed
        apart = next((fused[own] for own in facts.names if own in fused), None)
        if apart is None and (style := STYLES.get(styles.get(name, ""))) and style.dim == -2 and style.pieces > 1:
            features = facts.shape[-1 if transposed else -2]
            apart = Apart((features // style.pieces,) * style.pieces) if features % style.pieces == 0 else None
        if apart is not None and not by_head:
            apart = apart._replace(heads=()) if len(apart.sizes) > 1 else None
        found[name] = Form(transposed, apart)
    return found


def held_of(row: ParameterRow, layout: Layout, form: Form) -> Held:
    """Return how the parameter of a row is held. FSDP shards what `tp` and `ep`, whose placements are behind its own, leave."""
    axes, cuts = [], list[Cut]()
    for axis, placement in row.placements:
        axes.append((axis, layout.size(axis)))
        if match := _PLACEMENT.fullmatch(placement):
            cuts.insert(0, Cut(axis, int(match[2]), int(match[3] or 1)))
    return Held(row.shape, tuple(axes), tuple(cuts), form)


def indices_of_rank(layout: Layout, rank: int = 0) -> dict[str, int]:
    """Return the index of a rank on each axis that parameters are sharded or replicated over."""
    at = layout.coordinates(rank)
    both = {"dp_shard_cp": at["dp_shard"] * layout.size("cp") + at["cp"]}
    return {**layout.coordinates(rank, experts=True), **at, **both}

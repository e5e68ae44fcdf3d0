"""Which style each module and each parameter of a model has: patterns become names, and what cannot be sliced is kept whole."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from meshwright.errors import Problems
from meshwright.plan.axes.tensor.channels import shared_mixers
from meshwright.plan.axes.tensor.style_checks import packs_two
from meshwright.plan.axes.tensor.styles import FIRST, canonical, styles_of_parameters
from meshwright.plan.axes.tensor.with_adapters import styles_of_experts
from meshwright.plan.draft import Draft
from meshwright.plan.given.names import generalize, holder_of, inside, match_names
from meshwright.plan.given.sliced_code import mixes_features, reads_matrix

__all__ = ["Assignment", "assign_styles"]


@dataclass(frozen=True)
class Assignment:
    """The styles of a model by name.

    Attributes:
        modules: style of each module that has one.
        parameters: style of each parameter that has one, by its first name.
        declared: styles of parameters that the family or the model itself declares, by first name.
        left_whole: module to why it is kept whole despite its style.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    declared: Mapping[str, str] = field(default_factory=dict)
    left_whole: Mapping[str, str] = field(default_factory=dict)

    def without(
        self, modules: Collection[str], parameters: Collection[str], why: Mapping[str, str] = MappingProxyType({})
    ) -> "Assignment":
        """Return the styles without those of some modules and parameters; ``why`` has the reasons by name."""
        return replace(
            self,
            modules={name: style for name, style in self.modules.items() if name not in modules},
            parameters={name: style for name, style in self.parameters.items() if name not in parameters},
            left_whole={**self.left_whole, **why},
        )


def assign_styles(draft: Draft, level: str, styles: Mapping[str, str]) -> tuple[Assignment, Problems]:
    """Assign styles to modules and parameters.

    Args:
        draft: has the facts of the model.
        level: where the styles come from.
        styles: pattern to style.

    Returns:
        The styles by name, and what is wrong with them.
    """
    given, model = level == "given", draft.model
    where = "tp_plan" if given else "tp_styles"
    parameters, problems = styles_of_parameters(where, styles, model.parameters)
    own = (draft.structure.styles or draft.spec.tp_styles) if given else styles
    declared, _ = styles_of_parameters(where, own, model.parameters)
    styled, modules = draft.matched(styles), dict[str, str]()
    for name, module in model.modules.items():
        if module.wrapped == "other" and name in styled:
            problems.add(
                "tp.adapter",
                f"tp={draft.layout.size('tp')}: peft wraps {name!r}, which is no linear layer; only linear layers may have "
                "adapters under tp",
            )
    outside = [name for name in model.names if not model.in_adapter(name)]
    for pattern, style in styles.items():
        for name in match_names(pattern, outside):
            modules.setdefault(name, style)
    assigned = Assignment(modules, parameters, declared)
    steps: list[Callable[[Draft, Assignment, bool], tuple[Assignment, Problems]]] = [
        _keep_latents_whole,
        *([_leave_experts] if draft.layout.ep > 1 else []),
        *([_pack_experts] if level == "model" else []),
        _slice_adapters_of_experts,
        *([_leave_statistics] if level != "derived" else []),  # a trace shows more than the names that a module's code uses
        _leave_what_others_read,
        _group_heads,
    ]
    for step in steps:
        assigned, found = step(draft, assigned, given)
        problems += found
    return assigned, problems


def _keep_latents_whole(draft: Draft, assigned: Assignment, given: bool) -> tuple[Assignment, Problems]:
    """Give what is beside a latent projection and has no style the style ``replicate``: it computes with whole latents."""
    model = draft.model
    beside = [
        other
        for name, style in assigned.modules.items()
        if style == "mla_kv_a_proj"
        for other in model.inside(holder_of(name))
        if model.modules[other].parameters and not model.in_adapter(other)
    ]
    return replace(assigned, modules={**assigned.modules, **_new(beside, "replicate", assigned.modules)}), Problems()


def _new(names: Collection[str], style: str, styles: Mapping[str, str]) -> dict[str, str]:
    return {name: style for name in names if name not in styles}


def _leave_experts(draft: Draft, assigned: Assignment, given: bool) -> tuple[Assignment, Problems]:
    """Take experts out of the styles: `ep` distributes whole experts, and they are not sliced in addition."""
    problems = Problems()
    experts = draft.matched(rule.pattern for rule in draft.spec.experts)
    sliced = {name: [own for own in assigned.parameters if inside(own, name)] for name in experts}
    for name, parameters in sliced.items():
        if given and (parameters or name in assigned.modules):
            problems.add(
                "ep.tp_plan",
                f"tp_plan: slices the experts {name!r}, but ep={draft.layout.ep} distributes whole experts; leave them out",
            )
    return assigned.without(experts, {own for parameters in sliced.values() for own in parameters}), problems


def _pack_experts(draft: Draft, assigned: Assignment, given: bool) -> tuple[Assignment, Problems]:
    """Slice both matrices of what the code of experts takes apart, where the model declares that its rows are sliced as one."""
    packed = {
        draft.model.parameter_of[f"{name}.{own}"].name: "packed_colwise"
        for name, style in assigned.modules.items()
        if style == "moe_tp_experts"
        for own in draft.model.modules[name].parameters
        if packs_two(draft.model, name, own)
    }
    packed = {name: style for name, style in packed.items() if assigned.parameters.get(name) == "colwise"}
    parameters, declared = {**assigned.parameters, **packed}, {**assigned.declared, **packed}
    return replace(assigned, parameters=parameters, declared=declared), Problems()


def _slice_adapters_of_experts(draft: Draft, assigned: Assignment, given: bool) -> tuple[Assignment, Problems]:
    """Slice the adapters that are in modules of sliced experts themselves."""
    adapters: dict[str, str] = {}
    for name, style in assigned.modules.items():
        if style == "moe_tp_experts":
            adapters |= styles_of_experts(draft.model, name, {**assigned.parameters, **adapters})
    parameters, declared = {**assigned.parameters, **adapters}, {**assigned.declared, **adapters}
    return replace(assigned, parameters=parameters, declared=declared), Problems()


def _leave_statistics(draft: Draft, assigned: Assignment, given: bool) -> tuple[Assignment, Problems]:
    """Keep modules whole if their code takes a statistic over sliced features.

    If the user gave the styles, or the module is the root or a layer, this is a problem instead.
    """
    problems, layers = Problems(), draft.matched(draft.spec.layers)
    mixers = shared_mixers(draft)  # what they do with features is tried
    for name in dict.fromkeys(holder_of(name) for name, style in assigned.modules.items() if style in FIRST):
        if name in mixers:
            continue
        statistic = mixes_features(draft.model, name)
        if not statistic:
            continue
        if given or not name or name in layers:
            problems.add(
                "tp.style.misfit",
                f"{'tp_plan' if given else 'tp_styles'}: {generalize(name)!r} is sliced over features, but its code takes "
                f"their {statistic}, which differs on a slice; leave the module out",
            )
            continue
        assigned = assigned.without(
            {other for other in assigned.modules if inside(other, name)},
            {other for other in assigned.parameters if inside(canonical(other), name)},
            {generalize(name): f"takes the {statistic} of its features"},
        )
    return assigned, problems


def _leave_what_others_read(draft: Draft, assigned: Assignment, given: bool) -> tuple[Assignment, Problems]:
    """Keep an embedding whole, with what is tied to it, if a module around it reads its matrix itself, or if it has a module
    inside of it, such as a norm: that would compute with partial sums.

    If the user gave the styles, this is a problem instead.
    """
    problems, model, read = Problems(), draft.model, draft.pairs.read
    for name in [name for name, style in assigned.modules.items() if style.startswith("embedding")]:
        inner = [] if model.in_adapter(name) or name in model.adapters else [*model.children(name)]
        if not inner and not (reads_matrix(model, name) if read is None else name in read):
            continue
        why = f"{inner[0]!r} in it computes with its rows" if inner else "another module reads its matrix"
        if given:
            problems.add("tp.style.tied", f"tp_plan: {name!r} is sliced, but {why}; leave it out")
            continue
        own = [model.parameter_of[f"{name}.{item}"] for item in model.modules[name].parameters]
        tied = {holder_of(alias) for parameter in own for alias in parameter.names}
        assigned = assigned.without(tied, {parameter.name for parameter in own}, {name: why})
    return assigned, problems


def _group_heads(draft: Draft, assigned: Assignment, given: bool) -> tuple[Assignment, Problems]:
    """If there are fewer key/value heads than ranks, let each rank store all and compute the one that its queries need."""
    kv_heads = draft.model.sizes.kv_heads
    if not kv_heads or kv_heads % draft.layout.size("tp") == 0:
        return assigned, Problems()
    shared = [name for name in draft.matched(draft.structure.kv_projections) if assigned.modules.get(name) == "colwise"]
    grouped = {
        own: "grouped_colwise"
        for own, style in assigned.parameters.items()
        if style == "colwise" and any(inside(canonical(own), name) for name in shared)
    }
    modules = {**assigned.modules, **dict.fromkeys(shared, "grouped_colwise")}
    return replace(assigned, modules=modules, parameters={**assigned.parameters, **grouped}), Problems()

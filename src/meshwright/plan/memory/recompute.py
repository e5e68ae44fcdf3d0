"""Which layers recompute what in backward, from the options and the structure of the model."""

from collections.abc import Collection, Iterator

from meshwright.errors import Problems
from meshwright.plan.draft import Draft, Found
from meshwright.plan.given.closed_choices import ActivationCheckpointing
from meshwright.plan.given.inspection import Inspection
from meshwright.plan.given.names import generalize, holder_of, inside, match_names
from meshwright.plan.result.program import Action, Assign, Recompute
from meshwright.plan.result.sharding_plan import ShardingPlan

__all__ = ["checkpointing_modes", "parts_of_layer", "recompute_actions", "recompute_layer"]


def checkpointing_modes(draft: Draft) -> Found[dict[str, ActivationCheckpointing]]:
    """Return the mode of each layer: one for all layers, and patterns for some, of which a later one wins."""
    options, layers, problems = draft.options, draft.layers, Problems()
    modes = dict.fromkeys(layers, options.activation_checkpointing)
    for pattern, mode in options.activation_checkpointing_layers.items():
        matched = match_names(pattern, layers)
        if not matched:
            lists = dict.fromkeys(generalize(name) for name in layers)
            shown = ", ".join(f"{every} ({(alike := match_names(every, layers))[0]} to {alike[-1]})" for every in lists)
            problems.add(
                "plan.pattern", f"activation_checkpointing_layers pattern {pattern!r} matches no layer; layers are {shown}"
            )
        modes.update(dict.fromkeys(matched, mode))
    for name, mode in modes.items():
        if mode is ActivationCheckpointing.SUBMODULE and not list(parts_of_layer(draft.model, name)):
            legal = ", ".join(other for other in ActivationCheckpointing if other is not mode)
            problems.add(
                "checkpointing.submodule",
                f"activation_checkpointing=submodule: layer {name!r} has no submodules; legal for it are {legal}",
            )
        if mode is ActivationCheckpointing.SELECTIVE and options.compile and draft.layout.size("tp") > 1:
            problems.add(
                "checkpointing.compile",
                f"activation_checkpointing=selective with compile=True and tp={draft.layout.size('tp')}: torch cannot compile "
                f"the recomputation of layer {name!r} around slices, and would run all of it uncompiled; legal for it are "
                "none, full, submodule",
            )
            continue
        mixed = any(inside(other, name) for other in draft.mixtures)
        if mode is ActivationCheckpointing.SELECTIVE and options.compile and mixed:
            problems.add(
                "checkpointing.compile",
                f"activation_checkpointing=selective with compile=True: layer {name!r} has experts and is compiled in "
                "parts, whose operators cannot be told apart; legal for it are none, full, submodule",
            )
    if options.activation_checkpointing_save and ActivationCheckpointing.SELECTIVE not in modes.values():
        problems.add(
            "checkpointing.operators",
            f"activation_checkpointing_save={list(options.activation_checkpointing_save)}: only selective layers keep results "
            "of operators, and there are none; set activation_checkpointing or activation_checkpointing_layers to selective",
        )
    return Found(modes, problems)


def parts_of_layer(model: Inspection, layer: str) -> Iterator[str]:
    """Yield the modules that ``submodule`` recomputes one by one: the children of a layer that have parameters.

    In every layer of a transformer these are its attention (or state space mixer), its MLP or experts, and its norms, whatever
    a family calls them. A child that cannot be called, a list or dict of modules, is replaced by its entries.
    """
    for child in model.children(layer):
        if model.modules[child].container:
            yield from parts_of_layer(model, child)
        elif model.holds_parameters(child):
            yield child


def recompute_actions(draft: Draft, plan: ShardingPlan) -> Iterator[Action]:
    """Yield the actions that recompute each layer as its row says."""
    # The router is in the module that also holds the experts. If it is unknown, any module in there may be it.
    routing = [name for row in plan.experts for name in (row.module, row.router or holder_of(row.module))]
    chosen = [unit for unit in plan.units if unit.activation_checkpointing is not ActivationCheckpointing.NONE]
    for unit in chosen:
        mode, kept = unit.activation_checkpointing, plan.options.activation_checkpointing_save
        yield from recompute_layer(draft.model, unit.name, mode, kept, routing)
    if chosen and draft.model.caches:  # a layer that is recomputed would fill the cache twice
        # An attention that was given the head counts of its rank has its own copy of the config by now.
        copies = [row.module for row in plan.tensor_parallel if row.style == "region" and row.parts]
        for name in (*draft.model.caches, *(name for name in copies if draft.model.modules[name].has_config)):
            yield Assign(name, (("config.use_cache", False),))


def recompute_layer(
    model: Inspection,
    layer: str,
    mode: ActivationCheckpointing,
    operators: tuple[str, ...] = (),
    routing: Collection[str] = (),
) -> Iterator[Recompute]:
    """Yield the actions of a layer's mode.

    Args:
        model: facts of the model.
        layer: name of the layer.
        mode: what is recomputed.
        operators: operators whose results ``selective`` keeps; empty: its own choice.
        routing: names of modules that choose experts or hold them. A module that is or contains one keeps the choice of experts
            in every mode.
    """

    def routes(name: str) -> bool:
        return any(other == name or inside(other, name) for other in routing)

    if mode is ActivationCheckpointing.FULL:
        yield Recompute(layer, routing=routes(layer))
    elif mode is ActivationCheckpointing.SELECTIVE:
        yield Recompute(layer, True, operators, routes(layer))
    elif mode is ActivationCheckpointing.SUBMODULE:
        for part in parts_of_layer(model, layer):
            yield Recompute(part, routing=routes(part))

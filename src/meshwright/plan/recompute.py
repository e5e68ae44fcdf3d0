"""Which layers recompute what in backward, from the options and the structure of the model."""

from collections.abc import Iterator, Sequence

from torch import nn

from meshwright.plan.options import ActivationCheckpointing, ParallelOptions
from meshwright.plan.spec import generalize, match_names

__all__ = ["checkpointing_modes", "parts_of_layer"]


def checkpointing_modes(
    options: ParallelOptions, model: nn.Module, layers: Sequence[str], experts: Sequence[str], problems: list[str]
) -> dict[str, ActivationCheckpointing]:
    """The mode of each layer.

    Args:
        options: a mode for all layers, patterns for some, and what ``selective`` keeps.
        model: that the layers are modules of.
        layers: their names.
        experts: names of the mixtures in them.
        problems: gets a line for each pattern without a match, each layer that its mode cannot divide, and a setting that
            nothing uses.
    """
    modes = dict.fromkeys(layers, options.activation_checkpointing)
    for pattern, mode in options.activation_checkpointing_layers.items():
        matched = match_names(pattern, layers)
        if not matched:
            lists = dict.fromkeys(generalize(name) for name in layers)
            shown = ", ".join(f"{every} ({(found := match_names(every, layers))[0]} to {found[-1]})" for every in lists)
            problems.append(f"activation_checkpointing_layers pattern {pattern!r} matches no layer; layers are {shown}")
        modes.update(dict.fromkeys(matched, mode))
    for name, mode in modes.items():
        if mode is ActivationCheckpointing.SUBMODULE and not list(parts_of_layer(model.get_submodule(name))):
            legal = ", ".join(other for other in ActivationCheckpointing if other is not mode)
            problems.append(f"activation_checkpointing=submodule: layer {name!r} has no submodules; legal for it are {legal}")
        inside = any(other.startswith(f"{name}.") for other in experts)
        if mode is ActivationCheckpointing.SELECTIVE and options.compile and inside:
            problems.append(
                f"activation_checkpointing=selective with compile=True: layer {name!r} has experts and is compiled in "
                "parts, whose operators cannot be told apart; legal for it are none, full, submodule"
            )
    if options.activation_checkpointing_save and ActivationCheckpointing.SELECTIVE not in modes.values():
        problems.append(
            f"activation_checkpointing_save={list(options.activation_checkpointing_save)}: only selective layers keep results "
            "of operators, and there are none; set activation_checkpointing or activation_checkpointing_layers to selective"
        )
    return modes


def parts_of_layer(layer: nn.Module) -> Iterator[nn.Module]:
    """What ``submodule`` recomputes one by one: the children of a layer that hold parameters.

    In every layer of a transformer these are its attention (or state space mixer), its MLP or experts, and its norms, whatever
    a family calls them. A child that cannot be called, a list or dict of modules, stands for its entries.
    """
    for child in layer.children():
        if type(child).forward is nn.Module.forward:
            yield from parts_of_layer(child)
        elif any(True for _ in child.parameters()):
            yield child

"""Patterns of module names, which hold for a small model too when layers are left out."""

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import nn

from meshwright.errors import ConfigError
from meshwright.plan.given.names import match_names

__all__ = ["BY_MODULE", "GROUPS", "OF_MODULES", "OF_OPTIMIZER", "Patterns", "marks_of_layers", "renumbered_patterns"]


BY_MODULE = ("sync_units", "activation_checkpointing_layers")
"""Keys of `parallel` that map patterns of module names to choices."""


OF_OPTIMIZER = ("decay", "no_decay")
"""Keys of `optimizer` that are lists of patterns of names of parameters."""

GROUPS = "groups"
"""Key that maps patterns of names of parameters, or of modules that hold them, to the number of a group of the optimizer."""

OF_PARAMETERS, OF_MODULES = ("freeze", *OF_OPTIMIZER), ("exclude_units",)
"""All keys whose values are lists of patterns, of names of parameters and of modules."""


Patterns = Mapping[str, Any]
"""The patterns of a run, by these keys."""


def _decided(patterns: Patterns, model: nn.Module) -> dict[str, Hashable]:
    """Return what the patterns decide, by name: of parameters that are frozen or not decayed, and of modules with a choice."""
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    modules = [name for name, _ in model.named_modules()]
    decided: dict[tuple[str, str], str] = {}  # of two patterns the later one wins
    for keys, names in ((OF_PARAMETERS, parameters), (OF_MODULES, modules)):
        for key in keys:
            for pattern in patterns[key]:
                decided.update({(name, key): "yes" for name in match_names(pattern, names)})
    for key in BY_MODULE:
        for pattern, choice in patterns[key].items():
            decided.update({(name, key): choice for name in match_names(pattern, modules)})
    for pattern, number in reversed(patterns[GROUPS].items()):  # of two groups the first wins
        names = [name for path in (pattern, f"{pattern}.**") for name in match_names(path, parameters)]
        decided.update({(name, GROUPS): str(number) for name in names})
    choices_of: dict[str, list[tuple[str, str]]] = {}
    for (name, key), choice in sorted(decided.items()):
        choices_of.setdefault(name, []).append((key, choice))
    return {name: tuple(choices) for name, choices in choices_of.items()}


def marks_of_layers(patterns: Patterns, model: nn.Module, path: str, count: int) -> list[Hashable]:
    """Return what the patterns decide about each layer, by names relative to the layer."""
    decided = _decided(patterns, model)
    starts = [f"{path}.{index}." for index in range(count)]
    return [
        frozenset((f"{name}.".removeprefix(start), choice) for name, choice in decided.items() if f"{name}.".startswith(start))
        for start in starts
    ]


def renumbered_patterns(
    patterns: Patterns, large: nn.Module, small: nn.Module, path: str, kept: Sequence[int], new_numbers: Sequence[int]
) -> dict[str, Any]:
    """Return the patterns with new numbers of layers, after a check that they decide the same about every kept layer."""

    def renumber(pattern: str) -> list[str]:
        parts = pattern.split(".")
        for place, part in enumerate(parts):
            layer = re.search(r"\d", part) and match_names(".".join(parts[:place]), [path])
            if numbers := match_names(part, map(str, range(len(new_numbers)))) if layer else []:
                new = dict.fromkeys(new_numbers[int(number)] for number in numbers)
                return [".".join([*parts[:place], str(number), *parts[place + 1 :]]) for number in new]
        return [pattern]

    def former(name: str) -> str:
        match = re.match(rf"{re.escape(path)}\.(\d+)(?=\.|$)", name)
        return f"{path}.{kept[int(match[1])]}{name[match.end() :]}" if match else name

    result: dict[str, Any] = {}
    for key in (*OF_PARAMETERS, *OF_MODULES):
        result[key] = list(dict.fromkeys(new for pattern in patterns[key] for new in renumber(pattern)))
    for key in (*BY_MODULE, GROUPS):
        result[key] = {new: choice for pattern, choice in patterns[key].items() for new in renumber(pattern)}
    old, new = _decided(patterns, large), _decided(result, small)
    names, former_names = _names(small), _names(large)
    wrong = [f"{former(name)!r} would be treated otherwise" for name in names if new.get(name) != old.get(former(name))]
    for pattern in (pattern for key in result for pattern in patterns[key]):
        if match_names(pattern, former_names) and not all(match_names(item, names) for item in renumber(pattern)):
            wrong.append(f"{pattern!r} would match nothing")
    if wrong:
        raise ConfigError(
            "shrink.patterns",
            f"patterns of parallel and optimizer: the audit keeps only layers {', '.join(map(str, kept))}, and with the "
            f"patterns renumbered for them {wrong[0]}; number layers as in '{path}.0.**', or audit the whole model with --full",
        )
    return result


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_modules())]

"""Numbers that a mixer computes with, such as how many heads it has: on a rank those of its heads."""

from collections.abc import Sequence
from copy import copy
from functools import reduce
from typing import Any

from torch import nn

__all__ = ["numbers_of_rank"]


def numbers_of_rank(mixer: nn.Module, values: Sequence[tuple[str, int]]) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Return the attributes of modules of a mixer that have other values on a rank, with these.

    A config, which modules outside share, is copied: modules that hold it get the copy.

    Args:
        mixer: the mixer.
        values: see :class:`~meshwright.plan.given.sequence.mixer_shares.MixerShare`.
    """
    found: list[tuple[nn.Module, dict[str, Any]]] = []
    configs: dict[int, Any] = {}
    for name, value in values:
        place, _, own = name.rpartition(".")
        holder = reduce(getattr, place.split("."), mixer) if place else mixer
        if isinstance(holder, nn.Module):
            found.append((holder, {own: value}))
        else:
            vars(configs.setdefault(id(holder), copy(holder)))[own] = value
    for module in mixer.modules() if configs else ():
        held = {key: configs[id(config)] for key, config in vars(module).items() if id(config) in configs}
        found += [(module, held)] if held else []
    return found

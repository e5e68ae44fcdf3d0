"""Dotted names of modules and parameters. They form a tree: ``model.layers.0.mlp`` is inside ``model.layers.0``."""

import re
from collections.abc import Collection, Iterable
from functools import lru_cache

from meshwright.errors import Refusal

__all__ = [
    "generalize",
    "holder_of",
    "holders_of",
    "inside",
    "last_of_each_container",
    "match_names",
    "nearest",
    "outermost",
    "within",
    "without_repetition",
]

_DOTTED = re.compile(r"'[\w.]+'|[A-Za-z_]\w*(?:\.\w+)+")
"""A name in a sentence: in quotes, or with dots."""


def holder_of(name: str) -> str:
    """Return the module that directly holds a module or a parameter; for a name without dots the root, whose name is empty."""
    return name.rpartition(".")[0]


@lru_cache(maxsize=2**15)
def holders_of(name: str) -> tuple[str, ...]:
    """Return the modules that a module or a parameter is inside of, the innermost first, without the root."""
    holder = holder_of(name)
    return (holder, *holders_of(holder)) if holder else ()


def inside(name: str, module: str) -> bool:
    """Return whether a module or a parameter is inside a module, at any depth. All but the root are inside the root."""
    return name.startswith(f"{module}.") if module else bool(name)


def within(name: str, modules: Collection[str]) -> bool:
    """Return whether a name is one of some modules, or is inside one of them."""
    return name in modules or "" in modules or nearest(name, modules) != ""


def nearest(name: str, modules: Collection[str]) -> str:
    """Return the innermost of some modules that a name is inside of; the root, whose name is empty, if there is none."""
    for holder in holders_of(name):  # the most frequent question of a plan: a generator takes longer
        if holder in modules:
            return holder
    return ""


def outermost(name: str, modules: Collection[str]) -> str:
    """Return the outermost of some modules that a name is inside of; the root, whose name is empty, if there is none."""
    return next((holder for holder in reversed(holders_of(name)) if holder in modules), "")


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = []
    for component in pattern.split("."):
        if component == "**":
            parts.append(r"[^.]+(?:\.[^.]+)*")
        else:
            parts.append(re.escape(component).replace(r"\*", r"[^.]*"))
    return re.compile(r"\.".join(parts))


def match_names(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a pattern matches, in their order.

    ``*`` stands for (part of) one component of a dotted name, ``**`` for one or more components. The empty pattern is the root
    module.
    """
    return list(_matches(pattern, tuple(names)))


@lru_cache(maxsize=512)
def _matches(pattern: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if _compiled(pattern).fullmatch(name))


def generalize(name: str) -> str:
    """Return the pattern of a name: its numeric components become ``*``, as in ``model.layers.*``."""
    return ".".join("*" if component.isdigit() else component for component in name.split("."))


def without_repetition(problems: Iterable[Refusal]) -> list[Refusal]:
    """Return refusals, and only the first of those that differ in the numbers of layers alone, with the count of the others.

    A number of a layer is a component of a dotted name. Other digits, such as those of ``fc1`` and ``fc2``, tell things apart.
    """
    groups: dict[str, list[Refusal]] = {}
    for problem in problems:
        groups.setdefault(_DOTTED.sub(lambda name: generalize(name[0].strip("'")), problem), []).append(problem)
    return [
        first if not others else first.within("", f" (and {len(others)} more like it)") for first, *others in groups.values()
    ]


def last_of_each_container(names: Iterable[str]) -> set[str]:
    """Return the last entry of each list of modules, whose names differ only in their last component: the container rule.

    These modules keep their gathered parameters after forward, because backward starts there.
    """
    return set({holder_of(name): name for name in names}.values())

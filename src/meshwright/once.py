"""Keeps the answer of a function about something that does not change."""

from collections.abc import Callable, Hashable
from dataclasses import fields
from functools import cached_property, wraps
from typing import Any, TypeVar, TypeVarTuple

__all__ = ["Once", "once_for_each"]

T = TypeVar("T")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")

LATEST = 64
"""For how many arguments :func:`once_for_each` keeps answers."""


class Once:
    """A dataclass of which nothing changes that an answer depends on.

    A pickle of it has its fields alone, without these answers and without its cached properties.
    """

    def __getstate__(self) -> dict[str, Any]:
        return {item.name: vars(self)[item.name] for item in fields(self)}  # type: ignore[arg-type]

    @cached_property
    def _answers(self) -> dict[tuple[Any, ...], Any]:
        return {}

    def once(self, question: Callable[..., T], *arguments: Hashable) -> T:
        """Return what a function finds of this and some arguments. It is called once; nobody changes what it returns."""
        if (key := (question, *arguments)) not in self._answers:
            self._answers[key] = question(self, *arguments)
        found: T = self._answers[key]
        return found


def once_for_each(find: Callable[[*Ts], R]) -> Callable[[*Ts], R]:
    """Let a function be called once for each of the latest arguments, which are told apart by identity; nobody changes them."""
    kept: dict[tuple[int, ...], tuple[Any, R]] = {}  # with the arguments, so that no other gets the identity of one

    @wraps(find)
    def asked(*of: *Ts) -> R:
        key = tuple(map(id, of))
        if (answer := kept.pop(key, None)) is None:
            answer = (of, find(*of))
            if len(kept) >= LATEST:
                del kept[next(iter(kept))]
        kept[key] = answer  # the latest is the last
        return answer[1]

    return asked

"""Keeps the answer of a function about a dataclass that does not change."""

from collections.abc import Callable, Hashable
from dataclasses import fields
from functools import cached_property
from typing import Any, TypeVar

__all__ = ["Once"]

T = TypeVar("T")


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

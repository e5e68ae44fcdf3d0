"""The base class of the objectives that Meshwright brings."""

import inspect
from typing import Any, Self

from meshwright.models.objective import Objective

__all__ = ["Shipped"]


class Shipped(Objective):
    """An objective that knows its arguments, so that one that was made in Python can be named in a configuration.

    Attributes:
        arguments: those that it was made with.
    """

    arguments: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Keep the arguments, before they are read."""
        made = super().__new__(cls)
        try:
            made.arguments = dict(inspect.signature(cls).bind(*args, **kwargs).arguments)
        except TypeError:  # what is wrong with them, __init__ says
            made.arguments = {}
        return made

"""The action by which attentions that compute themselves get the keys and values of other ranks."""

from dataclasses import dataclass
from typing import ClassVar

from meshwright.plan.given.closed_choices import ContextBalance

__all__ = ["GiveCache"]


@dataclass(frozen=True)
class GiveCache:
    """Give each forward of a model a cache that returns the keys and values of the whole sequence to its attentions.

    Attributes:
        module: name of the model: empty.
        balance: which positions each rank has.
        axis: mesh axis.
    """

    SHOWN: ClassVar = "module balance axis"

    module: str
    balance: ContextBalance
    axis: str = "cp"

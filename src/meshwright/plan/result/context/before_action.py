"""The action by which a module gets the few tokens that it needs before those of a rank."""

from dataclasses import dataclass
from typing import ClassVar

from meshwright.plan.given.closed_choices import ContextBalance

__all__ = ["TakeTokensBefore"]


@dataclass(frozen=True)
class TakeTokensBefore:
    """Let a module, such as a short convolution, compute a rank's tokens with those before each piece of them.

    Attributes:
        module: name of the module.
        tokens: number of tokens before a token that it needs.
        hidden: position and name of the hidden state among its arguments.
        balance: which positions each rank has.
        axis: mesh axis.
    """

    SHOWN: ClassVar = "module tokens hidden balance axis"

    module: str
    tokens: int
    hidden: tuple[int, str]
    balance: ContextBalance
    axis: str = "cp"

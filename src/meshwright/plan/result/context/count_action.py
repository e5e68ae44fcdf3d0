"""The action by which a model that counts positions itself counts those of a rank."""

from dataclasses import dataclass
from typing import ClassVar

from meshwright.plan.given.closed_choices import ContextBalance

__all__ = ["CountPositions"]


@dataclass(frozen=True)
class CountPositions:
    """Let a module that counts tokens from 0 count from where those of this rank are in the sequence.

    Attributes:
        module: name of the module whose own code counts.
        places: (file, line) of each call of ``torch.arange`` in the model's code that counts tokens.
        balance: which positions each rank has.
        axis: mesh axis.
    """

    SHOWN: ClassVar = "module places balance axis"

    module: str
    places: tuple[tuple[str, int], ...]
    balance: ContextBalance
    axis: str = "cp"

"""The action by which a mixer computes some heads for all tokens."""

from dataclasses import dataclass
from typing import ClassVar

from meshwright.plan.given.closed_choices import ContextBalance
from meshwright.plan.given.sequence.mixer_shares import MixerShare

__all__ = ["ShareHeads"]


@dataclass(frozen=True)
class ShareHeads:
    """Let a mixer compute some heads for all tokens, on a rank that has some tokens.

    Attributes:
        row: has the linear layers at its borders, and what of the parameters and numbers a rank uses.
        balance: which positions each rank has.
        axis: mesh axis.
    """

    SHOWN: ClassVar = "module openings after closing features summed slices values balance axis"

    row: MixerShare
    balance: ContextBalance
    axis: str = "cp"

    @property
    def module(self) -> str:
        """The name of the module."""
        return self.row.module

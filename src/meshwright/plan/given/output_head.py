"""The facts of a model that a loss in chunks needs: its output head."""

from dataclasses import dataclass

__all__ = ["HeadFacts"]


@dataclass(frozen=True)
class HeadFacts:
    """The output head of a model.

    Attributes:
        name: of its module.
        vocabulary: number of its words.
        problem: why its logits cannot be computed in chunks; empty: they can.
    """

    name: str = ""
    vocabulary: int = 0
    problem: str = ""

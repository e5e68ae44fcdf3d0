"""The facts of a model that derived styles need: which linear layers can be sliced together."""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Pairs"]


@dataclass(frozen=True)
class Pairs:
    """How linear layers follow each other inside the layers of a model.

    Attributes:
        found: for each pair, the names of the linear layers whose output features enter one other linear layer one by one, and
            the name of this one.
        mixed: name of each linear layer whose output features are mixed as a whole, to the operator that does it.
        vocabulary: names of the embedding and of the output head, if both are of torch's own classes; otherwise empty.
    """

    found: tuple[tuple[tuple[str, ...], str], ...] = ()
    mixed: Mapping[str, str] = field(default_factory=dict)
    vocabulary: tuple[str, ...] = ()

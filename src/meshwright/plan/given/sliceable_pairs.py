"""The facts of a model that derived styles need: which linear layers can be sliced together."""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Pair", "Pairs"]


@dataclass(frozen=True)
class Pair:
    """Linear layers whose output features enter one other linear layer: an MLP or an attention.

    Attributes:
        firsts: names of the layers that put out the features.
        second: name of the layer that takes them.
        blocks: into how many equal parts the features can be divided at most: their number, or that of heads.
        counts: (module, attribute, value) of each attribute that counts what is divided; a rank needs its share.
        beside: names of the parameters that treat each block alike, as a norm of each head does: a rank has a part of their
            gradients.
        norms: (module, number of means that it takes) of each norm over all features in between: a rank has the entries of its
            parameters for its features, and the means are those of all ranks.
    """

    firsts: tuple[str, ...]
    second: str
    blocks: int
    counts: tuple[tuple[str, str, int], ...] = ()
    beside: tuple[str, ...] = ()
    norms: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Pairs:
    """How linear layers follow each other inside the layers of a model.

    Attributes:
        found: what can be sliced together.
        mixed: name of each linear layer whose output features are mixed as a whole, to the operator that does it.
        vocabulary: names of the embedding and of the output head, if both are of torch's own classes; otherwise empty.
        read: names of embeddings whose matrix other code reads in a forward; ``None``: the forward could not be traced.
    """

    found: tuple[Pair, ...] = ()
    mixed: Mapping[str, str] = field(default_factory=dict)
    vocabulary: tuple[str, ...] = ()
    read: tuple[str, ...] | None = None

"""How the heads of a mixer divide over ranks that share its sequence: a mixer carries a state along it, as Mamba-2 does."""

from dataclasses import dataclass
from functools import cached_property

__all__ = ["MOST_TRIED", "MixerShare", "Pieces", "blocks_of", "entries_of"]

MOST_TRIED = 16
"""The largest number of ranks that is looked at to name legal ones."""

Pieces = tuple[tuple[int, int], ...]
"""How entries are divided: (size, copies) of each piece of them, in order. A piece is cut into equal blocks, of which a block
goes to each ``copies`` ranks in turn. So (8, 1) gives each of 4 ranks two entries, and (8, 4) gives each all 8."""


@dataclass(frozen=True)
class MixerShare:
    """What a rank of `cp` computes of one mixer: all tokens of some heads, or its tokens with those before.

    Attributes:
        module: name of the mixer in the model.
        hidden: position and name of the hidden state among its arguments.
        openings: name in the mixer of each linear layer whose output features are exchanged, and how these are divided.
        after: name in the mixer of each linear layer of the hidden state that is only used after what is mixed.
        paths: for each of ``openings`` and ``after`` the linear layers that run one after another from the hidden state to its
            output; empty: other code runs before it, so the mixer's own code runs up to it.
        closing: name in the mixer of the module before which heads are brought together: the linear layer at the end, or a norm
            over all heads before it.
        features: number of features of each tensor that enters it, of all ranks. They are divided evenly.
        summed: (name in the mixer, number of features that leave) of each linear layer in between that mixes the features of
            all ranks: each rank has the columns of its features, and what these put out is summed over the ranks.
        slices: (name in the mixer, dimension, how it is divided) of each parameter and buffer of which a rank uses a part.
        values: (name in the mixer, value) of each attribute that counts something of which a rank has a part. It may be that of
            a config which modules hold, under the name of the attribute that has the config.
        before: number of tokens before a token that the mixer needs, if these are few. Then a rank gets them, computes its own
            tokens, and all above but ``hidden`` is empty; 0: it needs all of them.
        width: number of features of the hidden state, if ``before`` counts.
        shifts: (name in the mixer, tokens before, features, its argument for them) of each module that runs on a rank's tokens
            before the openings, and needs some tokens before them.
        positions: position and name of the argument that has the positions of tokens, if the mixer reads them.
        problem: why it cannot be shared; empty: it can.
    """

    module: str
    hidden: tuple[int, str] = (0, "")
    openings: tuple[tuple[str, Pieces], ...] = ()
    after: tuple[str, ...] = ()
    paths: tuple[tuple[str, ...], ...] = ()
    closing: str = ""
    features: tuple[int, ...] = ()
    summed: tuple[tuple[str, int], ...] = ()
    slices: tuple[tuple[str, int, Pieces], ...] = ()
    values: tuple[tuple[str, int], ...] = ()
    before: int = 0
    width: int = 0
    shifts: tuple[tuple[str, int, int, tuple[int, str]], ...] = ()
    positions: tuple[int, str] | None = None
    problem: str = ""

    @property
    def name(self) -> str:
        """The name of the mixer."""
        return self.module

    @cached_property
    def entering(self) -> tuple[int, ...]:
        """Number of features of a token that come out of each opening."""
        return tuple(sum(size for size, _ in pieces) for _, pieces in self.openings)

    @property
    def gathered_before(self) -> tuple[tuple[int, int], ...]:
        """Of each exchange of the tokens before those of ranks: their number, and the features of each."""
        own = ((self.before, self.width),) if self.before else ()
        return own + tuple((tokens, features) for _, tokens, features, _ in self.shifts)

    def received(self, ranks: int) -> int:
        """Return the number of features of a token that a rank computes with, those that several ranks have included."""
        return sum(entries_of(pieces, ranks) for _, pieces in self.openings)


def entries_of(pieces: Pieces, ranks: int) -> int:
    """Return the number of entries that each rank has."""
    return sum(size * copies // ranks for size, copies in pieces)


def blocks_of(pieces: Pieces, ranks: int, rank: int) -> tuple[range, ...]:
    """Return which entries a rank has, piece by piece."""
    blocks, start = [], 0
    for size, copies in pieces:
        width = size * copies // ranks
        begin = start + rank // copies * width
        blocks.append(range(begin, begin + width))
        start += size
    return tuple(blocks)

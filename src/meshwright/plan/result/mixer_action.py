"""The action by which a mixer computes some of its channels, with the slices that its rank stores."""

from dataclasses import dataclass

from meshwright.plan.given.sequence.mixer_shares import Pieces

__all__ = ["MixChannels"]


@dataclass(frozen=True)
class MixChannels:
    """Let a mixer compute the channels, or heads, of this rank.

    Attributes:
        module: name of the mixer.
        stored: names in the mixer of the parameters of which a rank stores the part that it uses.
        used: (name in the mixer, dimension, how it is divided) of what it stores whole and uses in part: parameters, whose
            gradients are summed over the ranks, and buffers.
        values: (name in the mixer, value) of each attribute that counts something of which a rank has a part.
        axis: mesh axis.
    """

    module: str
    stored: tuple[str, ...]
    used: tuple[tuple[str, int, Pieces], ...]
    values: tuple[tuple[str, int], ...]
    axis: str = "tp"

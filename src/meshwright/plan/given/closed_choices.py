"""The closed choices of a run: enums, each member with its meaning."""

from enum import StrEnum
from itertools import count

__all__ = [
    "ActivationCheckpointing",
    "ContextBalance",
    "ContextMethod",
    "GradientReduction",
    "PipelineSchedule",
    "SyncPolicy",
]


class SyncPolicy(StrEnum):
    """What a unit does between the microbatches of an optimizer step."""

    DEFER = "defer"
    """Gather once, reduce once. The gathered parameters and the unsharded gradients are kept through the step."""

    RESHARD_EACH = "reshard_each"
    """Gather in every microbatch, reduce once. Only the unsharded gradients are kept through the step."""

    REDUCE_EACH = "reduce_each"
    """Gather and reduce in every microbatch. Nothing unsharded is kept: the least memory, the most traffic."""


class ActivationCheckpointing(StrEnum):
    """Which activations of a layer are recomputed in backward instead of kept."""

    NONE = "none"
    """Keep all."""

    FULL = "full"
    """Keep the layer's input and recompute the rest at once: the least memory, a second forward of the whole layer."""

    SUBMODULE = "submodule"
    """Keep the inputs of its attention, its MLP and its norms, and recompute these modules one by one. This keeps more after
    forward than ``full``, and needs less memory at once in backward."""

    SELECTIVE = "selective"
    """Keep the layer's input and the results of operators that are expensive to repeat: attention, communication, the routing
    of experts and every second matrix product. Recompute the rest, which is cheap."""


class GradientReduction(StrEnum):
    """How the gradients of the data ranks are combined."""

    SUM = "sum"
    """Add them. The loss is divided by the number of valid tokens of the whole optimizer step, so no factor remains."""

    MEAN = "mean"
    """Average them over data ranks, as torch does by default, for loops whose loss is a mean on each rank."""


class ContextMethod(StrEnum):
    """How an attention gets the keys and values of the other ranks of `cp`."""

    GATHER = "gather"
    """All-gather keys and values. Any mask, any number of heads; a rank has all keys of an attention at once."""

    ULYSSES = "ulysses"
    """Exchange sequence for heads: a rank has all queries and keys of ``1 / cp`` of the heads. `cp` must divide the heads."""

    RING = "ring"
    """Pass keys and values from rank to rank. A rank never has more than two parts of them."""


class ContextBalance(StrEnum):
    """Which positions of a sequence each rank of `cp` has."""

    ZIGZAG = "zigzag"
    """Two chunks of ``2 cp``, one from the front and one from the back: under a causal mask all ranks have equal work."""

    CONTIGUOUS = "contiguous"
    """One chunk of ``cp``. Under a causal mask the last rank has the most work."""


class PipelineSchedule(StrEnum):
    """The order in which a rank of `pp` runs the forwards and backwards of its microbatches."""

    GPIPE = "gpipe"
    """All forwards, then all backwards (arXiv 1811.06965). The activations of all microbatches are alive at once."""

    ONE_F_ONE_B = "1f1b"
    """One forward, one backward (PipeDream-Flush, arXiv 2006.09503). At most as many microbatches as stages are alive."""

    INTERLEAVED = "interleaved_1f1b"
    """1f1b with several stages a rank (arXiv 2104.04473): a smaller bubble, more messages."""

    INTERLEAVED_ZERO_BUBBLE = "interleaved_zero_bubble"
    """The same with backward split in two halves, for inputs and for weights, of which the second fills the bubble."""

    ZBV = "zbv"
    """Zero bubble with two stages a rank in the form of a V (arXiv 2401.10241)."""

    DUALPIPE_V = "dualpipe_v"
    """DualPipe cut in half (arXiv 2412.19437): two stages a rank in the form of a V, forwards beside backwards."""

    @property
    def splits(self) -> bool:
        """Whether backward is split in two halves, for inputs and for weights."""
        return self not in (PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.INTERLEAVED)

    @property
    def single(self) -> bool:
        """Whether each rank has one stage; otherwise it has several."""
        return self in (PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B)

    def takes(self, pp: int, microbatches: int) -> bool:
        """Return whether torch's schedule runs a number of microbatches over ``pp`` ranks."""
        if self is PipelineSchedule.ONE_F_ONE_B:
            return microbatches >= pp
        if self is PipelineSchedule.DUALPIPE_V:
            return microbatches >= 2 * pp
        if self in (PipelineSchedule.INTERLEAVED, PipelineSchedule.INTERLEAVED_ZERO_BUBBLE):
            return microbatches % max(1, microbatches // pp) == 0
        return True

    def least(self, pp: int, microbatches: int) -> int:
        """Return the least number of microbatches that the schedule runs, not below a given one."""
        return next(number for number in count(max(1, microbatches)) if self.takes(pp, number))

    @property
    def is_v_shaped(self) -> bool:
        """Whether the stages of a rank have the form of a V: rank `i` of `p` has stages `i` and `2 p - 1 - i`."""
        return self in (PipelineSchedule.ZBV, PipelineSchedule.DUALPIPE_V)

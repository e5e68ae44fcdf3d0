"""Moves: how a tensor is redistributed over the ranks of an axis where it enters or leaves a module.

And what a module computes between them: kernels, and who adds a bias.
"""

from enum import StrEnum

__all__ = ["Bias", "Kernel", "Move"]


class Move(StrEnum):
    """How tensor parallel redistributes a tensor that enters or leaves a module.

    A tensor is *whole* if all ranks of `tp` have the same values of all of it. A *slice* is a rank's range of one dimension.
    *Partial sums* give the tensor when they are added up over the ranks.
    """

    NONE = "none"
    """No redistribution."""

    ENTER = "enter"
    """Forward: no change. Backward: the partial sums of the gradient are all-reduced. f of Megatron-LM (arXiv 1909.08053,
    section 3)."""

    ENTER_LAST = "enter_last"
    """ENTER for the last features alone: the part of the keys that every head shares in latent attention (DeepSeek-V2, arXiv
    2405.04434, section 2.1.3). The gradient of the other features is whole, because what they enter has an ENTER of its own."""

    LEAVE = "leave"
    """Forward: partial sums are all-reduced. Backward: no change, because the gradient is whole. g of Megatron-LM."""

    SUM = "sum"
    """Forward and backward: partial sums are all-reduced. LEAVE and then ENTER, where each rank computes a part with a sum."""

    GATHER_FEATURES = "gather_features"
    """Forward: slices of the last dimension are all-gathered. Backward: each rank keeps its slice of the gradient, which is
    whole."""

    SPLIT_FEATURES = "split_features"
    """Forward: each rank keeps its slice of the last dimension. Backward: the slices of the gradient are all-gathered."""

    EXCHANGE_FEATURES = "exchange_features"
    """Forward: an all-to-all turns a slice of several concatenated matrices into a slice of each. Backward: the reverse."""

    COUNT_ONCE = "count_once"
    """For the first tensor of a tuple, whose gradient is whole: the logits of a router, which are returned for a loss of their
    own. Forward: no change. Backward: the gradient is divided by the number of ranks, because further upstream the gradients of
    all ranks are added up. An output that is no tuple is not changed."""

    VOCABULARY = "vocabulary"
    """The tensor stays sliced over its last dimension and becomes a DTensor, from which the loss sees that it is sliced."""

    GATHER_SEQUENCE = "gather_sequence"
    """Forward: slices of the sequence are all-gathered. Backward: the partial sums of the gradient are reduce-scattered."""

    GATHER_TOKENS = "gather_tokens"
    """For experts: the tokens of all slices, rank by rank. Forward: hidden states, the numbers of chosen experts and their
    weights are all-gathered. Backward: the partial sums of the gradients of hidden states and weights are reduce-scattered."""

    GATHER_SEQUENCE_WHOLE = "gather_sequence_whole"
    """Forward: slices of the sequence are all-gathered. Backward: each rank keeps its slice of the gradient, which is whole."""

    SPLIT_SEQUENCE = "split_sequence"
    """Forward: each rank keeps its slice of the sequence. Backward: the slices of the gradient are all-gathered."""

    SCATTER_SEQUENCE = "scatter_sequence"
    """Forward: partial sums are reduce-scattered to slices of the sequence. Backward: the slices of the gradient are
    all-gathered."""


class Kernel(StrEnum):
    """What a module computes with its slices."""

    OWN = "own"
    """The module's own forward."""

    VOCABULARY_ROWS = "vocabulary_rows"
    """An embedding that stores the rows of some words: it looks these up, and returns zeros for all others."""

    ONE_HEAD = "one_head"
    """A matrix of several heads: it computes only the head that the queries of this rank need."""

    DORA_ROWS = "dora_rows"
    """The magnitudes of an adapter, which read the slices of its matrix: this rank has whole rows."""

    DORA_COLUMNS = "dora_columns"
    """The same: this rank has some columns, so squares of the norms of rows are summed over the axis."""

    MEANS = "means"
    """The module's own forward, in which each mean over the last dimension is that of the slices of all ranks."""


class Bias(StrEnum):
    """Which ranks add the bias of a module whose output may be a sum over ranks, and when."""

    EACH = "each"
    """Each rank adds what it stores of the bias, a slice or all of it, in the module's forward; or there is no bias."""

    LATE = "late"
    """Each rank adds it after the move at the exit of the module."""

    FIRST = "first"
    """The first rank of the axis adds it in the module's forward. The outputs are summed elsewhere."""

"""Moves: how a tensor comes into a module, or leaves it, where the ranks of an axis hold parts."""

from enum import StrEnum

__all__ = ["Move"]


class Move(StrEnum):
    """How a tensor comes into a module, or leaves it, under tensor parallel. "Whole": the same on all ranks of `tp`."""

    NONE = "none"
    """As it is."""

    ENTER = "enter"
    """As it is; backward all-reduces the parts of its gradient. f of Megatron-LM (arXiv 1909.08053, section 3)."""

    LEAVE = "leave"
    """Parts are all-reduced to their sum; its gradient is whole. g of Megatron-LM."""

    GATHER_FEATURES = "gather_features"
    """Slices of the last dimension are gathered; backward keeps this rank's slice of a whole gradient."""

    SPLIT_FEATURES = "split_features"
    """This rank's slice of the last dimension is kept; backward gathers."""

    EXCHANGE_FEATURES = "exchange_features"
    """From a slice of several matrices in a row to a slice of each: all-to-all, and back in backward."""

    COUNT_ONCE = "count_once"
    """Of a tuple, the first: what is returned besides, whose gradient is whole (the logits of a router, for a loss of their
    own). As it is; backward divides by the ranks, for upstream the gradients of all ranks are added up."""

    VOCABULARY = "vocabulary"
    """Stays sliced over the last dimension, and says so: a DTensor, for the loss."""

    GATHER_SEQUENCE = "gather_sequence"
    """Parts of the sequence are gathered; backward reduce-scatters the parts of the gradient."""

    GATHER_SEQUENCE_WHOLE = "gather_sequence_whole"
    """Parts of the sequence are gathered; backward keeps this rank's part of a whole gradient."""

    SPLIT_SEQUENCE = "split_sequence"
    """This rank's part of the sequence is kept; backward gathers."""

    SCATTER_SEQUENCE = "scatter_sequence"
    """Sums are reduce-scattered to parts of the sequence; backward gathers."""

"""The dimension of tokens, found by its size, and the operators that mix along it."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from meshwright.models.reading.tracing import Operator

__all__ = ["TokenDimension"]

_MIXING = ("convolution", "roll", "flip", "_fft", "gru", "lstm", "rnn", "_thnn", "unfold", "_scaled_dot_product")
"""Beginnings of the names of operators that mix along some dimension that is not named in their arguments."""
_ALONG_A_DIMENSION = {
    "sort", "topk", "_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "gather",
    "index_select", "scatter", "scatter_add", "select",
}  # fmt: skip
"""Operators that mix along the dimension that their argument ``dim`` names, or its default."""


class TokenDimension:
    """Finds the dimension of tokens by its size: a prime, or a multiple of it, that no parameter has as a size."""

    def __init__(self, length: int) -> None:
        self.length = length

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether a dimension counts tokens, or tokens times something."""
        return any(map(self._counts, tensor.shape))

    def dimensions(self, tensor: torch.Tensor) -> int:
        """Return how many dimensions count tokens."""
        return sum(map(self._counts, tensor.shape))

    def _counts(self, size: int) -> bool:
        return size > 0 and size % self.length == 0

    def mixed(self, operator: "Operator") -> bool:
        """Return whether an operator combines or moves the entries of the dimension of tokens."""
        name, tensors, args, results = operator.name, operator.on_meta, operator.args, operator.results
        if not any(map(self.has, tensors)) or name.startswith("new_"):  # a new tensor has no entries of another
            return False
        first = tensors[0]
        if not all(map(self.has, results)):  # a sum, a mean, a single token
            return True
        if name.startswith(_MIXING):
            return True
        if name in ("mm", "bmm"):
            return self._counts(first.shape[-1])
        if name in ("addmm", "baddbmm"):
            return len(tensors) > 1 and self._counts(tensors[1].shape[-1])
        if name in _ALONG_A_DIMENSION:
            dim = operator.operands.get("dim")
            return dim is not None and -first.ndim <= dim < first.ndim and self._counts(first.shape[dim])
        if name == "index":
            return any(
                index is not None and dim < first.ndim and self._counts(first.shape[dim]) for dim, index in enumerate(args[1])
            )
        if name == "native_layer_norm":
            return any(map(self._counts, args[1]))
        if name == "constant_pad_nd":
            padded = [first.ndim - 1 - place // 2 for place, size in enumerate(args[1]) if size]
            return any(self._counts(first.shape[dim]) for dim in padded)
        # The head may take the last tokens alone (logits_to_keep); here it takes all.
        return name == "slice" and sum(map(self._counts, first.shape)) != sum(map(self._counts, results[0].shape))

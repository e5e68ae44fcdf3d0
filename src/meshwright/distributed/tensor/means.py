"""Norms over features that are sliced: their means are those of the features of all ranks."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from meshwright.distributed.tensor import moves

__all__ = ["means_of_all_ranks"]

_MEANS = {torch.mean, torch.Tensor.mean}


class _MeansOfAllRanks(TorchFunctionMode):
    """Inside, each mean over the last dimension is that of the slices of all ranks, which have one width.

    A rank uses the mean for its own features, so that backward adds up what the ranks computed of its gradient.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def __torch_function__(
        self, function: Any, types: Collection[Any], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function not in _MEANS or not _along_last(*args, **(kwargs or {})):
            return result
        return moves.sum_both_ways(result / dist.get_world_size(self.group), self.group)


def _along_last(input: torch.Tensor, dim: Any = None, keepdim: bool = False, **_: Any) -> bool:
    """Return whether a mean, called with these arguments, is along the last dimension alone."""
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    return [own % input.ndim for own in dims] == [input.ndim - 1]


def means_of_all_ranks(forward: Callable[..., Any], group: dist.ProcessGroup) -> Callable[..., Any]:
    """Return the forward of a norm on slices. A trace has shown that it takes means over the last dimension alone."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _MeansOfAllRanks(group):
            return forward(*args, **kwargs)

    compiled: Callable[..., Any] = torch.compiler.disable(run)  # a compiled layer breaks its graph here
    return compiled

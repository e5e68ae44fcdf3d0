"""A module that counts tokens itself, on a rank that has some tokens of each sequence.

Its code calls ``torch.arange`` with the number of tokens that it sees: in one process these are the positions of a sequence
from its beginning. On a rank they are those of its part. Which calls count tokens is known by the line of the code that makes
them (``places`` of the action). While the forward of the module runs, these calls return the positions of the rank, plus what
they begin with.

Likewise its code may take the rows of its queries from a table, such as a causal mask of the longest sequence: the last of as
many rows as there are keys. These are the rows of the rank's positions.
"""

import sys
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.distributed.mesh import ParallelMesh
from meshwright.errors import UnsupportedError
from meshwright.plan.axes.context.sharing import positions_of
from meshwright.plan.result.context.count_action import CountPositions

__all__ = ["calling_place", "count_positions"]

_OURS = tuple(str(PurePath(module.__file__).parent) for module in (torch, sys.modules["meshwright"]) if module.__file__)
"""Folders of code that stands between a model and an operator."""


def calling_place() -> tuple[str, int]:
    """Return the file (its last three parts) and the line of the code that has called torch: the nearest that is not ours."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_OURS) and frame.f_back is not None:
        frame = frame.f_back
    return "/".join(PurePath(frame.f_code.co_filename).parts[-3:]), frame.f_lineno


def count_positions(model: nn.Module, action: CountPositions, mesh: ParallelMesh) -> None:
    """Replace the forward of a module, on its instance, by one that counts the positions of this rank."""
    group = mesh[action.axis].get_group()
    module = model.get_submodule(action.module)
    counted = _Counted(action, dist.get_world_size(group), dist.get_rank(group))
    inner: Callable[..., Any] = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with counted:
            return inner(*args, **kwargs)

    module.forward = forward


class _Counted(TorchFunctionMode):
    """Lets calls of ``torch.arange`` at some places return the positions of a rank."""

    def __init__(self, action: CountPositions, ranks: int, rank: int) -> None:
        super().__init__()
        self.action, self.ranks, self.rank = action, ranks, rank

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__getitem__ and calling_place() in self.action.places:
            return self._rows(*args)
        result = function(*args, **(kwargs or {}))
        return self._own(result) if function is torch.arange and calling_place() in self.action.places else result

    def _own(self, counted: torch.Tensor) -> torch.Tensor:
        """Return the positions of the rank, for those [tokens] that are counted from the beginning of its part."""
        return (self._places(len(counted), counted.device) + counted[:1]).to(counted.dtype)

    def _rows(self, table: torch.Tensor, index: Any) -> torch.Tensor:
        """Return what an index takes of a table, with the rank's positions in place of the last of as many rows as keys."""
        taken = index if isinstance(index, tuple) else (index,)
        rows = [dim for dim, one in enumerate(taken) if self._takes_queries(one)]
        if len(rows) != 1 or not all(isinstance(one, slice) for one in taken):
            file, line = calling_place()
            raise UnsupportedError(
                "cp.positions",
                f"{self.action.module!r} takes rows of a table ({file}:{line}), and which are of queries is not clear",
            )
        (dim,) = rows
        own = table.index_select(dim, self._places(taken[dim].stop - taken[dim].start, table.device))
        return own[(*taken[:dim], slice(None), *taken[dim + 1 :])]

    def _takes_queries(self, taken: Any) -> bool:
        """Return whether a slice takes the last of as many rows as there are keys, one for each token of the rank."""
        if not isinstance(taken, slice) or taken.start is None or taken.stop is None:
            return False
        return bool(taken.stop == (taken.stop - taken.start) * self.ranks)

    def _places(self, tokens: int, device: torch.device) -> torch.Tensor:
        """Return the positions of the rank."""
        pieces = positions_of(tokens * self.ranks, self.ranks, self.action.balance, self.rank)
        return torch.cat([torch.arange(piece.start, piece.stop, device=device) for piece in pieces])

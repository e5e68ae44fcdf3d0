"""How many bytes autograd holds for backward, parameters not counted: the same number on every machine."""

from collections import Counter
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook

__all__ = ["SavedBytes"]


class SavedBytes:
    """Inside this context, what forward saves is counted, each storage once.

    Attributes:
        peak: the most bytes held at once.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._held = 0
        self._uses: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self._parameters: set[int] = set()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(saved_tensors_hooks(lambda tensor: _Saved(self, tensor), lambda saved: saved.tensor))
        # It runs before FSDP's own, so parameters are still gathered; their storages outlive their freeing.
        handle = register_module_forward_hook(self._exclude)
        self._stack.callback(handle.remove)
        return self

    def __exit__(self, *failure: Any) -> None:
        self._stack.close()

    def take(self, storage: int, size: int) -> None:
        """One more use of a storage."""
        self._uses[storage] += 1
        if self._uses[storage] == 1:
            self._sizes[storage] = 0 if storage in self._parameters else size
            self._held += self._sizes[storage]
            self.peak = max(self.peak, self._held)

    def drop(self, storage: int) -> None:
        """One use less."""
        self._uses[storage] -= 1
        if not self._uses[storage]:
            self._held -= self._sizes.pop(storage)
            del self._uses[storage]

    def _exclude(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        for parameter in module.parameters(recurse=False):
            storage = _local(parameter).untyped_storage()._cdata
            self._parameters.add(storage)
            self._held -= self._sizes.get(storage, 0)
            if storage in self._sizes:
                self._sizes[storage] = 0


class _Saved:
    """A tensor that autograd holds."""

    def __init__(self, meter: SavedBytes, tensor: torch.Tensor) -> None:
        storage = _local(tensor).untyped_storage()
        self.tensor, self.meter, self.storage = tensor, meter, storage._cdata
        meter.take(self.storage, storage.nbytes())

    def __del__(self) -> None:
        self.meter.drop(self.storage)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor

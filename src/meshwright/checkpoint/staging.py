"""Copies of the tensors of a checkpoint on the host, from which a thread writes while training goes on.

torch has a stager too (``DefaultStager``). It pins memory through CUDA's runtime, so on one kind of device alone, and copies
whole storages. This one asks :mod:`meshwright.device`. It keeps its buffers from one save to the next, and the host waits once.
"""

from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from meshwright.device import is_accelerator, pinned, synchronize
from meshwright.distributed import _torch_compat

__all__ = ["HostCopies"]


class HostCopies(AsyncStager):
    """Stages for :func:`torch.distributed.checkpoint.async_save`. A save must be complete before the next one begins.

    The buffers have the bytes of what a rank saves; they are pinned where the tensors are on an accelerator.
    """

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether :meth:`stage` leaves copies under way; it does not."""
        return False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return copies of tensors on the host, under the same names."""
        self._copies = {name: self._copied(name, tensor.detach()) for name, tensor in state_dict.items()}
        for device in {_own(tensor).device for tensor in state_dict.values()}:
            synchronize(device)
        return dict(self._copies)

    def synchronize_staging(self) -> None:
        """Do nothing: copies are complete when :meth:`stage` returns."""
        return

    def close(self) -> None:
        """Let go of the buffers."""
        self._copies = {}

    def _copied(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy that is complete when the device of the tensor has done its work."""
        own, copy = _own(tensor), self._copies.get(name)
        if copy is None or _own(copy).shape != own.shape or _layout(copy) != _layout(tensor):
            buffer = pinned(torch.empty(own.shape, dtype=own.dtype), own.device)
            copy = _torch_compat.with_local(tensor, buffer) if isinstance(tensor, DTensor) else buffer
        _own(copy).copy_(own, non_blocking=is_accelerator(own.device))
        return copy


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    mesh = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()
    return tensor.shape, tensor.dtype, *mesh

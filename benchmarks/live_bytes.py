"""Bytes of all storages that are alive, at the worst moment: parameters, gradients, activations, buffers of collectives.

The same for real and for fake tensors, and the same on every machine: what an allocator adds (rounding, fragments, what it
keeps) is not in it, nor is memory that an operator takes and gives back within its call.
"""

import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from meshwright.distributed import _torch_compat
from meshwright.distributed.fsdp import fsdp_units

__all__ = ["LiveBytes"]

SETTLE_SECONDS, SETTLE_BYTES = 0.25, 2**20
"""Threads of gloo let go of the buffers of a collective a moment after it is through, on a busy machine a long one: so long a
leap of the peak by so much may take to turn out none."""


class LiveBytes(TorchDispatchMode):
    """Inside, storages are known from the operator that made them until they die; FSDP's resizing of them is followed.

    Args:
        model: with FSDP units; what it holds is known from the start.
        others: more tensors that are there already, such as those of an optimizer.
        settle: believe a new peak only after other threads had a moment to let go of what they used.

    Attributes:
        held: bytes now; ``peak``: the most.
        gathered: the most bytes of gathered parameters at once, those that are on their way included.
        gradients: the most bytes of unsharded gradients at once: of matrices that backward made in the shape of a parameter.
            Those that wait for a second backward are in no module, but in autograd.
    """

    def __init__(self, model: torch.nn.Module, others: Iterable[torch.Tensor] = (), *, settle: bool = False) -> None:
        super().__init__()
        self.settle = settle
        groups = [group for unit in fsdp_units(model).values() for group in _torch_compat.param_groups(unit)]
        self.units = [held for group in groups for held in group.fsdp_params]
        self.shapes = {tuple(sorted(held._orig_size)) for held in self.units if len(held._orig_size) > 1}
        self.held = self.peak = self.gathered = self.gradients = 0
        self._unreduced = 0
        self._alive: dict[int, tuple[weakref.ref[Any], int, bool]] = {}
        for tensor in (*model.parameters(), *model.buffers(), *others):
            self._see(tensor)
        self.peak = self.held

    def __enter__(self) -> Self:
        self._resize, mode = torch.UntypedStorage.resize_, self

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            found = mode._resize(storage, size)
            mode._weigh(storage)
            mode._note_peak()
            return found

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*failure)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it is taken apart first, and comes back here
        of_units = func.namespace in ("fsdp", "c10d")
        result = func(*args, **(kwargs or {}))
        # A view makes no memory: what is first seen in one is a backend's own, such as the copy that gloo reduces in.
        for item in tree_iter((() if func.is_view else result, args if of_units else ())):
            if isinstance(item, torch.Tensor):
                self._see(item)
        self._note_peak()
        if of_units:
            # What is gathered ahead is in the buffer of the collective as yet.
            ahead = args[0].untyped_storage().nbytes() if func.name() == "c10d::_allgather_base_" else 0
            self.gathered = max(self.gathered, _gathered_bytes(self.units) + ahead)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        self._weigh(tensor.untyped_storage(), tensor.shape)

    def _weigh(self, storage: torch.UntypedStorage, shape: Sequence[int] = ()) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._alive.get(key)
        if known is None:
            gradient = _torch_compat.in_backward() and tuple(sorted(shape)) in self.shapes
            self._alive[key] = (weakref.ref(storage, lambda _: self._forget(key)), size, gradient)
            self._count(size, gradient)
        elif known[1] != size:
            self._alive[key] = (known[0], size, known[2])
            self._count(size - known[1], known[2])

    def _forget(self, key: int) -> None:
        if (known := self._alive.pop(key, None)) is not None:
            self._count(-known[1], known[2])

    def _count(self, size: int, gradient: bool) -> None:
        self.held += size
        if gradient:
            self._unreduced += size
            self.gradients = max(self.gradients, self._unreduced)

    def _note_peak(self) -> None:
        if self.held > self.peak:
            patience = time.monotonic() + SETTLE_SECONDS
            while self.settle and self.held > self.peak + SETTLE_BYTES and time.monotonic() < patience:
                time.sleep(0.002)
            self.peak = max(self.peak, self.held)


def _gathered_bytes(parameters: Iterable[Any]) -> int:
    """Bytes of gathered parameters that units hold now, as FSDP2 keeps them (``FSDPParam``)."""
    found: dict[int, int] = {}
    for held in parameters:
        for tensor in (*held.all_gather_outputs, getattr(held, "_unsharded_param", None)):
            if tensor is not None:
                storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
                found[storage._cdata] = storage.nbytes()
    return sum(found.values())

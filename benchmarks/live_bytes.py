"""Bytes of all storages that are alive, at the worst moment: parameters, gradients, activations, buffers of collectives.

The same for real and for fake tensors, and the same on every machine: what an allocator adds (rounding, fragments, what it keeps)
is not in it, nor is memory that an operator takes and gives back within its call.
"""

import time
import weakref
from collections.abc import Iterable
from typing import Any, Self

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from meshwright.distributed import _torch_compat
from meshwright.distributed.fsdp import fsdp_units

__all__ = ["LiveBytes", "unsharded_bytes"]

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
        gathered: the most bytes of gathered parameters at once; ``gradients``: of unsharded gradients.
    """

    def __init__(self, model: torch.nn.Module, others: Iterable[torch.Tensor] = (), *, settle: bool = False) -> None:
        super().__init__()
        self.model, self.settle = model, settle
        self.held = self.peak = self.gathered = self.gradients = 0
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
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
        space, name = func.namespace, func._schema.name
        of_units = space in ("fsdp", "c10d") or name == "aten::add_"  # accumulation of unsharded gradients
        if of_units:
            # What a unit hands over to be reduced, it does not hold any more.
            self._look_at_units(args[0] if name == "fsdp::chunk_cat" else ())
        result = func(*args, **(kwargs or {}))
        for item in tree_iter((result, args if of_units else ())):
            if isinstance(item, torch.Tensor):
                self._see(item)
        self._note_peak()
        if of_units:
            self._look_at_units()
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        self._weigh(tensor.untyped_storage())

    def _weigh(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._alive.get(key)
        if known is None:
            self._alive[key] = (weakref.ref(storage, lambda _: self._forget(key)), size)
            self.held += size
        elif known[1] != size:
            self._alive[key] = (known[0], size)
            self.held += size - known[1]

    def _forget(self, key: int) -> None:
        known = self._alive.pop(key, None)
        self.held -= known[1] if known else 0

    def _note_peak(self) -> None:
        if self.held > self.peak:
            patience = time.monotonic() + SETTLE_SECONDS
            while self.settle and self.held > self.peak + SETTLE_BYTES and time.monotonic() < patience:
                time.sleep(0.002)
            self.peak = max(self.peak, self.held)

    def _look_at_units(self, handed_over: Iterable[torch.Tensor] = ()) -> None:
        gathered, gradients = unsharded_bytes(self.model, handed_over)
        self.gathered, self.gradients = max(self.gathered, gathered), max(self.gradients, gradients)


def unsharded_bytes(model: torch.nn.Module, handed_over: Iterable[torch.Tensor] = ()) -> tuple[int, int]:
    """Bytes of gathered parameters and of unsharded gradients that the units of a model hold now.

    Args:
        model: with FSDP units.
        handed_over: gradients on their way to reduction, which no unit holds any more.
    """
    gathered: dict[int, int] = {}
    gradients: dict[int, int] = {}

    def add(to: dict[int, int], tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
            to[storage._cdata] = storage.nbytes()

    for tensor in handed_over:
        add(gradients, tensor)
    for unit in fsdp_units(model).values():
        for group in _torch_compat.param_groups(unit):
            for held in group.fsdp_params:
                for tensor in held.all_gather_outputs:
                    add(gathered, tensor)
                add(gradients, held.unsharded_accumulated_grad)
                whole = getattr(held, "_unsharded_param", None)
                if whole is not None:
                    add(gathered, whole)
                    add(gradients, whole.grad)
    return sum(gathered.values()), sum(gradients.values())

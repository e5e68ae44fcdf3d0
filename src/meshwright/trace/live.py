"""Bytes of all storages that are alive, at the worst moment: parameters, gradients, activations, buffers of collectives.

The same for real and for fake tensors, and the same on every machine: what an allocator adds (rounding, fragments, what it
keeps) is not in it, nor is memory that an operator takes and gives back within its call.
"""

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Self

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from meshwright.distributed import _torch_compat
from meshwright.distributed.data.fsdp_units import fsdp_units
from meshwright.trace.work import WorkCounter

__all__ = ["TOGETHER", "Held", "Kind", "LiveBytes", "by_kind", "by_layer"]

DEVICE = torch.ops.prim.device.default
"""How a fake tensor is asked for its device."""

_OF_GROUP = ("unshard", "wait_for_unshard", "post_backward")
"""Methods of FSDP2's `FSDPParamGroup` in which memory of a unit is made: gathered parameters, added and reduced gradients."""

SETTLE_SECONDS, SETTLE_BYTES = 0.25, 2**20
"""Threads of gloo let go of the buffers of a collective a moment after it is through, on a busy machine a long one: so long a
leap of the peak by so much may take to turn out none."""


class Kind(StrEnum):
    """What bytes are for."""

    STATE = "state"
    """What was there before: shards of parameters, and the state of the optimizer."""

    GATHERED = "gathered"
    """Gathered parameters, those on their way included."""

    UNREDUCED = "unreduced"
    """Gradients of whole parameters."""

    REDUCED = "reduced"
    """Shards of gradients."""

    LOGITS = "logits"
    """Tensors with an entry for each word: logits, their copies and gradients, and what chunks of a loss add up."""

    COMMUNICATION = "communication"
    """Buffers of other collectives."""

    OUTPUTS = "outputs"
    """What operators made of parameters in forward, in all, dead or alive: never a part of what is held."""

    ACTIVATIONS = "activations"
    """All the rest: what backward needs, and what lives for a moment."""


TOGETHER = "together"
"""Stands in place of a layer for what a unit that holds parameters of many layers gathers and reduces."""

Held = Mapping[tuple[str, Kind], int]
"""Bytes by a layer and by what they are for. The layer is the one in whose forward or backward they came to be; it lasts until
the next one begins. It is empty for what came to be before the first layer, in the loss or in the update."""


def by_kind(held: Held) -> Counter[Kind]:
    """Return what is held by what it is for."""
    found: Counter[Kind] = Counter()
    for (_, kind), size in held.items():
        found[kind] += size
    return found


def by_layer(held: Held) -> dict[str, Counter[Kind]]:
    """Return what is held by layers, and by what it is for."""
    found: dict[str, Counter[Kind]] = {}
    for (layer, kind), size in held.items():
        if layer:
            found.setdefault(layer, Counter())[kind] += size
    return found


class LiveBytes(TorchDispatchMode):
    """Inside, storages are known from the operator that made them until they die; FSDP's resizing of them is followed.

    Args:
        model: with FSDP units; what it holds is known from the start.
        others: more tensors that are there already, such as those of an optimizer.
        together: units that hold parameters of many layers.
        settle: believe a new peak only after other threads had a moment to let go of what they used.
        words: number of words that this rank has logits of; 0: logits are not told apart.
        work: counts the work of every operator, as it does as a mode of its own; ``None``: it is not counted.

    Attributes:
        held: bytes now; ``peak``: the most.
        gathered: the most bytes of gathered parameters at once, those that are on their way included.
        gradients: the most bytes of unsharded gradients at once: of matrices that backward made in the shape of a parameter.
            Those that wait for a second backward are in no module, but in autograd.
        now: bytes now, by layer and by what they are for.
        moments: name of each moment to these bytes when it held the most (:meth:`begin`).
        noted: these bytes when something was noted (:meth:`note`), and those of what operators made of parameters in forward.
        paused: whether new tensors are no memory of the step.
    """

    paused = False

    def __init__(
        self,
        model: torch.nn.Module,
        others: Iterable[torch.Tensor] = (),
        *,
        together: Sequence[FSDPModule] = (),
        settle: bool = False,
        words: int = 0,
        work: WorkCounter | None = None,
    ) -> None:
        super().__init__()
        self.settle, self.words, self.work, self.together = settle, words, work, together
        groups = [group for unit in fsdp_units(model).values() for group in _torch_compat.param_groups(unit)]
        self.units = [held for group in groups for held in group.fsdp_params]
        self.shapes = {tuple(sorted(held._orig_size)) for held in self.units if len(held._orig_size) > 1}
        self.held = self.peak = self.gathered = self.gradients = 0
        self.now: Counter[tuple[str, Kind]] = Counter()
        self.moments: dict[str, Held] = {}
        self.noted: dict[str, Held] = {}
        self._moment, self._most, self._layer = "", -1, ""
        self._unreduced = 0
        self._outputs: Counter[tuple[str, Kind]] = Counter()
        self._alive: dict[int, tuple[weakref.ref[Any], int, Kind, str]] = {}
        for tensor in (*model.parameters(), *model.buffers(), *others):
            self._see(tensor, Kind.STATE)
        self.peak = self.held

    def begin(self, moment: str, layer: str = "") -> None:
        """Begin a moment, or a layer's part in it. What is held most in a moment is kept under its name.

        A moment may begin several times.
        """
        self._moment, self._layer = moment, layer
        self._most = sum(self.moments[moment].values()) if moment in self.moments else -1
        self._note_peak()

    def note(self, name: str) -> None:
        """Keep what is held now under a name, with the outputs of parameters until now."""
        self.noted[name] = {**self.now, **self._outputs}

    def __enter__(self) -> Self:
        self._resize, mode = torch.UntypedStorage.resize_, self

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            found = mode._resize(storage, size)
            mode._weigh(storage, Kind.GATHERED)
            mode._note_peak()
            return found

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        self._before = [
            (group, {name: vars(group)[name] for name in _OF_GROUP if name in vars(group)})
            for unit in self.together
            for group in _torch_compat.param_groups(unit)
        ]
        for group, _ in self._before:
            vars(group).update({name: self._apart(getattr(group, name)) for name in _OF_GROUP})
        return super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        for group, before in self._before:
            for name in _OF_GROUP:
                del vars(group)[name]
            vars(group).update(before)
        super().__exit__(*failure)

    def _apart(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of FSDP in which what comes to be is of no single layer."""

        def within(*args: Any, **kwargs: Any) -> Any:
            layer = self._layer
            self._count_for(TOGETHER)
            try:
                return run(*args, **kwargs)
            finally:
                self._count_for(layer)

        return within

    def _count_for(self, layer: str) -> None:
        self._layer = layer
        if self.work is not None:
            self.work.begin(self._moment, layer)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and hasattr(args[0], "fake_device"):
            return args[0].fake_device  # autograd asks more often than it runs operators, and no mode below need be passed
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it is taken apart first, and comes back here
        if self.paused:
            return func(*args, **(kwargs or {}))
        is_collective = func.namespace in ("fsdp", "c10d")
        result = func(*args, **(kwargs or {}))
        if self.work is not None:
            self.work.count(func, args, kwargs or {}, result)
        # A view makes no memory: what is first seen in one is a backend's own, such as the copy that gloo reduces in.
        for item in tree_iter((() if func.is_view else result, args if is_collective else ())):
            if isinstance(item, torch.Tensor):
                self._see(item)
        if not (is_collective or func.is_view or _torch_compat.in_backward()) and self._reads_parameters(args):
            made = (item for item in tree_iter(result) if isinstance(item, torch.Tensor) and not self._is_gathered(item))
            # What FSDP copies into a parameter is no output.
            self._outputs[self._layer, Kind.OUTPUTS] += sum(item.nbytes for item in made)
        if is_collective:
            self._mark(func.name(), args, kwargs or {})
        elif func is torch.ops.aten.div.Tensor and self._is_packed(args[0]):
            self._become(result, Kind.COMMUNICATION)
        elif func is torch.ops.aten.copy_.default and args[0].shape == args[1].shape and self._is_packed(args[1]):
            self._become(args[0], Kind.REDUCED)
        self._note_peak()
        if is_collective:
            # What is gathered ahead is in the buffer of the collective as yet.
            ahead = args[0].untyped_storage().nbytes() if func.name() == "c10d::_allgather_base_" else 0
            self.gathered = max(self.gathered, _gathered_bytes(self.units) + ahead)
        return result

    def _reads_parameters(self, args: Any) -> bool:
        """Return whether an operator is given a gathered parameter beside something else."""
        given = [self._is_gathered(item) for item in args if isinstance(item, torch.Tensor)]
        return len(given) > 1 and any(given)

    def _is_gathered(self, tensor: torch.Tensor) -> bool:
        known = self._alive.get(tensor.untyped_storage()._cdata)
        return known is not None and known[2] is Kind.GATHERED

    def _is_packed(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has the gradients of a unit in a row, as FSDP reduces them.

        If their group has one rank, FSDP divides and copies them, and the shards of gradients are views of that copy.
        """
        known = self._alive.get(tensor.untyped_storage()._cdata)
        return tensor.dim() == 1 and known is not None and known[2] is Kind.COMMUNICATION and _torch_compat.in_backward()

    def _mark(self, name: str, args: Any, more: Mapping[str, Any]) -> None:
        """Say what the buffers of a collective are for."""
        if name == "c10d::_allgather_base_":
            self._become(args[0], Kind.GATHERED)
        elif name == "c10d::_reduce_scatter_base_":
            self._become(args[0], Kind.REDUCED)
            self._become(args[1], Kind.COMMUNICATION)
        elif name == "fsdp::chunk_cat":
            self._become(more["out"], Kind.COMMUNICATION, only=Kind.ACTIVATIONS)
        elif name.startswith("c10d::"):
            for item in tree_iter(args):
                if isinstance(item, torch.Tensor):
                    self._become(item, Kind.COMMUNICATION, only=Kind.ACTIVATIONS)

    def _become(self, tensor: torch.Tensor, kind: Kind, only: Kind | None = None) -> None:
        key = tensor.untyped_storage()._cdata
        if key in self._alive:
            reference, size, before, layer = self._alive[key]
            if before is Kind.STATE or only not in (None, before):
                return
            self._alive[key] = (reference, size, kind, layer)
            self._count(-size, before, layer)
            self._count(size, kind, layer)

    def _see(self, tensor: torch.Tensor, kind: Kind | None = None) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        self._weigh(tensor.untyped_storage(), kind or self._kind_of(tensor.shape))

    def _kind_of(self, shape: Sequence[int]) -> Kind:
        if _torch_compat.in_backward() and tuple(sorted(shape)) in self.shapes:
            return Kind.UNREDUCED
        return Kind.LOGITS if self.words and self.words in shape and len(shape) > 1 else Kind.ACTIVATIONS

    def _weigh(self, storage: torch.UntypedStorage, kind: Kind) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._alive.get(key)
        if known is None:
            self._alive[key] = (weakref.ref(storage, lambda _: self._forget(key)), size, kind, self._layer)
            self._count(size, kind, self._layer)
        elif known[1] != size:
            self._alive[key] = (known[0], size, known[2], self._layer)
            self._count(-known[1], known[2], known[3])
            self._count(size, known[2], self._layer)

    def _forget(self, key: int) -> None:
        if (known := self._alive.pop(key, None)) is not None:
            self._count(-known[1], *known[2:])

    def _count(self, size: int, kind: Kind, layer: str) -> None:
        self.held += size
        self.now[layer, kind] += size
        if kind is Kind.UNREDUCED:
            self._unreduced += size
            self.gradients = max(self.gradients, self._unreduced)

    def _note_peak(self) -> None:
        if self.held > self._most:
            self._most = self.held
            self.moments[self._moment] = dict(self.now)
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

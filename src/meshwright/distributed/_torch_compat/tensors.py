"""Tensors, placements and operators."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "alias",
    "compiled_anew",
    "cuts_of",
    "in_backward",
    "is_decomposed",
    "memory_of",
    "not_moved",
    "operator_names",
    "operator_schema",
    "own_memory",
    "plain_placements",
    "sharded_dim",
    "strided_shard",
    "unseen",
    "with_local",
]


def strided_shard(dim: int, pieces: int) -> Placement:
    """The placement of a dimension that holds several tensors one after another, each of which is sharded."""
    return _StridedShard(dim, split_factor=pieces)


def sharded_dim(placement: Placement) -> int | None:
    """The dimension that a placement shards, strided or not; ``None``: none."""
    return placement.dim if isinstance(placement, Shard | _StridedShard) else None


def plain_placements(tensor: DTensor) -> tuple[Placement, ...] | None:
    """The placements of a tensor, with ``Shard`` for each strided placement of a packed dimension; ``None`` without any.

    FSDP's own strided placements stay. They mean that a later axis of the mesh shards the same dimension, and DCP handles them.
    """
    placements = list(tensor.placements)
    for axis, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            later = [other for other in placements[axis + 1 :] if isinstance(other, Shard) and other.dim == placement.dim]
            if not later:
                placements[axis] = Shard(placement.dim)
    return tuple(placements) if placements != list(tensor.placements) else None


def cuts_of(tensor: DTensor) -> list[tuple[int, int, int]]:
    """Return what shards a tensor, in the order in which it is sharded: (axis of the mesh, dimension, pieces).

    FSDP's strided placements mean that later axes of the mesh shard the same dimension, and do it first. Other strided
    placements are of packed dimensions (:func:`strided_shard`), which only axes shard that do it before FSDP. torch 2.11 leaves
    FSDP's own placement plain beside them, because its ``DTensorSpec.num_shards_map`` counts no strided placement.
    """
    placements = [item if isinstance(item, Shard | _StridedShard) else None for item in tensor.placements]
    first: list[tuple[int, int, int]] = []
    last: list[tuple[int, int, int]] = []
    for axis, placement in enumerate(placements):
        if placement is None:
            continue
        later = [other for other in placements[axis + 1 :] if other is not None and other.dim == placement.dim]
        if later and any(isinstance(other, _StridedShard) for other in (placement, *later)):
            last.append((axis, placement.dim, 1))
        else:
            first.append((axis, placement.dim, int(placement.split_factor) if isinstance(placement, _StridedShard) else 1))
    return [*first, *reversed(last)]


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Within a dispatch mode: a detached tensor over the same memory, with the same version counter."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def memory_of(tensor: torch.Tensor) -> int:
    """A number that identifies the memory of a tensor while it is alive; for a DTensor, that of its local tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()._cdata


def own_memory(tensor: torch.Tensor) -> None:
    """Copy a tensor (the local tensor of a DTensor) into memory of its own.

    A tensor that is read from a file on the CPU may be a view of the mapped file. Then a shard keeps the whole parameter in
    memory, and changes if the file changes.
    """
    if isinstance(tensor, DTensor):
        tensor._local_tensor = tensor._local_tensor.detach().clone()
    else:
        tensor.data = tensor.detach().clone()


def with_local(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor like another one, but with this local tensor, which may be of another dtype, or on another device."""
    made: Any = torch.empty_like(tensor, device=local.device, dtype=local.dtype)
    made._local_tensor = local
    return made


@contextmanager
def compiled_anew() -> Iterator[None]:
    """What is compiled inside does not come from the files of earlier processes, which confuse subclasses of tensors.

    docs/upstream.md: *the cache of compiled graphs*. Kernels do come from files.
    """
    with functorch_config.patch(enable_autograd_cache=False):
        yield


@contextmanager
def not_moved() -> Iterator[None]:
    """Inside, ``DTensor.from_local`` leaves a tensor on its device, also if that is not the one of the mesh.

    Otherwise all shards of a model that is kept on the host would be copied to the accelerator while it is read.
    """
    original = DTensor.from_local

    def from_local(local: torch.Tensor, *args: Any, **options: Any) -> Any:
        return with_local(original(local.to("meta"), *args, **options), local)

    DTensor.from_local = staticmethod(from_local)  # type: ignore[assignment]
    try:
        yield
    finally:
        DTensor.from_local = staticmethod(original)  # type: ignore[method-assign]


@contextmanager
def unseen() -> Iterator[None]:
    """Inside, no dispatch mode sees the operators."""
    with _disable_current_modes():
        yield


def operator_names() -> list[str]:
    """All operators that are registered now, as ``aten.mm.default``."""
    names = []
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        operator, _, overload = rest.partition(".")
        names.append(f"{space}.{operator}.{overload or 'default'}")
    return names


def is_decomposed(operator: torch._ops.OpOverload) -> bool:
    """Whether an operator is decomposed above autograd, as ``aten.linear`` is, so a dispatch mode never sees it."""
    return operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def operator_schema(operator: Any) -> Any:
    """Arguments, returns and mutability of an operator; ``None`` for a higher-order one, such as flex attention."""
    return getattr(operator, "_schema", None)


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread. A forward within it is a recomputation."""
    return torch._C._current_graph_task_id() != -1

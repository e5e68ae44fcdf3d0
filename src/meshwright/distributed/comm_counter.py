"""Counts collectives and their bytes. torch's ``CommDebugMode`` breaks when a module runs forward twice; this does not."""

from collections import Counter, defaultdict
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from meshwright.distributed._torch_compat import group_of_call

__all__ = ["CommCounter"]

_NAMES = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "scatter_": "scatter",
    "gather_": "gather",
    "barrier": "barrier",
    "send": "send",
}


class CommCounter(TorchDispatchMode):
    """Inside this context, collectives of this rank are counted.

    Attributes:
        counts: kind (``all_gather``, ``reduce_scatter``, ``all_reduce``, ...) to number of calls.
        bytes: kind to bytes of the larger of the call's input and output buffers.
        counts_of: ranks of a group to the ``counts`` of its collectives.
        bytes_of: ranks of a group to the ``bytes`` of its collectives.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.counts_of: defaultdict[tuple[int, ...], Counter[str]] = defaultdict(Counter)
        self.bytes_of: defaultdict[tuple[int, ...], Counter[str]] = defaultdict(Counter)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count calls of the two namespaces that collectives live in, and run every call."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor takes it apart first; its collectives come back here one by one
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional") and name in _NAMES:
            kind = _NAMES[name]
            size, ranks = max(_tensor_bytes(args), _tensor_bytes(result), *map(_tensor_bytes, args), 0), group_of_call(args)
            for counts, sizes in ((self.counts, self.bytes), (self.counts_of[ranks], self.bytes_of[ranks])):
                counts[kind] += 1
                sizes[kind] += size
        return result

    def reset(self) -> None:
        """Start counting anew."""
        for counter in (self.counts, self.bytes, self.counts_of, self.bytes_of):
            counter.clear()


def _tensor_bytes(value: Any) -> int:
    """Bytes of the largest tensor in a nest; lists of equal parts (list collectives) count together.

    ``all_gather`` has a list of such lists, one for each of its inputs.
    """
    if isinstance(value, list) and value and all(isinstance(item, list) for item in value):
        return sum(map(_tensor_bytes, value))
    if isinstance(value, list | tuple) and value and all(isinstance(item, torch.Tensor) for item in value):
        return sum(item.numel() * item.element_size() for item in value)
    return max((t.numel() * t.element_size() for t in tree_iter(value) if isinstance(t, torch.Tensor)), default=0)

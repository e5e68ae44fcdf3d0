"""What a rank computes in a step: operations of matrix products and of attention, and bytes that all other operators move."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

__all__ = ["Work", "WorkCounter", "total"]

aten = torch.ops.aten


class Work(StrEnum):
    """Kinds of work."""

    PRODUCTS = "products"
    """Operations of matrix products; a multiply-add is two."""

    ATTENTION = "attention"
    """Operations of attention kernels. A causal one computes half of the scores."""

    PRODUCTS_FP32 = "products_fp32"
    """Operations of matrix products of fp32 tensors, which have no fast units unless they are rounded."""

    THIN = "thin"
    """Operations of products that are bound by the memory on devices with fast units for them; they are in PRODUCTS too."""

    THIN_MOVED = "thin_moved"
    """Bytes that these products read and write."""

    MOVED = "moved"
    """Bytes that other operators read and write."""

    STARTED = "started"
    """Number of operators that were started: each costs the host some time."""

    UNITS = "units"
    """Number of FSDP units: the host runs hooks, gathers and reductions of each."""


THIN = 100
"""Operations for a byte below which a product of 16-bit numbers counts as thin. A product with an adapter of rank r has about r
of them. The memory bounds what is below the quotient of what products and the memory reach: 135 on an A100, 127 on an MI300X,
236 on an H100 (data sheets; shares of ml-engineering, compute/accelerator). The roofline is that of Williams et al. 2009,
doi 10.1145/1498765.1498785."""

FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "_unsafe_view",
    "_reshape_alias", "detach", "alias", "lift_fresh", "set_", "resize_", "_local_scalar_dense", "record_stream",
}  # fmt: skip
"""Operators that move nothing."""

FILL = {"zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "arange", "eye"}
"""Operators that only write; what they are given says a shape."""

LOOKUP = {"index", "index_select", "gather", "embedding", "take", "take_along_dim", "nll_loss_forward"}
"""Operators that read as much of their first argument as they return."""

INTO = {
    "index_put", "index_put_", "_index_put_impl_", "index_add", "index_add_", "scatter", "scatter_", "scatter_add",
    "scatter_add_",
}  # fmt: skip
"""Operators that read and write some rows of their first argument, as many as they are given. Without a ``_`` at the end, they
copy it first."""

FSDP = {"fsdp::split_with_sizes_copy", "fsdp::chunk_cat"}
"""Copies of whole parameters and gradients that FSDP2 makes beside the compute."""


def total(works: Iterable[Mapping[Work, Any]]) -> Counter[Work]:
    """Return several works together."""
    found: Counter[Work] = Counter()
    for one in works:
        found.update(one)
    return found


class WorkCounter(TorchDispatchMode):
    """Inside, the work of every operator is counted.

    Attributes:
        works: name of each moment (:meth:`begin`) to the work in it by layer and kind.
        paused: whether operators are no work of the step.
    """

    paused = False

    def __init__(self) -> None:
        super().__init__()
        self.works: dict[str, dict[str, Counter[Work]]] = {}
        self._now: Counter[Work] = Counter()

    def begin(self, moment: str, layer: str = "") -> None:
        """Begin a moment, or a layer's part in it; each may begin several times."""
        self._now = self.works.setdefault(moment, {}).setdefault(layer, Counter())

    @property
    def moments(self) -> dict[str, Counter[Work]]:
        """Name of each moment to its work by kind, that of all layers together."""
        return {moment: total(works.values()) for moment, works in self.works.items()}

    def attended(self, operations: int) -> None:
        """Count the operations of an attention that another one stands in for."""
        self._now[Work.ATTENTION] += operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it is taken apart first, and comes back here
        result = func(*args, **(kwargs or {}))
        if not self.paused:
            self.count(func, args, kwargs or {}, result)
        return result

    def count(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """Count the work of an operator that has run, for another mode that sees it."""
        if func.is_view or (func.namespace != "aten" and func.name() not in FSDP):
            return
        packet = func.overloadpacket
        name = func.name().partition("::")[2].partition(".")[0]
        if name not in FREE:
            self._now[Work.STARTED] += 1
        if packet in (
            aten._scaled_dot_product_flash_attention_for_cpu,
            aten._scaled_dot_product_flash_attention_for_cpu_backward,
        ):
            self._now[Work.ATTENTION] += _attention(func, args, kwargs)
        elif packet is aten._grouped_mm:
            left, right = args[:2]  # [tokens, in] x [experts, in, out], or [in, tokens] x [tokens, out]: each token once
            self._multiplied(2 * math.prod(left.shape) * right.shape[-1], args, result)
        elif packet in flop_registry:
            self._multiplied(flop_registry[packet](*args, **kwargs, out_val=result), args, result)
        else:
            self._now[Work.MOVED] += _moved(name, args, kwargs, result)

    def _multiplied(self, operations: int, args: Any, result: Any) -> None:
        kind, moved = _products(args), _bytes((args, result))
        self._now[kind] += operations
        if kind is Work.PRODUCTS and operations < THIN * moved:
            self._now[Work.THIN] += operations
            self._now[Work.THIN_MOVED] += moved


def _products(args: Any) -> Work:
    wide = any(isinstance(item, torch.Tensor) and item.dtype == torch.float32 for item in args)
    return Work.PRODUCTS_FP32 if wide else Work.PRODUCTS


def _moved(name: str, args: Any, kwargs: Any, result: Any) -> int:
    """Return the bytes that an operator reads and writes, by the name of its packet."""
    if name in FREE:
        return 0
    written, given = _bytes(result), _bytes((args, kwargs))
    if name in FILL or name in ("fill_", "zero_"):
        return written
    if name == "copy_":
        return written + _bytes(args[1])
    first = _bytes(args[0]) if args else 0
    if name in LOOKUP:
        return given - first + 2 * written
    if name in INTO:
        return (0 if name.endswith("_") else first + written) + 3 * (given - first)
    return given + written


def _bytes(tree: Any) -> int:
    """Return the bytes of all tensors in a tree. Of a tensor that repeats one in memory, that one counts."""
    return sum(
        min(item.numel() * item.element_size(), item.untyped_storage().nbytes())
        for item in tree_iter(tree)
        if isinstance(item, torch.Tensor)
    )


def _attention(func: Any, args: Any, kwargs: Mapping[str, Any]) -> int:
    """Return the operations of an attention: two products forward, five backward (Dao 2023, arXiv 2307.08691, section 3.1)."""
    backward = func.overloadpacket is aten._scaled_dot_product_flash_attention_for_cpu_backward
    query, key, value = args[1:4] if backward else args[:3]
    causal = next((item for item in (*args, kwargs.get("is_causal")) if isinstance(item, bool)), False)
    scores = math.prod(query.shape[:3]) * key.shape[2]
    products = (3 * query.shape[3] + 2 * value.shape[3]) if backward else query.shape[3] + value.shape[3]
    return 2 * scores * products // (2 if causal else 1)

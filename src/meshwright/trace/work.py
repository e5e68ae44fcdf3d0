"""What a rank computes in a step: operations of matrix products and of attention, and bytes that all other operators move."""

import math
from collections import Counter
from enum import StrEnum
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

__all__ = ["Work", "WorkCounter"]

aten = torch.ops.aten


class Work(StrEnum):
    """Kinds of work."""

    PRODUCTS = "products"
    """Operations of matrix products; a multiply-add is two."""

    ATTENTION = "attention"
    """Operations of attention kernels. A causal one computes half of the scores."""

    MOVED = "moved"
    """Bytes that other operators read and write."""


class WorkCounter(TorchDispatchMode):
    """Inside, the work of every operator is counted.

    Attributes:
        moments: name of each moment (:meth:`begin`) to its work by kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moments: dict[str, Counter[Work]] = {}
        self._now: Counter[Work] = Counter()

    def begin(self, moment: str) -> None:
        """Begin a moment; it may begin several times."""
        self._now = self.moments.setdefault(moment, Counter())

    def attended(self, operations: int) -> None:
        """Count the operations of an attention that another one stands in for."""
        self._now[Work.ATTENTION] += operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it is taken apart first, and comes back here
        result = func(*args, **(kwargs or {}))
        if func.namespace != "aten" or func.is_view:
            return result
        packet = func.overloadpacket
        if packet in (
            aten._scaled_dot_product_flash_attention_for_cpu,
            aten._scaled_dot_product_flash_attention_for_cpu_backward,
        ):
            self._now[Work.ATTENTION] += _attention(func, args, kwargs or {})
        elif packet is aten._grouped_mm:
            left, right = args[:2]  # [tokens, in] x [experts, in, out], or [in, tokens] x [tokens, out]: each token once
            self._now[Work.PRODUCTS] += 2 * math.prod(left.shape) * right.shape[-1]
        elif packet in flop_registry:
            self._now[Work.PRODUCTS] += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        else:
            tensors = (item for item in tree_iter((args, kwargs, result)) if isinstance(item, torch.Tensor))
            self._now[Work.MOVED] += sum(item.numel() * item.element_size() for item in tensors)
        return result


def _attention(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """Return the operations of an attention: two products forward, five backward (Dao 2023, arXiv 2307.08691, section 3.1)."""
    backward = func.overloadpacket is aten._scaled_dot_product_flash_attention_for_cpu_backward
    query, key, value = args[1:4] if backward else args[:3]
    causal = next((item for item in (*args, kwargs.get("is_causal")) if isinstance(item, bool)), False)
    scores = math.prod(query.shape[:3]) * key.shape[2]
    products = (3 * query.shape[3] + 2 * value.shape[3]) if backward else query.shape[3] + value.shape[3]
    return 2 * scores * products // (2 if causal else 1)

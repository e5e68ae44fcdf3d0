"""Keeps a float64 audit in float64."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FLOORS", "KeepFloat64"]

FLOORS = {"float64": 1e-4, "float32": 1e-3, "bfloat16": 1e-3}
"""Smallest scale of a gradient's error, as a share of the largest entry of all gradients. Normally the scale is the gradient's
own largest entry, but some gradients are zero except for rounding (that of a key's bias: softmax does not see it)."""


class KeepFloat64(TorchDispatchMode):
    """Inside this context, conversions of float64 tensors to float32 keep float64, in backward too.

    Models of transformers compute norms, softmaxes and routers in float32 "for precision". In a float64 model that loses
    precision: a layout that sums in another order would differ by 1e-8, and an error of that size could hide there. The mode
    works below autograd, because a mode of Python functions would be off in backward, where checkpointing recomputes.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace float32 by float64 in the ``dtype`` argument of an operator whose first argument is a float64 tensor."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor decomposes it first; its operations come back here one by one
        kwargs = kwargs or {}
        first = args[0] if args else None
        if kwargs.get("dtype") is torch.float32 and isinstance(first, torch.Tensor) and first.dtype == torch.float64:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)

"""Keeps a float64 audit in float64."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FLOORS", "KeepFloat64"]

FLOORS = {"float64": 1e-4, "float32": 1e-3, "bfloat16": 1e-3}
"""A gradient's error is relative to its largest entry, or to this share of the largest entry of all gradients if that is more:
some gradients are zero but for rounding (of a key's bias: softmax does not see it), and have no scale of their own.
"""


class KeepFloat64(TorchDispatchMode):
    """Inside, a float64 tensor that is asked to become float32 stays what it is, in backward too.

    Models of transformers compute norms, softmaxes and routers in float32 "for precision". In a float64 model that throws
    precision away: a layout that sums in another order would differ by 1e-8, and an error of that size could hide there.
    It works below autograd: a mode of Python functions would be off in backward, where checkpointing recomputes.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Change the dtype that a conversion, or a function with a dtype of its own, asks for."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor takes it apart first; its operations come back here one by one
        kwargs = kwargs or {}
        first = args[0] if args else None
        if kwargs.get("dtype") is torch.float32 and isinstance(first, torch.Tensor) and first.dtype == torch.float64:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)

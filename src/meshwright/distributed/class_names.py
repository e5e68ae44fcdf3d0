"""Names of classes, for people."""

from typing import Any

from torch.distributed.fsdp import FSDPModule

__all__ = ["class_name"]


def class_name(module: Any) -> str:
    """The name of a module's own class: FSDP gives a unit a class of its own, ``FSDPLinear``."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule)).__name__

"""Activation checkpointing of whole layers."""

import functools
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["checkpoint_forward", "is_checkpointed"]


def checkpoint_forward(module: nn.Module) -> None:
    """Recompute a module's activations in backward instead of keeping them.

    ``forward`` of this instance is replaced, so that parameter names stay as they are, and FSDP's hooks, which run around
    ``forward``, stay outside: backward gathers a unit once, also for the recomputation. Idempotent.
    """
    if is_checkpointed(module):
        return
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return inner(*args, **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, **kwargs)

    forward._meshwright_checkpoint = True  # type: ignore[attr-defined]
    module.forward = forward


def is_checkpointed(module: nn.Module) -> bool:
    """Whether :func:`checkpoint_forward` was applied to a module."""
    return hasattr(module.forward, "_meshwright_checkpoint")

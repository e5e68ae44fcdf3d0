"""The sequences of the forward that is running, for attentions that a model does not tell the positions of their tokens.

A model that is parallelized notes them where its forward begins, and forgets them where it ends. A layer that is computed again
in backward runs outside of that forward. So a checkpoint takes them along (:func:`taken_along`).
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.distributed.context.sequences import Sequences, sequences_of

__all__ = ["carry_sequences", "running_sequences", "taken_along", "takes_along"]

_TAKES = "_meshwright_takes_sequences"
_HOOKED = "_meshwright_carries_sequences"


class _Running(threading.local):
    """Those of this thread: on a device, backward runs in another one."""

    sequences: Sequences | None = None
    before: tuple[Sequences | None, ...] = ()


_RUNNING = _Running()


def running_sequences() -> Sequences | None:
    """Return the whole sequences of the forward that is running; ``None``: it began with no ``position_ids`` of a shard."""
    return _RUNNING.sequences


def carry_sequences(model: nn.Module, module: nn.Module) -> None:
    """Let a module know the sequences of each forward of the model around it, also where it runs again in backward."""
    vars(module)[_TAKES] = True
    if _HOOKED not in vars(model):
        model.register_forward_pre_hook(_begin, with_kwargs=True)
        model.register_forward_hook(_end, always_call=True)
        vars(model)[_HOOKED] = True


def _begin(model: nn.Module, args: Any, kwargs: Any) -> None:
    _RUNNING.before = (*_RUNNING.before, _RUNNING.sequences)
    positions = kwargs.get("position_ids")
    _RUNNING.sequences = sequences_of(positions) if isinstance(positions, torch.Tensor) else None


def _end(*_: Any) -> None:
    *before, _RUNNING.sequences = _RUNNING.before
    _RUNNING.before = tuple(before)


def takes_along(module: nn.Module) -> bool:
    """Return whether something in a module needs the sequences of the forward where it runs again."""
    return any(_TAKES in vars(inner) for inner in module.modules())


def taken_along(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs with the sequences of now, whenever it is called."""
    sequences = _RUNNING.sequences

    def again(*args: Any, **kwargs: Any) -> Any:
        with _running(sequences):
            return run(*args, **kwargs)

    return again


@contextmanager
def _running(sequences: Sequences | None) -> Iterator[None]:
    before, _RUNNING.sequences = _RUNNING.sequences, sequences
    try:
        yield
    finally:
        _RUNNING.sequences = before

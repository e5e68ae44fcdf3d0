"""A batch on its way to the device, and what the host knows of its positions.

transformers asks about ``position_ids``: whether several documents are packed into a sequence, and with flash attention where
each begins. On a device the host would have to wait for each answer, so that it could not run ahead of the device by a single
forward. But positions come from the host. So transformers' own functions are called with the positions on the host, where
nothing is waited for, and what they return is moved to the device.

The answers are stored on the tensor ``position_ids``, as :mod:`~meshwright.distributed.context.sequences` does: several
microbatches may be in flight, and a layer that is recomputed in backward finds those of its own. A model that is called with
positions of another origin asks as ever.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from meshwright.device import pinned
from meshwright.distributed.context.sequences import carry_sequences_to
from meshwright.models._transformers_compat import find_documents, let_positions_answer

__all__ = ["move_batch"]

_ON_HOST = "_meshwright_on_host"


class _OnHost:
    """Positions as the host has them.

    Args:
        positions: [batch, length], on the host.
        moved: the same on a device.
    """

    def __init__(self, positions: torch.Tensor, moved: torch.Tensor) -> None:
        self._positions, self._device, self._answers = positions, moved.device, dict[Any, Any]()
        self._versions = positions._version, moved._version

    def unchanged(self, moved: torch.Tensor) -> bool:
        """Whether neither tensor was written since."""
        return self._versions == (self._positions._version, moved._version)

    def answer(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what a function says of the positions: tensors on the device, but single numbers as such."""
        key = (function, args, *kwargs.items())
        if key not in self._answers:
            self._answers[key] = tree_map_only(torch.Tensor, self._moved, function(self._positions, *args, **kwargs))
        return self._answers[key]

    def _moved(self, answer: torch.Tensor) -> Any:
        return answer.item() if answer.ndim == 0 else pinned(answer, self._device).to(self._device, non_blocking=True)


def move_batch(batch: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Return a batch on a device, without waiting for it.

    A model of transformers that is called with the ``position_ids`` of the result does not wait for the device to know its
    documents either.

    Args:
        batch: tensors on the host, such as ``input_ids`` and ``position_ids`` [batch, length]; they may be those of a shard of
            :func:`~meshwright.distributed.context.sequences.context_parallel`.
        device: the device.
    """
    waiting = {name: pinned(tensor, device) for name, tensor in batch.items()}
    moved = {name: tensor.to(device, non_blocking=True) for name, tensor in waiting.items()}
    if (positions := batch.get("position_ids")) is not None:
        carry_sequences_to(positions, moved["position_ids"])
        if positions.ndim == 2 and positions.device.type == "cpu":
            let_positions_answer(_answer)
            vars(moved["position_ids"])[_ON_HOST] = _OnHost(waiting["position_ids"], moved["position_ids"])
            find_documents(moved["position_ids"])  # now, as it is asked in every forward
    return moved


def _answer(function: Callable[..., Any], positions: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
    """Return what a function of transformers says of positions, from those on the host if they are known."""
    known = _known(positions)
    return function(positions, *args, **kwargs) if known is None else known.answer(function, *args, **kwargs)


def _known(positions: torch.Tensor | None) -> _OnHost | None:
    """Return the same positions on the host, also for a view of all of them, as some models make; ``None``: not known."""
    if positions is None:
        return None
    whole = positions if _ON_HOST in vars(positions) or positions._base is None else positions._base
    known: _OnHost | None = vars(whole).get(_ON_HOST)
    same = known is not None and known.unchanged(whole) and _layout(positions) == _layout(whole)
    return known if same else None


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

"""The functions of transformers that read the values of ``position_ids``, for which the host waits on a device.

They are functions of modules, called by name in the masks and the attention functions of all families. So they are replaced in
these modules, once, by functions that first see whether the answer is known.
"""

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from typing import Any

import torch

__all__ = ["find_documents", "let_positions_answer"]

Answer = Callable[..., Any]
"""Called with a function and its arguments, of which the first are positions; returns what the function returns."""

_MASKS, _FLASH = "transformers.masking_utils", "transformers.modeling_flash_attention_utils"
_ASKED: dict[tuple[str, str], Callable[..., bool]] = {
    (_MASKS, "find_packed_sequence_indices"): lambda *_, **__: False,
    (_FLASH, "_is_packed_sequence"): lambda positions, batch_size: positions is not None and batch_size == 1,
    (_FLASH, "prepare_fa_kwargs_from_position_ids"): lambda positions: True,
}
"""Module and name, to whether the function reads values in a layer that is being compiled too, where its graph breaks then."""


@cache
def let_positions_answer(answer: Answer) -> None:
    """Let ``answer(function, positions, ...)`` stand for each function, from now on.

    A release of transformers that lacks one is as before: the host waits.
    """
    for (module, name), reads in _ASKED.items():
        home = import_module(module)
        if hasattr(home, name):
            setattr(home, name, _answered(getattr(home, name), reads, answer))


def _answered(function: Callable[..., Any], reads: Callable[..., bool], answer: Answer) -> Callable[..., Any]:
    uncompiled = torch.compiler.disable(answer)

    @wraps(function)
    def answered(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return answer(function, *args, **kwargs)
        return uncompiled(function, *args, **kwargs) if reads(*args, **kwargs) else function(*args, **kwargs)

    return answered


def find_documents(positions: torch.Tensor) -> torch.Tensor | None:
    """Return the number of the document of each position, as masks count them; ``None``: each sequence is one."""
    from transformers import masking_utils

    documents: torch.Tensor | None = masking_utils.find_packed_sequence_indices(positions)
    return documents

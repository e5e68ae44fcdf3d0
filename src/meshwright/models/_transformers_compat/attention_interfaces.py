"""Functions of ours in the registries of transformers for attention and masks, for the length of a trace."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

__all__ = ["attention_function", "mask_function", "masks_have_offsets"]


@contextmanager
def attention_function(name: str, function: Callable[..., Any], mask: Callable[..., Any]) -> Iterator[None]:
    """Inside, an attention function and what makes its masks are registered under a name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    before = [(interface, interface._global_mapping.get(name)) for interface in (AttentionInterface, AttentionMaskInterface)]
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, mask)
    try:
        yield
    finally:
        for interface, known in before:
            interface._global_mapping.pop(name, None)
            if known is not None:
                interface.register(name, known)


@contextmanager
def mask_function(name: str, mask: Callable[..., Any]) -> Iterator[None]:
    """Inside, what makes the masks of an attention implementation is another function."""
    from transformers import AttentionMaskInterface

    before = AttentionMaskInterface()[name]
    AttentionMaskInterface.register(name, mask)
    try:
        yield
    finally:
        AttentionMaskInterface.register(name, before)


def masks_have_offsets() -> bool:
    """Return whether this release makes masks from numbers of queries and keys and where each begin, as a rank's are made."""
    from transformers import masking_utils

    return {"q_length", "q_offset", "kv_length", "kv_offset"} <= signature(masking_utils.sdpa_mask).parameters.keys()

"""Tensors of a trace: they have shapes and no values."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

__all__ = ["in_each_place", "leaves", "meta_positions", "meta_tensors", "prime_length", "tensors_in"]

_LEAVES = frozenset((torch.Tensor, nn.Parameter, int, float, bool, type(None), torch.dtype, torch.device))


def leaves(tree: Any) -> list[Any]:
    """Return what is in nested containers, as ``tree_leaves`` of torch does, and sooner for those that operators have."""
    kind = type(tree)
    if kind in _LEAVES:
        return [tree]
    if kind is list or kind is tuple:
        return [leaf for item in tree for leaf in leaves(item)]
    return tree_leaves(tree) if kind is not dict or tree else []


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers."""
    return [item for item in leaves(tree) if isinstance(item, torch.Tensor)]


def meta_positions(length: int, rows: int = 1) -> torch.Tensor:
    """Return the positions [rows, length] of a sequence, without values."""
    return torch.arange(length).to("meta").expand(rows, -1)


def meta_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a tensor without values for each parameter and buffer, by name; tied parameters are one tensor."""
    named = (model.named_parameters(), model.named_buffers())
    return {name: tensor.detach().to("meta") for some in named for name, tensor in some}


def in_each_place(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors by all places of a model that hold them, each once: of a module in two places, by its first name.

    ``functional_call`` would put the tensors of such a module in twice, and leave them there.
    """
    named = [own for find in (model.named_parameters, model.named_buffers) for own in find(remove_duplicate=False)]
    given = {id(own): tensors[name] for name, own in named if name in tensors}
    return {
        f"{place}.{name}".removeprefix("."): given[id(own)]
        for place, module in model.named_modules()
        for name, own in (*module._parameters.items(), *module._buffers.items())
        if id(own) in given
    }


def prime_length(model: nn.Module, above: int = 30) -> int:
    """Return a prime above a number that divides no size of a parameter: otherwise features would look like tokens."""
    sizes = {size for parameter in model.parameters() for size in parameter.shape if size}
    primes = (
        number for number in range(above + 1, 1000) if all(number % divisor for divisor in range(2, 32) if divisor < number)
    )
    return next(prime for prime in primes if all(size % prime for size in sizes))

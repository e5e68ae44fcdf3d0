"""How a model holds its parameters: under several names if they are tied, and some weights as [in, out]."""

import torch
from torch import nn

__all__ = ["is_conv1d", "is_transposed", "names_of_parameters"]


def names_of_parameters(model: nn.Module) -> dict[torch.Tensor, list[str]]:
    """Return the names of each parameter, in the order of the first ones. A tied parameter has several."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is a ``Conv1D`` of transformers, also as a unit of FSDP, which has a class of its own.

    Its weight is [in, out]; that of ``torch.nn.Linear`` is [out, in].
    """
    return any((kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D") for kind in type(module).__mro__)


def is_transposed(module: nn.Module) -> bool:
    """Return whether the weights of a module are [in, out]: of a ``Conv1D``, or of experts that say so."""
    return is_conv1d(module) or bool(getattr(module, "is_transposed", False))

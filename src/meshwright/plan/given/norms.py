"""Whether a module is a norm: read from the operators of one call without values, never from the name of its class.

A norm divides its input by a statistic of it, and scales and shifts every feature by itself. What multiplies its input with a
matrix is no norm, whatever it is called: a normalized linear layer has a matrix.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["is_norm"]

_STATISTICS = {
    "_fused_rms_norm", "linalg_vector_norm", "mean", "native_batch_norm", "native_group_norm", "native_layer_norm", "norm",
    "rms_norm", "rsqrt", "std", "std_mean", "var", "var_mean",
}  # fmt: skip
_FUSED = {"_fused_rms_norm", "native_batch_norm", "native_group_norm", "native_layer_norm", "rms_norm"}
"""Statistics that scale and shift too, by parameters among their arguments."""

_ELEMENTWISE = {
    "_to_copy", "add", "alias", "clone", "detach", "div", "expand", "mul", "neg", "permute", "pow", "reshape", "sub", "t", "to",
    "transpose", "unsqueeze", "squeeze", "view", "_unsafe_view",
}  # fmt: skip
"""What a norm does with its parameters."""


class _Operators(TorchDispatchMode):
    """Follows the input and the parameters of a call.

    Attributes:
        statistic: whether a statistic of the input was computed.
        elementwise: whether parameters only scaled and shifted, after the statistic.
    """

    def __init__(self, given: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._given: Any = WeakIdKeyDictionary({given: True})
        self._own: Any = WeakIdKeyDictionary(dict.fromkeys(parameters.values(), True))
        self.statistic, self.elementwise = False, True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.partition("::")[2].rstrip("_")
        tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
        given, own = (any(tensor in of for tensor in tensors) for of in (self._given, self._own))
        if name in _STATISTICS and given:
            self.statistic = True
        if own and name not in _ELEMENTWISE and not (name in _FUSED and tensors[0] not in self._own):
            self.elementwise = False
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                for of, has in ((self._given, given), (self._own, own)):
                    if has:
                        of[tensor] = True
        return result


def is_norm(module: nn.Module) -> bool:
    """Return whether a module without children is a norm whose parameters have two or more dimensions.

    Other modules are not asked, because what has one dimension is no matrix in any case. The module is called with tensors on
    the meta device, and not changed.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters(recurse=False)}
    largest = max(shapes.values(), key=len, default=())
    known = isinstance(module, nn.Linear | nn.Embedding | nn.modules.conv._ConvNd)
    if len(largest) < 2 or known or any(True for _ in module.children()):
        return False
    try:
        return _traced(module, largest)
    except Exception:  # it takes something else than one tensor of its features: no norm
        return False


def _traced(module: nn.Module, features: tuple[int, ...]) -> bool:
    called = copy.copy(module)
    for kind in ("_parameters", "_buffers"):
        held = vars(module)[kind].items()
        vars(called)[kind] = {name: None if own is None else torch.empty_like(own, device="meta") for name, own in held}
    own: dict[str, torch.Tensor] = {name: item for name, item in vars(called)["_parameters"].items() if item is not None}
    given = torch.empty((2, 3, *features), dtype=next(iter(own.values())).dtype, device="meta")
    operators = _Operators(given, own)
    with torch.no_grad(), operators:
        output = type(module).forward(called, given)  # without hooks, which are for real calls
    return operators.statistic and operators.elementwise and isinstance(output, torch.Tensor) and output.shape == given.shape

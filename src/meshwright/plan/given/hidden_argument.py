"""Which argument of a module's forward is the hidden state, and where a call has it: bound by the signature, never by order."""

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from meshwright.errors import PlanError

__all__ = [
    "HIDDEN",
    "Argument",
    "first_of",
    "forward_of",
    "hidden_argument",
    "place_of",
    "value_of",
    "with_argument",
    "with_first",
]

HIDDEN = "hidden_states"
"""Name that the models of transformers give to the hidden state among the arguments of a module."""

Argument = tuple[int, str]
"""Position and name of an argument in a signature."""


def forward_of(kind: type[nn.Module]) -> Callable[..., Any]:
    """Return the forward of a class. The class of a scripted module does not show its own; ``__call__`` stands in for it."""
    return getattr(kind, "forward", None) or nn.Module.__call__


def hidden_argument(module: nn.Module) -> Argument:
    """Return position and name of the hidden state among the arguments of a module's forward."""
    if "forward" in vars(module):
        return _hidden_argument(module.forward)
    return _hidden_of_class(type(module))  # type: ignore[arg-type]  # classes are hashable


@lru_cache(maxsize=4096)
def _hidden_of_class(kind: type[nn.Module]) -> Argument:
    return _hidden_argument(forward_of(kind))


def _hidden_argument(forward: Callable[..., Any]) -> Argument:
    """Return position and name of the hidden state among the arguments: the one with that name, otherwise the first."""
    try:
        arguments = inspect.signature(forward).parameters
    except (TypeError, ValueError):  # it is not Python code
        return 0, HIDDEN
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, item in arguments.items() if item.kind in by_place and name != "self"]
    if HIDDEN in arguments and HIDDEN not in names:  # keyword-only
        return len(names), HIDDEN
    return (names.index(HIDDEN), HIDDEN) if HIDDEN in names else (0, (names or [HIDDEN])[0])


def place_of(argument: Argument, args: tuple[Any, ...], kwargs: Mapping[str, Any], module: str) -> int | str:
    """Return where a call has an argument: its position in ``args``, or its name in ``kwargs``.

    A forward that takes ``**kwargs`` alone has no name for it. It is then the only floating-point tensor of the call.

    Args:
        argument: position and name in the signature.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        module: name of the module, for the message.

    Raises:
        PlanError: the call has no such argument, or several that it might be.
    """
    place, name = argument
    if name in kwargs:
        return name
    if place < len(args):
        return place
    tensors = [own for own, value in kwargs.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    if len(tensors) == 1:
        return tensors[0]
    among = f"is one of {', '.join(tensors)}" if tensors else "is missing"
    raise PlanError(
        "plan.hidden_argument",
        f"module {module!r}: its forward names no argument for its hidden state, and the call does not tell which one it is "
        f"({name!r} {among}); pass it by position or as {HIDDEN!r}",
    )


def value_of(argument: Argument, args: tuple[Any, ...], kwargs: Mapping[str, Any], module: str) -> Any:
    """Return an argument of a call. For the parameters and errors see :func:`place_of`."""
    place = place_of(argument, args, kwargs, module)
    return kwargs[place] if isinstance(place, str) else args[place]


def first_of(output: Any) -> Any:
    """Return the hidden state that a module returns: its output, or the first item of a tuple or list."""
    return output[0] if isinstance(output, tuple | list) and output else output


def with_first(output: Any, hidden: Any) -> Any:
    """Return what a module returns with another hidden state."""
    if isinstance(output, list) and output:
        return [hidden, *output[1:]]
    return (hidden, *output[1:]) if isinstance(output, tuple) and output else hidden


def with_argument(
    argument: Argument, args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Any], Any], module: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with one of them changed, and with it those that are the same tensor: some attentions are
    given their input as queries, keys and values. For the parameters and errors see :func:`place_of`.
    """
    value = value_of(argument, args, kwargs, module)
    changed = change(value)
    return (
        tuple(changed if item is value else item for item in args),
        {name: changed if item is value else item for name, item in kwargs.items()},
    )

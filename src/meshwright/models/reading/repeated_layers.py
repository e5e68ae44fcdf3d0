"""Layers that repeat others: a trace passes over them, and what it found of one layer holds for all that look alike.

Large models have a hundred layers and few kinds of them, and each trace takes as long as it has layers. This is for classes of
which the structure is known, without code or hooks of a user: there, a layer may compute with its number. What a model gives
its layers has to be the same for all of a kind, too.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import nn

from meshwright.models.reading.tracing import attributes
from meshwright.plan.given.hidden_argument import forward_of, hidden_argument, value_of
from meshwright.plan.given.names import holder_of, outermost
from meshwright.plan.given.parameter_storage import names_of_parameters

__all__ = ["RepeatedLayers"]

_LEAST = 5
"""Number of layers of a kind, from which on some are passed over."""

_NUMBER = "layer_idx"
"""Name of the attribute that holds the number of a layer, in the known classes: their layers use it for the cache alone."""

_OF_TORCH = vars(nn.Module()).keys()
"""Attributes of each module. Its parameters, buffers and hooks are looked at otherwise."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Of a user: they may do anything, so a layer with one is like no other."""

_LIBRARIES = ("torch.", "transformers.", "peft.", "meshwright.")

T = TypeVar("T")


class RepeatedLayers:
    """The layers of a model that look like others.

    Of each kind the first two layers and the last one run. What is found of these three has to be the same.

    Args:
        model: the model, on any device. It is not changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        # A stage has its layers in a dict.
        lists = [name for name, module in self._modules.items() if isinstance(module, nn.ModuleList | nn.ModuleDict)]
        stacks = [name for name in lists if not outermost(name, lists)]
        layers = [f"{stack}.{own}" for stack in stacks for own in self._modules[stack]._modules]
        self._layers = {layer: index for index, layer in enumerate(layers)}
        self._kinds: list[list[str]] = []
        if not all(map(_is_of_libraries, {type(module) for module in self._modules.values()})):
            return
        shared = [own for names in names_of_parameters(model).values() if len(names) > 1 for own in names]
        together = {outermost(name, self._layers) for name in shared}  # they hold parameters of another module
        kinds: dict[Any, list[str]] = {}
        for layer in layers:
            kinds.setdefault((holder_of(layer), _looks(layer, self._modules[layer])), []).append(layer)
        self._kinds = [kind for kind in kinds.values() if len(kind) >= _LEAST and together.isdisjoint(kind)]

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._kinds)

    @contextmanager
    def passed_over(self) -> Iterator[None]:
        """Inside, those that do not run return their hidden state.

        Raises:
            TypeError: in a forward, if a layer that runs returns something else than a hidden state, or a layer is given
                something else than another one of its kind.
        """
        changes: list[tuple[nn.Module, dict[str, Any]]] = []
        for first, second, *others, last in self._kinds:
            kind = _Kind(self._modules[first])
            changes += [(self._modules[name], {"forward": kind.runs(self._modules[name])}) for name in (first, second, last)]
            changes += [(self._modules[name], {"forward": kind.passes(self._modules[name])}) for name in others]
        with attributes(changes):
            yield

    def spread(self, found: Sequence[T]) -> tuple[T, ...] | None:
        """Return what was found of layers that ran, and the same of those that did not, in the order of layers.

        Args:
            found: strings, tuples or dataclasses, which hold names of modules. What names no layer stays where it is.

        Returns:
            ``None`` if two layers that look alike differ in what was found of them, or something names several layers.
        """
        owners = [_layers_in(item, self._layers) for item in found]
        if any(len(own) > 1 for own in owners):
            return None
        of_layers: dict[str, list[T]] = {}
        placed: list[tuple[int, T]] = []
        place = -1
        for item, own in zip(found, owners, strict=True):
            for layer in own:
                place = self._layers[layer]
                of_layers.setdefault(layer, []).append(item)
            placed.append((place, item))
        for first, second, *others, last in self._kinds:
            known = of_layers.get(second, [])
            for name in (first, last):
                if [_renamed(item, second, name) for item in known] != of_layers.get(name, []):
                    return None
            placed += [(self._layers[name], _renamed(item, second, name)) for name in others for item in known]
        return tuple(item for _, item in sorted(placed, key=lambda one: one[0]))


class _Kind:
    """The forwards of layers of a kind, in place of their own and with the same signature.

    Args:
        first: the layer that runs first in each forward of the model.
    """

    def __init__(self, first: nn.Module) -> None:
        self._first = first
        self._given: list[Any] = []

    def _hidden(self, layer: nn.Module, args: Any, kwargs: Any) -> torch.Tensor:
        """Return the hidden state that a layer is given, if all else is what the others were given."""
        hidden: torch.Tensor = value_of(hidden_argument(layer), args, kwargs, "layer")
        given = [[name, item] for name, item in (*enumerate(args), *sorted(kwargs.items())) if item is not hidden]
        if layer is self._first:
            self._given = given
        elif not _is_same(given, self._given):
            raise TypeError("layers that look alike are given different arguments")
        return hidden

    def runs(self, layer: nn.Module) -> Any:
        """Return the forward of a layer; what it returns has to be one hidden state."""
        own = layer.forward

        @wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            given, made = self._hidden(layer, args, kwargs), own(*args, **kwargs)
            if not isinstance(made, torch.Tensor) or (made.shape, made.dtype) != (given.shape, given.dtype):
                raise TypeError("a layer returns something else than a hidden state")
            return made

        return forward

    def passes(self, layer: nn.Module) -> Any:
        """Return a forward that returns the hidden state."""
        return wraps(layer.forward)(lambda *args, **kwargs: self._hidden(layer, args, kwargs))


def _is_same(one: Any, other: Any) -> bool:
    """Return whether arguments are the same objects, or plain values that are equal."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return isinstance(one, bool | int | float | str) and one == other


def _is_of_libraries(kind: type[nn.Module]) -> bool:
    """Return whether a class and its forward are of libraries whose layers do not compute with their number."""
    return all(of.__module__.startswith(_LIBRARIES) for of in (kind, forward_of(kind)))


def _looks(name: str, layer: nn.Module) -> Any:
    """Return what layers that compute alike have in common: classes, shapes, and attributes beside their number and name."""
    named = f"{'.'.join(name.split('.')[-2:])}."

    def value(of: Any) -> Any:
        """Return something that can be compared. Objects without a value are compared by identity."""
        if isinstance(of, str):
            return str, of.replace(named, "")  # PEFT keeps the name of what it adapts
        if of is None or isinstance(of, bool | int | float | torch.dtype | torch.device):
            return type(of), of
        if isinstance(of, list | tuple):
            return type(of), tuple(map(value, of))
        if isinstance(of, set | frozenset):
            return type(of), frozenset(map(value, of))
        if isinstance(of, partial):
            return partial, value((of.func, of.args, of.keywords))
        return (type(of), tuple((key, value(item)) for key, item in of.items())) if isinstance(of, dict) else id(of)

    return tuple(
        (
            own,
            type(module),
            *((key, item.shape, item.dtype, item.requires_grad) for key, item in module.named_parameters(recurse=False)),
            *((key, item.shape, item.dtype) for key, item in module.named_buffers(recurse=False)),
            *((key, value(item)) for key, item in vars(module).items() if key not in _OF_TORCH and key != _NUMBER),
            *(id(module) for hooks in _HOOKS if vars(module)[hooks]),
        )
        for own, module in layer.named_modules()
    )


def _layers_in(found: Any, layers: Mapping[str, int]) -> set[str]:
    """Return the layers that something names."""
    if isinstance(found, str):
        own = found if found in layers else outermost(found, layers)
        return {own} if own else set()
    if is_dataclass(found):
        return set().union(*(_layers_in(getattr(found, item.name), layers) for item in fields(found)))
    return set().union(*(_layers_in(item, layers) for item in found)) if isinstance(found, tuple) else set()


def _renamed(found: Any, layer: str, other: str) -> Any:
    """Return what was found of a layer as that of another one."""
    if isinstance(found, str):
        return re.sub(rf"^{re.escape(layer)}(?=\.|$)", other, found)
    if is_dataclass(found) and not isinstance(found, type):
        return replace(found, **{item.name: _renamed(getattr(found, item.name), layer, other) for item in fields(found)})
    return tuple(_renamed(item, layer, other) for item in found) if isinstance(found, tuple) else found

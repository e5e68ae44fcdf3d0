"""Calls of one mixer with values: random ones, of few tokens, on the CPU.

A mixer is a module that carries a state along the sequence. Its linear layers are replaced for a call, so it needs none of
their matrices; what is between them has random values of its true shapes. So this works for a model that has no values, and the
depth of a model does not count: a call takes some milliseconds for each mixer of another kind.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from meshwright.distributed.context.sequences import are_same_entries
from meshwright.models.reading.tracing import attributes, tensors_in
from meshwright.plan.given.hidden_argument import Argument, value_of, with_argument

__all__ = ["Linear", "MixerCalls", "Numbers", "counting", "linear_layers"]

Linear = Callable[[str, list[torch.Tensor]], torch.Tensor]
"""What stands for a linear layer: its name and its input [[rows, tokens, features]] to its output. A norm may have several."""

_FEW = 8
"""Tokens of a chunk. A scan in chunks computes the same in chunks of another size, and takes memory by its square. There
must be several chunks: what decays from one to the next counts from the third on."""
_OF_TIME = ("chunk", "block_size")
"""What the names of numbers contain that count tokens of such a chunk, and not heads."""


@dataclass(frozen=True)
class Numbers:
    """The attributes of a module that are whole numbers above 1, under the name of the module in the mixer.

    Or those of a config that modules of the mixer hold: ``holders`` are the modules, each with the name of its attribute.
    """

    module: Any
    prefix: str
    values: Mapping[str, int]
    holders: tuple[tuple[nn.Module, str], ...] = ()


class MixerCalls:
    """One mixer, and what it was called with in a trace.

    Args:
        mixer: the module, on any device. It is not changed.
        name: its name, for messages.
        hidden: its argument for the hidden state.
        args: its positional arguments in a trace, without values.
        kwargs: so its others.
        lowest: the smallest of the random values, which are up to 1 larger.
        dtype: of the values. Code that computes some of a product in float32 cannot have the rest in float64.
        positions: the ``position_ids`` of the trace. A call has those of a sequence that begins at 0; ``None``: unknown.
        shifts: modules in it, without parameters, that get the tokens before those of a rank. They are replaced too.
        buffers: values of its buffers, by name; random ones otherwise.
    """

    def __init__(
        self,
        mixer: nn.Module,
        name: str,
        hidden: Argument,
        args: Any,
        kwargs: Any,
        lowest: float = 0.1,
        dtype: torch.dtype = torch.float64,
        positions: torch.Tensor | None = None,
        shifts: tuple[str, ...] = (),
        buffers: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.mixer, self.name, self.hidden, self.shifts = mixer, name, hidden, shifts
        self._buffers = buffers or {}
        self._positions = positions
        self._counted = None if positions is None else torch.arange(positions.shape[1]).expand(positions.shape)
        self.linear: Mapping[str, tuple[int, int]] = linear_layers(mixer)
        self.dtype, self._lowest, self._generator = dtype, lowest, torch.Generator().manual_seed(0)
        self._args, self._kwargs = self.valued((args, dict(kwargs)))
        self.tokens = value_of(hidden, self._args, self._kwargs, name).shape[1]
        self._chunks = {
            own: _FEW for own, value in vars(mixer).items() if _is_of_time(own) and type(value) is int and value > _FEW
        }

    def without(self, name: str) -> "MixerCalls":
        """Return the same calls, in which a linear layer runs with a matrix of its own, like what is between them."""
        other = copy(self)
        other.linear = {own: sizes for own, sizes in self.linear.items() if own != name}
        return other

    def valued(self, tree: Any) -> Any:
        """Return nested containers with tensors of other values, on the CPU."""
        return tree_map_only(torch.Tensor, self._random, tree)

    def _random(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._positions is not None and self._counted is not None and are_same_entries(tensor, self._positions):
            return self._counted
        if not tensor.is_floating_point():
            return torch.ones(tensor.shape, dtype=tensor.dtype)
        return self.random(*tensor.shape)

    def random(self, *shape: int) -> torch.Tensor:
        """Return random numbers of a shape."""
        return torch.rand(shape, generator=self._generator, dtype=torch.float64).add(self._lowest).to(self.dtype)

    def between(self) -> dict[str, torch.Tensor]:
        """Return what the mixer holds beside its linear layers, by name: random numbers for all of floating point."""
        named = [*self.mixer.named_parameters(), *self.mixer.named_buffers()]
        own = {name: tensor for name, tensor in named if not self._is_linear(name)}
        found = {name: self._random(tensor) for name, tensor in own.items() if tensor.is_floating_point()}
        found |= {name: value.to(self.dtype) for name, value in self._buffers.items() if name in found}
        for name in linear_layers(self.mixer):
            if name not in self.linear and f"{name}.weight" in found:  # sums of products of many are about as large as of one
                found[f"{name}.weight"] /= found[f"{name}.weight"].shape[-1]
        return found

    def _is_linear(self, name: str) -> bool:
        return any(f"{name}.".startswith(f"{linear}.") for linear in self.linear)

    def numbers(self) -> list[Numbers]:
        """Return the numbers of the mixer, of modules in it that are no linear layers, and of the configs that they hold."""
        found = []
        configs: dict[int, Numbers] = {}
        for name, module in self.mixer.named_modules():
            if self._is_linear(name):
                continue
            prefix = f"{name}." if name else ""
            own = {key: value for key, value in vars(module).items() if _counts(key, value)}
            found.append(Numbers(module, prefix, own))
            for key, config in vars(module).items():
                if not isinstance(getattr(config, "model_type", None), str):
                    continue
                known = configs.get(id(config)) or Numbers(
                    config, f"{prefix}{key}.", {own: value for own, value in vars(config).items() if _counts(own, value)}
                )
                configs[id(config)] = replace(known, holders=(*known.holders, (module, key)))
        return [*found, *configs.values()]

    def run(
        self,
        linear: Linear,
        tensors: Mapping[str, torch.Tensor],
        hidden: torch.Tensor | None = None,
        *,
        training: bool = True,
        beside: Any = None,
        also: str = "",
    ) -> Any:
        """Call the mixer, and return what it returns.

        Args:
            linear: stands for its linear layers.
            tensors: its parameters and buffers beside them.
            hidden: the hidden state [rows, tokens, features]; ``None``: that of the trace, with values.
            training: whether the mixer itself trains. Parts of it are as they are.
            beside: ``(args, kwargs)`` in place of those of the trace.
            also: a module that is replaced like a linear layer; empty: none.
        """
        args, kwargs = (self._args, self._kwargs) if beside is None else beside
        if hidden is not None:
            args, kwargs = with_argument(self.hidden, args, kwargs, lambda _: hidden, self.name)
        names = [*self.linear, *self.shifts, *([also] if also and also not in self.linear else [])]
        changes = [(self.mixer.get_submodule(name), {"forward": _Stub(linear, name)}) for name in names]
        # Where other code than the layer itself reads its matrix, a call fails, also of a model that has values.
        unread = {
            name: tensor.detach().to("meta", self.dtype)
            for name, tensor in self.mixer.named_parameters()
            if self._is_linear(name)
        }
        with ExitStack() as stack:
            stack.enter_context(_kept(self.mixer))
            stack.enter_context(attributes(changes))
            stack.enter_context(attributes([(self.mixer, {"training": training, **self._chunks})]))
            return torch.func.functional_call(self.mixer, {**unread, **tensors}, args, kwargs)

    def given(self) -> torch.Tensor:
        """Return the hidden state of the trace [rows, tokens, features], with values."""
        hidden: torch.Tensor = value_of(self.hidden, self._args, self._kwargs, self.name)
        return hidden

    def others(self) -> Any:
        """Return the arguments of a call with other values. Positions are the same."""

        def other(own: torch.Tensor) -> torch.Tensor:
            if own is self._counted:
                return own
            return own * 2 if own.is_floating_point() else own.logical_not().to(own.dtype)

        return tree_map_only(torch.Tensor, other, (self._args, self._kwargs))

    def positions(self) -> Argument | None:
        """Return which argument has the positions of the tokens; ``None``: none has."""
        if self._counted is None:
            return None
        count = len(self._args)
        place = next((index for index, value in enumerate(self._args) if value is self._counted), count)
        name = next((name for name, value in self._kwargs.items() if value is self._counted), "")
        return (place, name) if place < count or name else None

    def elsewhere(self) -> Any:
        """Return the arguments of a call with other positions."""

        def moved(own: torch.Tensor) -> torch.Tensor:
            return own.flip(-1) if own is self._counted else own

        return tree_map_only(torch.Tensor, moved, (self._args, self._kwargs))


class _Stub:
    """Stands for the forward of a module: passes its floating-point tensors on, in the order of a call."""

    def __init__(self, linear: Linear, name: str) -> None:
        self.linear, self.name = linear, name

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.linear(self.name, [item for item in tensors_in((args, kwargs)) if item.is_floating_point()])


def linear_layers(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the outermost linear layers in a module, by name, to the numbers of features that enter and leave.

    A linear layer with an adapter around it is one.
    """
    found: dict[str, tuple[int, int]] = {}
    for name, own in module.named_modules():
        if any(name.startswith(f"{other}.") for other in found):
            continue
        base = getattr(own, "base_layer", own)
        if isinstance(base, nn.Linear):
            found[name] = (base.in_features, base.out_features)
    return found


def _is_of_time(name: str) -> bool:
    return any(part in name for part in _OF_TIME)


def _counts(name: str, value: Any) -> bool:
    return type(value) is int and value > 1 and not _is_of_time(name) and not name.startswith("_")


@contextmanager
def _kept(mixer: nn.Module) -> Iterator[None]:
    """Let modules have the attributes afterwards that they have now. Some keep their last state."""
    before = [(vars(module), dict(vars(module))) for module in mixer.modules()]
    try:
        yield
    finally:
        for own, old in before:
            for name in own.keys() - old.keys():
                del own[name]
            own.update(old)


@contextmanager
def counting(numbers: list[Numbers], choose: Callable[[str, int], int]) -> Iterator[None]:
    """Inside, modules read their numbers, and those of their configs, from a function of name and value."""
    modules = [own for own in numbers if not own.holders]
    configs = [(holder, {name: _Config(own, choose)}) for own in numbers for holder, name in own.holders]
    before = [type(own.module) for own in modules]
    try:
        for own, kind in zip(modules, before, strict=True):
            own.module.__class__ = _reader(kind, own, choose)
        with attributes(configs):
            yield
    finally:
        for own, kind in zip(modules, before, strict=True):
            own.module.__class__ = kind


class _Config:
    """Stands for a config: its numbers are read from a function."""

    def __init__(self, numbers: Numbers, choose: Callable[[str, int], int]) -> None:
        self._numbers, self._choose = numbers, choose

    def __getattr__(self, name: str) -> Any:
        numbers = self._numbers
        name = getattr(numbers.module, "attribute_map", {}).get(name, name)
        read = numbers.values
        return self._choose(numbers.prefix + name, read[name]) if name in read else getattr(numbers.module, name)


def _reader(kind: type[nn.Module], numbers: Numbers, choose: Callable[[str, int], int]) -> type[nn.Module]:
    """Return a class whose objects read some attributes from a function. The class of a module is changed for a call alone."""
    read, prefix = numbers.values, numbers.prefix

    def get(self: nn.Module, name: str) -> Any:
        return choose(prefix + name, read[name]) if name in read else kind.__getattribute__(self, name)

    return type(kind.__name__, (kind,), {"__getattribute__": get, "__module__": kind.__module__})

"""Modules whose frozen weights may be in 4 bits (:mod:`meshwright.distributed.memory.nf4`): linear layers and experts.

Such a module computes with a matrix as it is until the plan stores it as bytes. A new model is initialized, and files are read,
as if the matrices were whole: each is packed as soon as it has its values.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.distributed.memory.nf4 import dequantize, is_packed, product, quantize, unpacked_like
from meshwright.models import _transformers_compat as compat

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Packs", "pack_linear", "receiving", "subclass"]


class Packs(nn.Module):
    """A module that takes some of its weights in 4 bits.

    Attributes:
        packed_weights: names of these parameters.
        unpacked_dtype: dtype in which they are read.
    """

    packed_weights: tuple[str, ...] = ()
    unpacked_dtype: torch.dtype

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return what pickles the module: its class is made of two, which have names."""
        over, kind = type(self).__bases__[:2]
        if subclass(kind, over) is not type(self):  # FSDP made another one
            return super().__reduce_ex__(protocol)
        return _made_anew, (kind, over), self.__dict__

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. While the module is :func:`receiving`, a weight is packed, and its place stays as it was."""
        packed = self.__dict__.get("_receives", {}).get(name)
        if packed is None:
            super().__setattr__(name, value)
            return
        local, target = (item.to_local() if isinstance(item, DTensor) else item for item in (value.data, packed.data))
        if local.is_meta:  # the place of another module, which this one is tied to
            return
        target.copy_(quantize(local))
        compat.initialized_flag(self._parameters[name])  # type: ignore[arg-type]


class PackedLinear(Packs):
    """Forward of a linear layer. After it in the order of methods is the class of the layer."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return W x + b of each row, [..., out]."""
        own: Any = self
        if not is_packed(own.weight):
            result: torch.Tensor = super().forward(rows)
            return result
        return product(rows, own.weight, own.bias, turned=not isinstance(self, nn.Linear))

    @property
    def W_q(self) -> torch.Tensor:  # noqa: N802
        """The bytes. By this name peft knows that :meth:`dequantize` returns the weight, whose norms DoRA needs."""
        own: Any = self
        if not is_packed(own.weight):
            raise AttributeError("W_q")
        weight: torch.Tensor = own.weight
        return weight

    def dequantize(self) -> torch.Tensor:
        """Return the weight."""
        return dequantize(self.W_q, self.unpacked_dtype)


def _made_anew(kind: Any, over: Any) -> Any:
    made = subclass(kind, over)
    return made.__new__(made)


@lru_cache(maxsize=256)
def subclass(kind: Any, over: Any) -> Any:
    """Return a class with the name of another one, and the methods of ``over`` before its own."""
    return type(kind.__name__, (over, kind), {"__module__": kind.__module__})


def pack_linear(module: Any) -> None:
    """Let a linear layer take its weight in 4 bits."""
    module.__class__ = subclass(type(module), PackedLinear)  # type: ignore[arg-type]  # classes are hashable
    module.packed_weights, module.unpacked_dtype = ("weight",), module.weight.dtype


@contextmanager
def receiving(model: "PreTrainedModel", device: torch.device) -> Iterator[None]:
    """Inside, packed weights have places without values, in the shape of the files, and what is put there is packed at once."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    held: list[tuple[Packs, str, nn.Parameter]] = []
    for module in model.modules():
        for name in module.packed_weights if isinstance(module, Packs) else ():
            stored = module._parameters[name]
            assert stored is not None
            if not is_packed(stored):
                continue
            if id(stored) not in made:  # one that is in two modules stays one
                empty = torch.empty_like(stored, device=device)
                place = unpacked_like(stored.data, module.unpacked_dtype)
                made[id(stored)] = (nn.Parameter(empty, requires_grad=False), nn.Parameter(place, requires_grad=False))
            packed, module._parameters[name] = made[id(stored)]
            module.__dict__.setdefault("_receives", {})[name] = packed
            held.append((module, name, packed))
    try:
        with compat.reading_one_by_one() if held else nullcontext():
            yield
    finally:
        for module, name, packed in held:
            module._parameters[name] = packed
            module.__dict__.pop("_receives", None)

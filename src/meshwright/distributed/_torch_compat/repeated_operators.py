"""Results of operators on tensors without values, which are not found again for the same shapes.

Torch finds the shape of most results in Python. That takes longer than all else of a trace, and the layers of a model ask for
the same ones over and over. The cache of torch's fake tensors keeps more kinds of results, and takes longer.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

__all__ = ["RepeatedOperators", "Results"]

MOST = 2**15
"""Results that are kept: about a hundred traces of as many layouts, in some tens of MB."""


class RepeatedOperators:
    """Runs operators. What one made, it makes again for the same shapes, strides, dtypes, devices and other arguments.

    Args:
        kinds: the classes of the tensors. What reads others, or has values, runs each time.
        wrap: makes a fake tensor for a device of one on the meta device; ``None``: tensors are on the meta device.
        made: what others with these arguments made already.
    """

    def __init__(
        self,
        kinds: Sequence[type],
        wrap: Callable[[torch.Tensor, torch.device], torch.Tensor] | None = None,
        made: "Results | None" = None,
    ) -> None:
        self._kinds, self._wrap = frozenset(kinds), wrap
        self._made: Results = {} if made is None else made

    def run(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any], make: Callable[..., Any]) -> Any:
        """Return the result of an operator.

        Args:
            function: the operator.
            args: its arguments.
            kwargs: its named arguments.
            make: runs it, given ``args`` and ``kwargs``.
        """
        if not _makes_one_tensor(function):
            return make(*args, **kwargs)
        try:
            key = (function, self._frozen(args), self._frozen(kwargs))
            known = self._made.get(key)
        except TypeError:  # not one of these tensors, or not hashable
            return make(*args, **kwargs)
        if known is not None:
            found = known.again(args)
            return found if self._wrap is None else self._wrap(found, known.device)
        result = make(*args, **kwargs)
        if self._without_values(result) and (described := _Result.of(result, args)) is not None:
            if len(self._made) == MOST:
                self._made.clear()
            self._made[key] = described
        return result

    def _without_values(self, result: Any) -> bool:
        return type(result) in self._kinds and _is_plain(result) and (self._wrap is not None or result.is_meta)

    def _frozen(self, value: Any) -> Hashable:
        """Return an argument as a key: of a tensor, all that the shape of a result depends on.

        Raises:
            TypeError: results depend on more.
        """
        kind = type(value)
        if kind in self._kinds:
            # A number that was made a tensor has no dimension, and another part in the dtype of a result.
            if not value.ndim or not _is_plain(value):
                raise TypeError
            return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device
        if isinstance(value, torch.Tensor):
            raise TypeError
        if kind is list or kind is tuple:
            return kind, tuple([self._frozen(one) for one in value])
        if kind is dict:
            return tuple([(name, self._frozen(one)) for name, one in value.items()])
        return kind, value  # True is another argument than 1


class _Result(NamedTuple):
    """A tensor that an operator made, and which argument it is a view of."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    base: int | None

    @classmethod
    def of(cls, result: torch.Tensor, args: Sequence[Any]) -> "_Result | None":
        """Describe a result; ``None``: it cannot be made again."""
        storage = result.untyped_storage()
        shared = [place for place, one in enumerate(args) if isinstance(one, torch.Tensor) and _storage(one) == storage._cdata]
        described = cls(
            result.shape,
            result.stride(),
            int(result.storage_offset()),
            result.dtype,
            result.device,
            shared[0] if shared else None,
        )
        if any(one is result for one in args):
            return None
        return described if shared or described.again(args).untyped_storage().nbytes() == storage.nbytes() else None

    def again(self, args: Sequence[Any]) -> torch.Tensor:
        """Return one more, on the meta device."""
        if self.base is None:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")
        empty = torch.empty(0, dtype=self.dtype, device="meta")
        return empty.set_(args[self.base].untyped_storage(), self.offset, self.size, self.stride)


Results = dict[Hashable, _Result]
"""What operators made, by operator and arguments."""


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether shape, strides and dtype tell all of a tensor; a constant of fake tensors has values, too."""
    return tensor.layout is torch.strided and not tensor.dtype.is_complex and vars(tensor).get("constant") is None


_DEPENDS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@cache
def _makes_one_tensor(function: Any) -> bool:
    """Return whether an operator makes one tensor, from shapes alone, and writes none."""
    schema = function._schema
    writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
    one = len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor"
    return one and not writes and function.namespace == "aten" and not any(tag in function.tags for tag in _DEPENDS)

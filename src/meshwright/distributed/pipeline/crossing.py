"""What crosses the cuts of a pipeline: the hidden state, and tensors that later layers read beside it.

A layer may read a tensor that was made before the first layer (an embedding of its own, the embedding of the words) or by an
earlier layer (its keys, a state of its router). The stage that makes it takes it from the call of the first layer of a later
stage that reads it: the model's own forward calls all layers, and what stands for those of other stages gets their arguments.
It is sent in one tensor with the hidden state, along the features. A later stage puts it where the calls of its layers have it,
and sends it on if layers after its own read it too. So its gradient comes back the same way, and is summed on it.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.errors import UnsupportedError
from meshwright.plan.given.cut_points import POSITIONS, ROWS, Path, carried_over, entering_shape, features_of, sized
from meshwright.plan.result.cut_action import Cut

__all__ = ["Crossing", "receive_outermost", "tensors_of_call"]

_HOOK = "_meshwright_receives"


class Crossing:
    """What enters and leaves a stage in a forward.

    Args:
        action: where the stage is cut.

    Attributes:
        sent: the hidden state that the last layer of the stage made; ``None`` on the last stage.
        hidden: the hidden state that the stage before sent; ``None`` on the first stage.
    """

    def __init__(self, action: Cut) -> None:
        self._cut = action
        self._enters = tuple(carried_over(action.carried, action.begin)) if action.begin else ()
        self._leaves = tuple(carried_over(action.carried, action.end)) if action.end < len(action.order) else ()
        self._turned = tuple(action.sizes[:2]) != (ROWS, POSITIONS)
        self._received: torch.Tensor | None = None
        self._values: dict[int, torch.Tensor] = {}
        self._blanks: list[tuple[nn.Module, str, tuple[int, ...]]] = []
        self.hidden: torch.Tensor | None = None
        self.sent: torch.Tensor | None = None

    def shape(self, rows: int, positions: int) -> tuple[int, ...]:
        """Return the shape of what enters the stage."""
        cut = self._cut
        return entering_shape(cut.sizes, cut.carried, cut.begin, rows, positions)

    @property
    def received(self) -> torch.Tensor | None:
        """What the stage before sent, of :meth:`shape`; ``None`` on the first stage, and outside of a forward."""
        return self._received

    @received.setter
    def received(self, tensor: torch.Tensor | None) -> None:
        self._received, self.hidden, self._values = tensor, tensor, {}
        if tensor is None:
            return
        for module, own, shape in self._blanks:
            vars(module)[own] = tensor.new_zeros(shape)
        if not (self._enters or self._turned):
            return
        rows, length, cut = tensor.shape[0], tensor.shape[1], self._cut
        wholes = [cut.sizes, *(cut.carried[number][0] for number in self._enters)]
        features = [features_of(sizes) for sizes in wholes]
        pieces = tensor.split(features, -1)  # which become copies: models change what they are given in place
        self.hidden, *others = map(_apart, pieces, wholes, [(rows, length)] * len(wholes))
        self._values = dict(zip(self._enters, others, strict=True))

    def blank(self, module: nn.Module, own: str, shape: tuple[int, ...]) -> None:
        """Give a module zeros in place of a parameter, in each forward that receives something."""
        self._blanks.append((module, own, shape))

    def note(self, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Take what leaves the stage from the call of a layer of a later one."""
        for number in self._leaves:
            readers = [item for item in self._cut.carried[number][2] if item[0] >= self._cut.end]
            if readers[0][0] == index and number not in self._values:
                self._values[number] = _found(readers[0][1][0], args, kwargs)

    def given(self, index: int) -> list[tuple[int, Path]]:
        """Return which carried tensors a layer of the stage reads, and where its call has them."""
        return [
            (number, path)
            for number in self._enters
            for layer, paths in self._cut.carried[number][2]
            if layer == index
            for path in paths
        ]

    def put(self, given: Sequence[tuple[int, Path]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the arguments of a layer's call with what was received for it."""
        kwargs = dict(kwargs)
        for number, path in given:
            if isinstance(path[0][0], int):
                args = _with(args, path, self._values[number])
            else:
                _with(kwargs, path, self._values[number])
        return args, kwargs

    def leave(self) -> torch.Tensor:
        """Return what leaves the stage after its layers ran, and forget it."""
        (sent, self.sent), cut = (self.sent, None), self._cut
        assert sent is not None
        if not (self._leaves or self._turned):
            return sent
        rows, length = sent.shape[cut.sizes.index(ROWS)], sent.shape[cut.sizes.index(POSITIONS)]
        together = [_together(sent, cut.sizes, rows)]
        for number in self._leaves:
            tensor, sizes = self._values.get(number), cut.carried[number][0]
            if not isinstance(tensor, torch.Tensor):
                raise UnsupportedError(
                    "pp.stage_call", f"a call of {_reader(cut, number)!r} has no tensor where the whole model's has one"
                )
            expected = sized(sizes, rows, length)
            if tuple(tensor.shape) != expected or tensor.dtype != sent.dtype:
                raise UnsupportedError(
                    "pp.stage_call",
                    f"{_reader(cut, number)!r} reads {tensor.dtype} {tuple(tensor.shape)}, and the plan has {sent.dtype} "
                    f"{expected}",
                )
            together.append(_together(tensor, sizes, rows))
        self._values = {}
        return torch.cat(together, -1)


def _reader(cut: Cut, number: int) -> str:
    return cut.order[next(layer for layer, _ in cut.carried[number][2] if layer >= cut.end)][0]


def _together(tensor: torch.Tensor, sizes: Sequence[int], rows: int) -> torch.Tensor:
    """Return [rows, positions, features] for a tensor of some sizes. What all rows share, each of them has."""
    if ROWS not in sizes:
        tensor, sizes = tensor.expand(rows, *tensor.shape), (ROWS, *sizes)
    return tensor.movedim((sizes.index(ROWS), sizes.index(POSITIONS)), (0, 1)).flatten(2)


def _apart(tensor: torch.Tensor, sizes: Sequence[int], batch: tuple[int, int]) -> torch.Tensor:
    """Return a tensor of some sizes for [rows, positions, features], the inverse of :func:`_together`."""
    whole = sizes if ROWS in sizes else (ROWS, *sizes)
    others = [size for size in whole if size not in (ROWS, POSITIONS)]
    tensor = tensor.reshape(*batch, *others).movedim((0, 1), (whole.index(ROWS), whole.index(POSITIONS)))
    return (tensor if ROWS in sizes else tensor[0]).contiguous()


def receive_outermost(model: nn.Module) -> None:
    """Let layers get what was received before anything else happens at their calls: their units then cast it, and wait for its
    gradient, as they would in the whole model.
    """
    for module in model.modules():
        if (key := vars(module).get(_HOOK)) is not None:
            hooks: OrderedDict[int, Any] = module._forward_pre_hooks  # type: ignore[assignment]
            hooks.move_to_end(key, last=False)


def receives(layer: nn.Module, crossing: Crossing, given: Sequence[tuple[int, Path]]) -> None:
    """Let the calls of a layer have what was received."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return crossing.put(given, args, kwargs)

    vars(layer)[_HOOK] = layer.register_forward_pre_hook(hook, with_kwargs=True).id


# -- inside of calls ---------------------------------------------------------------------------------------------------------


def tensors_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield the tensors of a call, and where it has them."""
    for place, value in enumerate(args):
        yield from _inside(value, ((place, len(args)),))
    for name, value in kwargs.items():
        yield from _inside(value, ((name, 0),))


def _inside(value: Any, path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, int | str):
                yield from _inside(item, (*path, (key, 0)))
    elif type(value) in (tuple, list):
        for place, item in enumerate(value):
            yield from _inside(item, (*path, (place, len(value))))


def _found(path: Path, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    value: Any = args if isinstance(path[0][0], int) else kwargs
    for key, _ in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _with(holder: Any, path: Path, tensor: torch.Tensor) -> Any:
    """Return a container with a tensor at a place. Tuples are made anew; others are changed, since layers share them."""
    (key, _), *inner = path
    value: Any = tensor
    if inner:
        own = holder.get(key) if isinstance(holder, Mapping) else holder[key]
        if own is None:
            own = (None,) * inner[0][1] if inner[0][1] else {}
        value = _with(own, tuple(inner), tensor)
    if isinstance(holder, tuple) and isinstance(key, int):
        return (*holder[:key], value, *holder[key + 1 :])
    assert isinstance(holder, MutableMapping | list)
    holder[key] = value  # type: ignore[index]
    return holder

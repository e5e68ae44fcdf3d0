"""Records the inputs and outputs of modules, and their gradients, on both sides of an audit, and compares them.

One microbatch of each data rank is recorded, its first one. Hooks copy what passes them, send nothing, and ignore the modules
that activation checkpointing recomputes. Each module gets a view of its input. So the gradient of an input is the part
that comes through this module, without that of a residual connection around it. A module that runs several times has a record
of each run.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.audit.data import CANVAS
from meshwright.distributed._torch_compat import in_backward
from meshwright.distributed.memory.chunked_loss import DeferredLogits
from meshwright.distributed.memory.kept_results import unwatched
from meshwright.distributed.pipeline.cut import runs
from meshwright.plan.result.border_places import Portion, Side, borders
from meshwright.plan.result.sharding_plan import ShardingPlan

__all__ = [
    "MOST_BYTES_OF_BORDERS",
    "BorderRecorder",
    "BorderRow",
    "Point",
    "border_error",
    "compare_borders",
    "first_recorders",
    "part_of",
    "tokens_of",
    "worst_of_ranks",
]

MOST_BYTES_OF_BORDERS = 2**28
"""Largest number of bytes recorded on each side, over all recorded microbatches. Later tensors are left out, and counted."""

MASKED = 1e30
"""Values from this size on are those of masks, and are ignored when scales are determined."""


@dataclass(frozen=True)
class Point:
    """A tensor at a border.

    Attributes:
        module: name of the module.
        run: run of the module in the microbatch, counted from 0.
        side: side of the module.
        place: place of the tensor among the arguments, or in what is returned.
        gradient: whether it is the gradient of this tensor.
    """

    module: str
    run: int
    side: Side
    place: str
    gradient: bool

    def __str__(self) -> str:
        return f"{self.module}|{self.run}|{self.side}|{self.place}|{'gradient' if self.gradient else 'value'}"


@dataclass(frozen=True)
class BorderRow:
    """The comparison of a tensor at a border of a rank with that of one process.

    Attributes:
        point: which tensor it is.
        error: largest difference of an entry, relative to the largest entry of the reference.
        tolerance: largest error that passes.
        rank: the rank.
    """

    point: Point
    error: float
    tolerance: float
    rank: int

    @property
    def passed(self) -> bool:
        """Return whether the error is within the tolerance."""
        return self.error <= self.tolerance


class BorderRecorder:
    """Hooks the modules of a model, and keeps the tensors that pass their borders.

    Args:
        model: the model, parallelized or plain.
        names: names of the modules.
        microbatches: the microbatches to record, counted by forwards of the model from now on.
        limit: largest number of bytes kept of each microbatch.

    Attributes:
        tensors: microbatch to point to tensor, in the order of recording.
        left_out: number of tensors that were not kept because of the limit.
    """

    def __init__(self, model: nn.Module, names: Iterable[str], microbatches: Collection[int], limit: int) -> None:
        self.tensors: dict[int, dict[Point, torch.Tensor]] = {number: {} for number in microbatches}
        self.left_out = 0
        self._limit, self._bytes, self._number = limit, 0, -1
        self._runs: Counter[str] = Counter()
        self._handles = [model.register_forward_pre_hook(self._begin)]
        for name in names:
            module = model.get_submodule(name)
            self._handles.append(module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(partial(self._leave, name)))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, *_: Any) -> None:
        self._number, self._bytes = self._number + 1, 0
        self._runs.clear()

    def _records(self) -> bool:
        return self._number in self.tensors and not in_backward()

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._records():
            return None
        run, self._runs[name] = self._runs[name], self._runs[name] + 1

        given: dict[int, torch.Tensor] = {}  # what is one tensor for the module stays one

        def seen(place: str, tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, DTensor):
                return tensor
            if id(tensor) not in given:
                viewed = tensor.requires_grad and tensor.grad_fn is not None
                given[id(tensor)] = tensor.view_as(tensor) if viewed else tensor
                self._see(Point(name, run, Side.INPUT, place, False), given[id(tensor)])
            return given[id(tensor)]

        with unwatched():
            return _mapped(tuple(args), "", seen), _mapped(dict(kwargs), "", seen)

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not self._records():
            return
        run = self._runs[name] - 1
        with unwatched():
            for place, tensor in _tensors(output, ""):
                self._see(Point(name, run, Side.OUTPUT, place, False), tensor)

    def _see(self, point: Point, tensor: torch.Tensor) -> None:
        number = self._number
        self._keep(number, point, tensor)
        if tensor.requires_grad and tensor.grad_fn is not None:
            gradient_point = Point(point.module, point.run, point.side, point.place, True)
            tensor.register_hook(lambda gradient: self._keep(number, gradient_point, gradient))

    def _keep(self, number: int, point: Point, tensor: torch.Tensor) -> None:
        local = tensor.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        self._bytes += local.numel() * local.element_size()
        if self._bytes > self._limit:
            self.left_out += 1
            return
        with unwatched():
            self.tensors[number][point] = local.to("cpu", copy=True).contiguous()


def first_recorders(plan: ShardingPlan, models: Iterable[nn.Module], limit: int) -> list[BorderRecorder]:
    """Return a recorder of the first microbatch for each model of a rank, of which it has several in a pipeline."""
    return [
        BorderRecorder(model, [name for name in borders(plan, model) if runs(model, name)], (0,), limit) for model in models
    ]


def _mapped(value: Any, place: str, do: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """Apply a function to the tensors in plain tuples, lists and dicts; return anything else unchanged."""
    if isinstance(value, torch.Tensor):
        return do(place, value)
    if type(value) in (tuple, list):
        return type(value)(_mapped(item, f"{place}.{index}", do) for index, item in enumerate(value))
    if type(value) is dict:
        return {key: _mapped(item, f"{place}.{key}", do) for key, item in value.items()}
    return value


def _tensors(value: Any, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, DeferredLogits):  # there are no values
        return
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, tuple | list | Mapping):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _tensors(item, f"{place}.{key}")


# -- comparison --------------------------------------------------------------------------------------------------------------


def compare_borders(
    recorded: Mapping[Point, torch.Tensor],
    truth_of: Callable[[Point], torch.Tensor | None],
    hold: Callable[[Point, torch.Size], Portion | None],
    tolerance: float,
    share: float,
    rank: int = 0,
) -> list[BorderRow]:
    """Return a row for each tensor that both sides have, in the order in which the rank recorded them.

    Args:
        recorded: what the rank recorded.
        truth_of: returns what one process recorded at a point.
        hold: returns which part of the tensor at a point the rank has, given the shape that one process has there.
        tolerance: largest error that passes.
        share: smallest scale, as a share of the largest entry of all values (of all gradients, if the tensor is one). Some
            tensors are zero except for rounding.
        rank: the rank, for the rows.
    """
    pairs: dict[Point, tuple[torch.Tensor, torch.Tensor]] = {}
    largest = {False: 0.0, True: 0.0}
    for point, actual in recorded.items():
        truth = truth_of(point)
        if truth is None:
            continue
        held = hold(point, truth.shape)
        if held is None or (pair := part_of(truth, actual, held)) is None or not pair[0].numel():
            continue
        pairs[point] = pair
        size = float(pair[0].abs().max()) if pair[0].is_floating_point() else 0.0
        if size < MASKED:
            largest[point.gradient] = max(largest[point.gradient], size)
    return [
        BorderRow(point, border_error(actual, truth, share * largest[point.gradient]), tolerance, rank)
        for point, (truth, actual) in pairs.items()
    ]


def tokens_of(shape: torch.Size, batch: Mapping[str, torch.Tensor], plan: ShardingPlan) -> int:
    """Return how many tokens a tensor has at a border, over all ranks of `cp`: those of a sequence, or those of a canvas.

    Args:
        shape: what one process has there, [rows, tokens, ...] or [rows * tokens, ...].
        batch: what a rank was fed.
        plan: the plan.
    """
    if (canvas := batch.get(f"{CANVAS}ids")) is not None:
        rows, columns = canvas.flatten(1).shape
        if shape[:2] == (rows, columns) or shape[:1] == (rows * columns,):
            return -(-columns // plan.sequence_multiple) * plan.sequence_multiple
    return batch["input_ids"].shape[1] * plan.layout.size("cp")


def worst_of_ranks(rows: Iterable[BorderRow]) -> tuple[BorderRow, ...]:
    """Return for each tensor the row with the largest error, in the order in which the tensors first occur."""
    worst: dict[Point, BorderRow] = {}
    for row in rows:
        if row.point not in worst or row.error > worst[row.point].error:
            worst[row.point] = row
    return tuple(worst.values())


def part_of(truth: torch.Tensor, actual: torch.Tensor, held: Portion) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the parts of a tensor of one process and of that of a rank that can be compared: the tokens that both have.

    Args:
        truth: the tensor of one process: [rows, length, ...], or [rows * length, ...] with all tokens one after another, or of
            any shape if it has no tokens.
        actual: the tensor of the rank, with its part of the positions, and padding after ``length``.
        held: what the rank has of the tensor.

    Returns:
        The two parts; ``None`` if the shapes do not match.
    """
    if held.words is not None and truth.shape[:-1] == actual.shape[:-1] and actual.shape[-1] == len(held.words):
        return truth[..., held.words.start : held.words.stop], actual
    rows, positions = len(held.rows), list(chain(*held.positions))
    if truth.shape == actual.shape:
        return truth, actual
    if truth.ndim < 1 or truth.ndim != actual.ndim or not rows or not positions:
        return None
    if truth.ndim > 1 and truth.shape[0] == actual.shape[0] and actual.shape[1] == len(positions):
        pass
    elif actual.shape[0] == rows * len(positions) and truth.shape[0] % rows == 0:
        truth, actual = (tensor.unflatten(0, (rows, -1)) for tensor in (truth, actual))
    else:
        return None
    if truth.shape[2:] != actual.shape[2:]:
        return None
    here = [place for place, position in enumerate(positions) if position < truth.shape[1]]
    return truth[:, [positions[place] for place in here]], actual[:, here]


def border_error(actual: torch.Tensor, truth: torch.Tensor, floor: float) -> float:
    """Return the largest difference of an entry, relative to the largest entry of the reference, or to ``floor`` if larger.

    Entries that are infinite or NaN on both sides alike are equal: those of masks, and of rows that are masked as a whole.
    """
    value, reference = actual.double().flatten(), truth.double().flatten()
    same = (value == reference) | (value.isnan() & reference.isnan())
    if bool(same.all()):
        return 0.0
    scale = max(float(reference[reference.isfinite()].abs().max()) if bool(reference.isfinite().any()) else 0.0, floor)
    distance = float((value[~same] - reference[~same]).abs().max())
    return distance / scale if scale and distance == distance else float("inf")

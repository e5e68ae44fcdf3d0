"""Follows the output features of linear layers through one forward without values.

A linear layer puts out features in *blocks*: at first each feature is a block, and once they are viewed as heads, each head is
one. As long as every operator computes each block alone, a rank that has some of the blocks computes what the whole model
computes of them. Where features enter another linear layer in their old order, the two can be sliced.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from meshwright.models.reading.tensor.norms_between import NormsBetween
from meshwright.models.reading.traced_tensors import leaves
from meshwright.models.reading.tracing import Attention, Inputs, Labels, Operator, Tracer, tensors_in
from meshwright.plan.given.sliceable_pairs import Pair

__all__ = ["FeatureTracer"]

_SAME = {
    "clone",
    "detach",
    "alias",
    "lift_fresh",
    "_to_copy",
    "native_dropout",
    "zeros_like",
    "ones_like",
    "full_like",
    "empty_like",
}
"""Operators that treat each entry alone, beside those that torch tags as pointwise."""

_VIEWS = {"view", "_unsafe_view", "_reshape_alias", "unsqueeze", "squeeze"}
"""Operators that keep the order of all entries."""

_NEW = {"new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"}
"""Operators that use their argument for its dtype and device alone."""

_TAKE_APART = {"split", "split_with_sizes", "chunk", "slice", "select", "unbind", "cat", "narrow"}
"""Operators that move entries along the dimension that they are told, and compute nothing."""

_NORMS = {"native_layer_norm", "_fused_rms_norm"}
"""Operators that normalize along the last dimensions, whose sizes they are told, and scale by parameters."""

_COMPUTE_ALONG = {
    "_softmax", "_log_softmax", "cumsum", "cumprod", "sort", "topk", "mean", "sum", "var", "std", "amax", "amin", "max", "min",
    "norm", "linalg_vector_norm", "logsumexp", "median", "kthvalue", "flip", "roll",
}  # fmt: skip
"""Operators that combine the entries along the dimensions that they are told."""


@dataclass(frozen=True)
class _Mark:
    """Where the blocks are in a tensor.

    Attributes:
        sources: names of the linear layers that the tensor comes from.
        dim: the dimension that counts blocks.
        before: how often the blocks are repeated inside of this dimension (a batch that was merged with the heads).
        blocks: their number.
    """

    sources: frozenset[str]
    dim: int
    before: int
    blocks: int

    def viewed(self, old: Sequence[int], new: Sequence[int]) -> "_Mark | None":
        """Return the mark of the tensor in another shape; ``None``: no dimension counts blocks."""
        runs = math.prod(old[: self.dim]) * self.before  # how often the blocks are repeated in the whole tensor
        outer = 1
        for dim, size in enumerate(new):
            if runs < outer * size:
                if runs % outer or size % (runs // outer):
                    return None
                before = runs // outer
                # Of features that are taken apart, the outermost dimension counts what can be divided.
                return replace(self, dim=dim, before=before, blocks=math.gcd(size // before, self.blocks))
            outer *= size
        return None


class FeatureTracer(Tracer):
    """Follows features from linear layers to others.

    Args:
        linear: names of the linear layers.
        parameters: names of the model's trained parameters, to whether one may stand beside features.
        watched: names of embeddings, to the names of their matrices, of which it is noted whether an operator outside of
            ``owners`` reads them.
        owners: names of the modules that hold such a matrix.
        norms: names of the modules that may be norms over features, to those of their parameters.
        inputs: what the model is called with.

    Attributes:
        read: names of the watched tensors that were read.
        mixed: name of each linear layer whose features an operator mixes as a whole, to the operator.
        numbers: the numbers, other than sizes, that operators on features used.
        plain: what operators did that features take no part in: names, numbers and shapes of results.
    """

    def __init__(
        self,
        linear: Collection[str],
        parameters: Mapping[str, bool],
        watched: Mapping[str, str],
        owners: Collection[str],
        norms: Mapping[str, Collection[str]],
        inputs: Inputs,
    ) -> None:
        super().__init__(inputs)
        self.linear, self.owners = linear, owners
        self._watched = Labels({inputs.tensors[own]: name for name, own in watched.items()})
        self._owners = 0
        self.read: set[str] = set()
        self._marks = Labels()
        # What has a gradient, to the names of the parameters that alone made it; None: others made it too.
        learned = {name: frozenset({name}) if beside else None for name, beside in parameters.items()}
        self._learned = Labels({inputs.tensors[name]: label for name, label in learned.items()})
        self._norms = NormsBetween(norms, inputs.tensors)
        self._beside: dict[str, frozenset[str]] = {}  # parameter that treats each block alike, to the layers of the blocks
        self._elsewhere: set[str] = set()  # parameters that do something else, too
        self._blocks: dict[str, int] = {}
        self._takers: dict[str, set[str]] = {}
        self._unfit: set[str] = set()  # whose features are mixed, or meet others
        self._several: set[str] = set()  # that run more than once
        self._ran: set[str] = set()
        self._inside = 0
        self.mixed: dict[str, str] = {}
        self.numbers: list[float] = []
        self.plain: list[tuple[str, list[float], list[tuple[int, ...]]]] = []
        self._known = Labels()  # what was given, or made by an operator
        self._known.put(inputs.tensors.values())

    def pairs(self) -> tuple[Pair, ...]:
        """Return what can be sliced together."""
        firsts: dict[str, list[str]] = {}
        for name, takers in self._takers.items():
            for taker in takers:
                firsts.setdefault(taker, []).append(name)
        unfit, found = self._unfit | self._several, []
        for name, sources in self._beside.items():
            unfit |= sources if name in self._elsewhere else frozenset()
        norms = {taker: self._norms.among(names, {*self._elsewhere, *self._beside}) for taker, names in firsts.items()}
        unfit |= self._norms.unfit
        taken: set[str] = set()
        for taker, names in firsts.items():
            alone = all(len(self._takers[name]) == 1 and name not in unfit and name not in taken for name in names)
            if alone and taker not in self._several:
                taken.add(taker)  # it cannot be the first of another pair
                beside = tuple(sorted(own for own, sources in self._beside.items() if sources & set(names)))
                blocks = math.gcd(*(self._blocks[name] for name in names))
                found.append(Pair(tuple(sorted(names)), taker, blocks, (), beside, norms[taker]))
        return tuple(found)

    def repeats(self, other: "FeatureTracer") -> bool:
        """Return whether all that should not depend on the number of features is the same in another trace."""
        return repr((self.numbers, self.plain)) == repr((other.numbers, other.plain))  # NaN is not equal to itself

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note which features enter a linear layer."""
        self._owners += name in self.owners
        self._norms.enter(name)
        if name not in self.linear:
            return
        mark = self._marks.get(args[0]) if args else None
        sources = mark.sources if mark else frozenset()
        if mark and (mark.dim, mark.before) != (args[0].ndim - 1, 1):
            self._unfit |= sources
        for source in sources:
            self._takers.setdefault(source, set()).add(name)
        if name in self._ran or not args:
            self._several |= {name, *sources}
        self._ran.add(name)
        self._inside += 1

    def leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Mark the features that a linear layer puts out."""
        self._owners -= name in self.owners
        self._norms.leave(name, tensors_in(output))
        if name in self.linear:
            self._inside -= 1
            self._blocks[name] = output.shape[-1]
            self._marks[output] = _Mark(frozenset({name}), output.ndim - 1, 1, output.shape[-1])

    def attention(self, call: Attention) -> None:
        """An attention treats each head [batch, head, token, feature] alone."""
        marks = self._marks.among((call.query, call.key, call.value))
        sources = frozenset().union(*(mark.sources for mark in marks))
        beside = tensors_in((call.mask, call.options))
        fit = [(mark.dim, mark.before) for mark in marks] == 3 * [(1, 1)]
        fit &= all(item not in self._learned and _has_no_heads(item, call.query.shape[1]) for item in beside)
        self.numbers += [item for item in leaves(call.options) if isinstance(item, int | float)]
        if fit:
            self._mark(call.output, _Mark(sources, 2, 1, math.gcd(*(mark.blocks for mark in marks))))
        else:
            self._unfit |= sources

    def _mark(self, tensor: torch.Tensor, mark: _Mark) -> None:
        self._marks[tensor] = mark
        for source in mark.sources:
            self._blocks[source] = math.gcd(self._blocks[source], mark.blocks)

    def operator(self, operator: Operator) -> None:
        """Carry the marks of features on, or note that they are mixed."""
        tensors, results = operator.tensors, operator.results
        self._known.put(results)
        learned = self._learned.among(tensors)
        if learned:
            alone = len(learned) == len(tensors) and None not in learned
            self._learned.put(results, frozenset().union(*learned) if alone else None)
        if not self._owners:
            self.read.update(self._watched.among(tensors))
        if self._inside:
            return
        marks = self._marks.among(tensors)
        with_gradient = [tensor for tensor in tensors if tensor in self._learned]
        pointwise = torch.Tag.pointwise in operator.function.tags or operator.name in _SAME
        if self._norms.follow(operator, with_gradient, features=bool(marks), pointwise=pointwise):
            self.numbers += _numbers(operator.operands)
            return
        if not marks:
            if len(learned) < len(tensors) or None in learned:  # with something that is no feature
                self._elsewhere.update(*filter(None, learned))
            numbers = _numbers((operator.args, operator.kwargs))
            self.plain.append((str(operator.function), numbers, [tuple(item.shape) for item in results]))
            return
        if operator.name in _NEW:
            self.numbers += _numbers((operator.kwargs, operator.args[2:]))
            return
        sources = frozenset().union(*(mark.sources for mark in marks))
        first = self._marks.get(tensors[0])
        found = self._after(operator)
        if found is not None:
            for item in results:
                self._mark(item, replace(found, sources=sources))
            return
        if not (first and first.before == 1 and self._norms.takes_mean(operator, sources, first.dim)):
            self._unfit |= sources
        if operator.name in _COMPUTE_ALONG and first and first.dim in _dims(tensors[0], operator.operands):
            self.mixed.update(dict.fromkeys(first.sources, str(operator.function)))

    def _after(self, operator: Operator) -> _Mark | None:
        """Return the mark of the results of an operator; ``None``: it does not treat each block alone."""
        name, operands, tensors, results = operator.name, operator.operands, operator.tensors, operator.results
        first = tensors[0]
        mark, place = self._marks.get(first), self._place(first)
        if torch.Tag.pointwise in operator.function.tags or name in _SAME:
            return self._pointwise(operator)
        if mark is None:
            return None
        if name in _VIEWS:
            return mark.viewed(first.shape, results[0].shape)
        if name == "expand":
            dim = mark.dim + results[0].ndim - first.ndim
            return replace(mark, dim=dim) if results[0].shape[dim] == first.shape[mark.dim] else None
        if name == "permute":
            return replace(mark, dim=[dim % first.ndim for dim in operands["dims"]].index(mark.dim))
        if name in ("transpose", "t"):
            one, other = (operands.get(key, place) % first.ndim for place, key in enumerate(("dim0", "dim1")))
            return replace(mark, dim={one: other, other: one}.get(mark.dim, mark.dim))
        if name in _NORMS:
            outside = mark.dim < first.ndim - len(operands["normalized_shape"])
            return mark if outside and all(self._treats_blocks_alike(tensor, mark) for tensor in tensors[1:]) else None
        if any(self._place(tensor) != place for tensor in tensors):
            return None
        blocks = math.gcd(*(self._marks[tensor].blocks for tensor in tensors))
        if name == "bmm":
            return replace(mark, blocks=blocks) if mark.dim == 0 else None
        if name == "stack":
            return replace(mark, dim=mark.dim + (_dims(results[0], operands)[0] <= mark.dim), blocks=blocks)
        if name not in _COMPUTE_ALONG | _TAKE_APART or mark.dim in _dims(first, operands):
            return None
        removed = sum(dim < mark.dim for dim in _dims(first, operands)) if results[0].ndim < first.ndim else 0
        return replace(mark, dim=mark.dim - removed, blocks=blocks)

    def _place(self, tensor: torch.Tensor) -> tuple[int, int, int] | None:
        mark = self._marks.get(tensor)
        return (mark.dim, mark.before, tensor.shape[mark.dim]) if mark else None

    def _pointwise(self, operator: Operator) -> _Mark | None:
        """Return the mark of the results of an operator that treats each entry alone."""
        tensors, results = operator.tensors, operator.results
        marks = [(self._marks[tensor], tensor) for tensor in tensors if tensor in self._marks]
        mark, first = marks[0]
        from_end, size = first.ndim - mark.dim, first.shape[mark.dim]
        for other, tensor in marks[1:]:
            if (tensor.ndim - other.dim, tensor.shape[other.dim], other.before) != (from_end, size, mark.before):
                return None
        for tensor in tensors:
            if tensor in self._marks:
                continue
            alone = from_end == mark.before == 1
            if alone and self._norms.has_each(tensor, operator.module, size, mark.sources):
                continue
            if tensor.ndim >= from_end and tensor.shape[-from_end] != 1:
                return None
            if not self._treats_blocks_alike(tensor, mark):
                return None
            if tensor.numel() == 1 and tensor.device.type == "meta" and tensor not in self._known:
                return None  # a number that was made of one, perhaps of the number of heads
        self.numbers += _numbers(operator.operands)
        if any(item.ndim < from_end or item.shape[-from_end] != size for item in results):
            return None
        return replace(mark, dim=results[0].ndim - from_end, blocks=math.gcd(*(other.blocks for other, _ in marks)))

    def _treats_blocks_alike(self, tensor: torch.Tensor, mark: _Mark) -> bool:
        """Return whether the gradient of a tensor beside features is zero, or is summed over ranks: of parameters, of means."""
        if self._norms.is_mean(tensor):
            return True
        parameters = self._learned.get(tensor, frozenset())
        for name in parameters or ():
            self._beside[name] = self._beside.get(name, frozenset()) | mark.sources
        return parameters is not None


def _dims(tensor: torch.Tensor, operands: dict[str, Any]) -> list[int]:
    """Return the dimensions that an operator is told to work along; without any, it works along all."""
    named = operands.get("dim", operands.get("dims"))
    named = named if isinstance(named, list | tuple) else [named]
    return [dim % tensor.ndim for dim in named if isinstance(dim, int)] or list(range(tensor.ndim))


def _has_no_heads(tensor: torch.Tensor, heads: int) -> bool:
    """Return whether a tensor beside queries, keys and values has nothing for each head."""
    return heads not in tensor.shape if tensor.ndim < 3 else tensor.shape[-3] == 1


def _numbers(tree: Any) -> list[float]:
    """Return the numbers among the arguments of an operator, and the values of scalars that have one."""
    found: list[float] = []
    for item in leaves(tree):
        has_value = isinstance(item, torch.Tensor) and item.numel() == 1 and item.device.type == "cpu"
        if has_value or isinstance(item, int | float):
            found.append(float(item))
    return found

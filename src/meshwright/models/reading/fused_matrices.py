"""Which weights are several matrices in one tensor: how a model takes apart the output features of its linear layers.

The features of each linear layer are numbered, and the numbers follow them through one forward without values: operators that
only move entries are applied to the numbers, too. Features that any other operator reads in one tensor belong to one matrix,
and so do those that are joined in one tensor again, as the halves of rotary embeddings are. Queries, keys and values of a fused
matrix, or gate and up, never meet in this way.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from meshwright.models.reading.tracing import Attention, Inputs, Labels, Operator, Tracer, tensors_in, traced
from meshwright.plan.given.names import generalize, match_names, within
from meshwright.plan.given.parameter_storage import is_conv1d, is_transposed
from meshwright.plan.given.spec import ExpertsRule
from meshwright.plan.update.matrices import Apart

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["trace_fused"]

_MOST = 8
"""Matrices in one weight. Code that takes more apart computes something else with single features."""

_MOVES = {
    "view", "_unsafe_view", "_reshape_alias", "unsqueeze", "squeeze", "expand", "permute", "transpose", "t", "split",
    "split_with_sizes", "chunk", "slice", "select", "unbind", "narrow", "clone", "detach", "alias", "flip", "roll",
}  # fmt: skip
"""Operators that move the entries of one tensor, and compute nothing."""

_JOINS = {"cat", "stack"}
"""Those that put tensors together."""

_KEEP = {"native_layer_norm", "_fused_rms_norm", "native_dropout"}
"""Those whose results have a feature for each that they read, beside pointwise ones."""

_NEW = {"new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided", "empty_like", "zeros_like", "ones_like"}
"""Those that use a tensor for its shape, dtype and device alone."""

_SUMS = {"add", "sub", "rsub", "add_", "sub_"}
"""Those after which an entry is a sum of features."""


def trace_fused(model: "PreTrainedModel", layers: Sequence[str], experts: Sequence[ExpertsRule]) -> dict[str, Apart]:
    """Return the weights inside of layers that are several matrices, or that have heads, by name.

    If the model cannot be traced, these are weights of experts alone.

    Args:
        model: a causal language model, on any device; it is called with tensors on the meta device, and not changed.
        layers: names of its layers.
        experts: its mixtures.
    """
    modules = dict(model.named_modules())
    alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, module in modules.items():
        if within(name, layers) and (isinstance(module, nn.Linear) or is_conv1d(module)):
            alike.setdefault((generalize(name), tuple(module.get_parameter("weight").shape)), []).append(name)
    tracer, _ = traced(model, experts, partial(_FusedTracer, [names[0] for names in alike.values()]))
    found: dict[str, Apart] = {}
    if tracer is not None:  # layers of one name and shape have one code
        for names in alike.values():
            if (apart := tracer.numbers.apart(names[0])) is not None:
                found.update((f"{name}.weight", apart) for name in names)
    for name in (name for rule in experts for name in match_names(rule.pattern, modules)):
        if (apart := _gate_and_up(modules[name])) is not None:
            found[f"{name}.gate_up_proj"] = apart
    return found


class _Numbers:
    """The numbers of features in tensors, and which features belong together."""

    def __init__(self) -> None:
        self._labels = Labels()  # of a tensor: name of the layer, and the numbers in its shape
        self._parts: dict[str, torch.Tensor] = {}  # of a layer: for each feature the least one that it belongs to
        self._heads: dict[str, list[torch.Tensor]] = {}  # of a layer: the numbers of queries, keys or values [heads, size]

    def begin(self, layer: str, output: torch.Tensor) -> None:
        """Number the features that a layer puts out. It may run several times."""
        features = output.shape[-1]
        self._parts.setdefault(layer, torch.arange(features))
        self._labels[output] = layer, torch.arange(features).expand(output.shape)

    def read(self, tensors: Iterable[torch.Tensor]) -> None:
        """The features in each of some tensors belong together."""
        for layer, numbers in self._labels.among(tensors):
            self._unite(layer, numbers)

    def _unite(self, layer: str, numbers: torch.Tensor) -> None:
        parts = self._parts[layer]
        together = parts[numbers.unique()].unique()
        if len(together) > 1:
            parts[torch.isin(parts, together)] = together[0]

    def attend(self, tensors: Iterable[torch.Tensor]) -> None:
        """Queries, keys and values [batch, heads, tokens, size] are read."""
        tensors = list(tensors)
        self.read(tensors)
        for layer, numbers in self._labels.among(tensors):
            self._heads.setdefault(layer, []).append(numbers[0, :, 0].sort().values)

    def operator(self, function: Any, name: str, args: Any, kwargs: Any, results: list[torch.Tensor]) -> None:
        """Carry the numbers on."""
        tensors = tensors_in((args, kwargs))
        labels = self._labels.among(tensors)
        if not labels or name in _NEW:
            return
        layers = {layer for layer, _ in labels}
        moves = name in _MOVES or (name in _JOINS and len(layers) == 1 and len(labels) == len(tensors))
        if moves or name == "_to_copy":
            numbers = [labels[0][1]]
            if moves:
                known = self._labels
                moved = function(*tree_map_only(torch.Tensor, lambda own: known[own][1], args), **kwargs)
                numbers = tensors_in(moved)
            for result, own in zip(results, numbers, strict=True):
                self._labels[result] = labels[0][0], own
            if name in _JOINS:
                self.read(results)
            return
        self.read(tensors)
        if name in _SUMS and len(layers) == 1:  # features that are turned into each other, as those of rotary embeddings are
            self._unite(labels[0][0], torch.cat([numbers.flatten() for _, numbers in labels]))
        alike = name in _SUMS or len({tuple(numbers.unique().tolist()) for _, numbers in labels}) == 1
        each = torch.Tag.pointwise in function.tags or name in _KEEP
        if len(layers) == 1 and alike and each and results and results[0].shape == labels[0][1].shape:
            self._labels[results[0]] = labels[0]

    def apart(self, layer: str) -> Apart | None:
        """Return how the features of a layer are taken apart; ``None``: they are not, or in a way that has no name."""
        parts = self._parts[layer].tolist() if layer in self._parts else []
        runs = [(part, len(list(same))) for part, same in groupby(parts)]
        count = len(set(parts))
        if not 1 <= count <= _MOST or len(runs) % count or runs != runs[:count] * (len(runs) // count):
            return None
        found = Apart(tuple(length for _, length in runs[:count]), len(runs) // count)
        heads = tuple(self._heads_of(layer, part) for part, _ in runs[:count])
        if any(number > 1 for number in heads):
            return found._replace(heads=heads)
        return found if count > 1 else None

    def _heads_of(self, layer: str, part: int) -> int:
        """Return the number of heads of a matrix, if the features of each lie behind each other in it; otherwise 1."""
        features = torch.nonzero(self._parts[layer] == part).flatten()
        known = [own for own in self._heads.get(layer, []) if own.numel() == len(features) and int(own.min()) == part]
        same = known and all(torch.equal(own.flatten(), features) for own in known)
        return len(known[0]) if same else 1


class _FusedTracer(Tracer):
    """Follows the features of some linear layers."""

    def __init__(self, layers: Sequence[str], inputs: Inputs) -> None:
        super().__init__(inputs)
        self.layers, self.numbers = set(layers), _Numbers()

    def leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Number the features of a layer."""
        if name in self.layers and isinstance(output, torch.Tensor):
            self.numbers.begin(name, output)

    def attention(self, call: Attention) -> None:
        """Queries, keys and values are read each for itself."""
        self.numbers.attend((call.query, call.key, call.value))

    def operator(self, operator: Operator) -> None:
        """Carry the numbers on."""
        self.numbers.operator(operator.function, operator.name, operator.args, operator.kwargs, operator.results)


class _GateMode(TorchDispatchMode):
    """Follows the features of experts through their gate."""

    def __init__(self, numbers: _Numbers) -> None:
        super().__init__()
        self.numbers = numbers

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.numbers.operator(function, str(function._schema.name.partition("::")[2]), args, kwargs or {}, tensors_in(result))
        return result


def _gate_and_up(mixture: nn.Module) -> Apart | None:
    """Return how experts with the interface of transformers take gate and up apart; ``None``: they do not, or have another."""
    gate, weight = getattr(mixture, "_apply_gate", None), getattr(mixture, "gate_up_proj", None)
    if gate is None or not isinstance(weight, torch.Tensor):
        return None
    numbers = _Numbers()
    features = torch.empty(1, weight.shape[2 if is_transposed(mixture) else 1], device="meta", dtype=weight.dtype)
    numbers.begin("", features)
    with _GateMode(numbers):
        gate(features)
    return numbers.apart("")

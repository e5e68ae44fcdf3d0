"""Which pairs of matrices can be sliced by columns and rows: read from one forward without values.

A pair is an MLP, an attention, or anything that computes like one: the features that a linear layer puts out pass operators
that treat each of them alone, or each head, and enter one other linear layer. Then each rank can compute its share of the
features (Megatron-LM, arXiv 1909.08053, section 3), and the second layer puts out partial sums. A statistic over features, a
norm, or an addition of something that is not sliced would compute another thing on a slice. Several linear layers may share
their second one, as a gate does, and as queries, keys and values do.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from meshwright.models import _transformers_compat as compat
from meshwright.models.reading.tensor.features import FeatureTrace
from meshwright.models.reading.tracing import (
    call_on_meta,
    first_that_runs,
    hooked,
    meta_positions,
    meta_tensors,
    prime_length,
)
from meshwright.plan.given.names import holder_of, within
from meshwright.plan.given.sliceable_pairs import Pair, Pairs
from meshwright.plan.given.spec import ExpertsRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["trace_pairs"]

_HEADS = r"(?!.*per_head)(.*_heads|n_head)"
_WIDTHS = ("embed_dim", "all_head_size", "hidden_size", "inner_dim", "d_model", "n_embd", "dim_model")
_COUNTED = tuple(map(re.compile, ("(?!)", _HEADS, f"{_HEADS}|{'|'.join(_WIDTHS)}")))
"""Names of attributes that count what is sliced, tried in this order: none; heads; heads, and the features of all heads."""


def trace_pairs(model: "PreTrainedModel", layers: Sequence[str], experts: Sequence[ExpertsRule] = ()) -> Pairs:
    """Return what can be sliced in the layers of a model, and the linear layers whose features an operator mixes as a whole.

    What the trace finds is tried: the model is called again with twice as many heads and features. An attention that reads its
    number of heads from an attribute, and not from shapes, needs the number of its rank.

    Args:
        model: a causal language model, on any device; it is called with tensors on the meta device, and not changed.
        layers: names of its layers.
        experts: its mixtures. They are not called, because what they do depends on values.
    """
    classes, uses = compat.linear_classes(), _uses(model)
    adapters = [name for name, module in model.named_modules() if hasattr(module, "base_layer")]
    linear = {
        name: module
        for name, module in model.named_modules()
        if type(module) in classes
        and within(name, layers)
        and not within(name, adapters)
        and all(uses[id(own)] == 1 for own in module.parameters())
    }

    embeddings = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    leaves = {  # norms of heads; what else holds parameters computes something with them
        f"{name}.{own}"
        for name, module in model.named_modules()
        if not any(True for _ in module.children())
        for own, parameter in module.named_parameters(recurse=False)
        if uses[id(parameter)] == 1 and within(name, layers)
    }
    first = {id(parameter): name for name, parameter in model.named_parameters()}

    def traced(
        tensors: Mapping[str, torch.Tensor], counts: Mapping[str, Mapping[str, int]], device: str | None
    ) -> FeatureTrace:
        trace = FeatureTrace(
            ((tensors[name], name if name in leaves else None) for name, own in model.named_parameters() if own.requires_grad),
            ((tensors[first[id(module.weight)]], name) for name, module in embeddings.items()),
            tensors.values(),
        )
        hooks = [module.register_forward_pre_hook(trace.entering(name)) for name, module in linear.items()]
        hooks += [module.register_forward_hook(trace.leaving(name)) for name, module in linear.items()]
        tied = {id(module.weight) for module in embeddings.values()}
        for module in model.modules():
            if any(id(own) in tied for own in module.parameters(recurse=False)):
                hooks += trace.owned(module)
        with hooked(hooks), _counting(model, counts), trace:
            call_on_meta(model, experts, trace.attend, tensors, meta_positions(prime_length(model)), device)
        return trace

    tensors = meta_tensors(model)
    runs, _ = first_that_runs(lambda device: (traced(tensors, {}, device), device))
    if runs is None:
        return Pairs()
    whole, device = runs
    found = [pair for pair in whole.pairs() if pair.blocks > 1]
    plain = [pair for pair in found if pair.blocks == _width(linear[pair.second], 1)]
    for pairs, names in [*((found, names) for names in _COUNTED), (plain, _COUNTED[0])]:
        tried = _Doubled(model, linear, pairs, names)
        trial, _ = first_that_runs(partial(traced, tried.tensors(tensors), tried.counts), (device,))
        if trial is not None and trial.repeats(whole) and tried.expected <= set(trial.pairs()):
            return Pairs(tried.pairs, whole.mixed, _vocabulary(model), tuple(whole.read))
    return Pairs(mixed=whole.mixed, read=tuple(whole.read))


class _Doubled:
    """Pairs with twice their features, to try whether a model computes with another number of them.

    A number that is larger tells more than one that is smaller: one head has no dimension of its own.

    Args:
        model: the model.
        linear: its linear layers, by name.
        pairs: what is doubled.
        names: names of attributes that count what is doubled.

    Attributes:
        pairs: the pairs with the attributes that count.
        counts: attribute to its value for twice the features, by name of the module.
        expected: the pairs as a trace finds them.
    """

    def __init__(
        self, model: nn.Module, linear: Mapping[str, nn.Module], pairs: Sequence[Pair], names: re.Pattern[str]
    ) -> None:
        self.linear = linear
        self.counts: dict[str, dict[str, int]] = {}
        counted = []
        for pair in pairs:
            widths = {_width(linear[pair.second], 1), *(_width(linear[name], 0) for name in pair.firsts)}
            own = [(name, "nf", _width(linear[name], 0)) for name in pair.firsts if self._transposed(name)]
            for holder in dict.fromkeys(map(holder_of, pair.firsts)):
                for name, value in vars(model.get_submodule(holder)).items():
                    fits = type(value) is int and (value in widths if name in _WIDTHS else value and value % pair.blocks == 0)
                    if fits and names.fullmatch(name):
                        own.append((holder, name, value))
            for module, name, value in own:
                self.counts.setdefault(module, {})[name] = 2 * value
            counted.append(replace(pair, counts=tuple(own)))
        self.pairs = tuple(counted)
        self.expected = {replace(pair, blocks=2 * pair.blocks) for pair in pairs}

    def _transposed(self, name: str) -> bool:
        return type(self.linear[name]) is not nn.Linear

    def tensors(self, before: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return all tensors, with twice the features in those that belong to pairs."""
        tensors = dict(before)

        def double(name: str, dim: int) -> None:
            if (tensor := tensors.get(name)) is not None:
                tensors[name] = torch.cat([tensor, tensor], dim)

        for pair in self.pairs:
            for name in pair.firsts:
                double(f"{name}.weight", 1 if self._transposed(name) else 0)
                double(f"{name}.bias", 0)
            double(f"{pair.second}.weight", 0 if self._transposed(pair.second) else 1)
        return tensors


def _width(linear: nn.Module, dim: int) -> int:
    """Return the number of a linear layer's output features (dimension 0), or input features (dimension 1)."""
    weight = linear.get_parameter("weight")
    return weight.shape[dim if type(linear) is nn.Linear else 1 - dim]


@contextmanager
def _counting(model: nn.Module, counts: Mapping[str, Mapping[str, int]]) -> Iterator[None]:
    """Let modules have other values of attributes."""
    modules = [(vars(model.get_submodule(name)), values) for name, values in counts.items()]
    before = [{name: own[name] for name in values} for own, values in modules]
    try:
        for own, values in modules:
            own.update(values)
        yield
    finally:
        for (own, _), values in zip(modules, before, strict=True):
            own.update(values)


def _uses(model: nn.Module) -> Counter[int]:
    """Return how many names each parameter has, by its ``id``."""
    return Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))


def _vocabulary(model: "PreTrainedModel") -> tuple[str, ...]:
    """Return the names of embedding and head, if what they hold is used by nobody else."""
    names = {id(module): name for name, module in model.named_modules()}
    uses = _uses(model)
    embedding, head = compat.embedding_and_head(model)
    if type(embedding) is not nn.Embedding or type(head) is not nn.Linear:
        return ()
    tied = embedding.weight is head.weight
    alone = uses[id(embedding.weight)] == uses[id(head.weight)] == 1 + tied and (head.bias is None or uses[id(head.bias)] == 1)
    return (names[id(embedding)], names[id(head)]) if alone else ()

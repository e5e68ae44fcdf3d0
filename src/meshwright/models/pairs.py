"""Which pairs of matrices can be sliced by columns and rows: read from one forward without values.

A pair is an MLP, or anything that computes like one: the features that a linear layer puts out pass operators that treat each
of them alone, and enter one other linear layer. Then each rank can compute its share of the features (Megatron-LM, arXiv
1909.08053, section 3), and the second layer puts out partial sums. A statistic over features, a norm, a reshape, or an addition
of something that is not sliced would compute another thing on a slice. Several linear layers may share their second one, as a
gate does.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.models import _transformers_compat as compat
from meshwright.models.tracing import (
    MASK_DEVICES,
    call_on_meta,
    first_that_runs,
    hooked,
    meta_positions,
    meta_tensors,
    no_attention,
    prime_length,
)
from meshwright.plan.names import within
from meshwright.plan.pairs import Pairs
from meshwright.plan.spec import ExpertsRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["trace_pairs"]

_KEEPS_FEATURES = {"view", "_unsafe_view", "_reshape_alias", "detach", "alias", "clone", "_to_copy", "native_dropout"}
"""Operators that treat each feature alone if the last dimension stays, beside those that torch tags as pointwise."""

_MIXES_FEATURES = {
    "mean", "sum", "var", "std", "amax", "amin", "max", "min", "norm", "linalg_vector_norm", "_softmax", "_log_softmax", "sort",
    "cumsum", "logsumexp", "median", "kthvalue", "flip", "roll",
}  # fmt: skip
"""Operators that combine all features of a token, if they are told to work along the last dimension."""


def trace_pairs(model: "PreTrainedModel", layers: Sequence[str], experts: Sequence[ExpertsRule] = ()) -> Pairs:
    """Return each pair in the layers of a model, and the linear layers whose features an operator mixes as a whole.

    Args:
        model: a causal language model, on any device; it is called with tensors on the meta device, and not changed.
        layers: names of its layers.
        experts: its mixtures. They are not called, because what they do depends on values.
    """

    def traced(device: str | None) -> "_Trace":
        tensors = meta_tensors(model)
        trace, handles = _Trace(tensors.values()), []
        for name, module in model.named_modules():
            if type(module) is nn.Linear and within(name, layers):
                handles.append(module.register_forward_pre_hook(trace.entering(name)))
                handles.append(module.register_forward_hook(trace.leaving(name)))
        with hooked(handles), trace:
            call_on_meta(model, experts, no_attention, tensors, meta_positions(prime_length(model)), device)
        return trace

    found, _ = first_that_runs([partial(traced, device) for device in MASK_DEVICES])
    return Pairs() if found is None else Pairs(found.pairs(), found.mixed, _vocabulary(model))


def _vocabulary(model: "PreTrainedModel") -> tuple[str, ...]:
    """Return the names of embedding and head, if what they hold is used by nobody else."""
    names = {id(module): name for name, module in model.named_modules()}
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    embedding, head = compat.embedding_and_head(model)
    if type(embedding) is not nn.Embedding or type(head) is not nn.Linear:
        return ()
    tied = embedding.weight is head.weight
    alone = uses[id(embedding.weight)] == uses[id(head.weight)] == 1 + tied and (head.bias is None or uses[id(head.bias)] == 1)
    return (names[id(embedding)], names[id(head)]) if alone else ()


class _Trace(TorchDispatchMode):
    """Follows the features that linear layers put out."""

    def __init__(self, parameters: Any) -> None:
        super().__init__()
        self._sources: Any = WeakIdKeyDictionary()  # tensor -> names of the linear layers that its features come from
        self._parameters = WeakIdKeyDictionary(dict.fromkeys(parameters, True))
        self._takers: dict[str, set[str]] = {}
        self._unfit: set[str] = set()  # whose features are mixed, or added to others
        self._several: set[str] = set()  # that run more than once
        self._ran: set[str] = set()
        self.mixed: dict[str, str] = {}
        self._inside = 0

    def pairs(self) -> tuple[tuple[tuple[str, ...], str], ...]:
        firsts: dict[str, list[str]] = {}
        for name, takers in self._takers.items():
            for taker in takers:
                firsts.setdefault(taker, []).append(name)
        unfit, found = self._unfit | self._several, []
        taken: set[str] = set()
        for taker, names in firsts.items():
            alone = all(len(self._takers[name]) == 1 and name not in unfit and name not in taken for name in names)
            if alone and taker not in self._several:
                taken.add(taker)  # it cannot be the first of another pair
                found.append((tuple(sorted(names)), taker))
        return tuple(found)

    def entering(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            sources = self._sources.get(args[0], frozenset()) if args else frozenset()
            for source in sources:
                self._takers.setdefault(source, set()).add(name)
            if name in self._ran or not args:
                self._several |= {name, *sources}
            self._ran.add(name)
            self._inside += 1

        return enter

    def leaving(self, name: str) -> Any:
        def leave(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            self._inside -= 1
            self._sources[output] = frozenset({name})

        return leave

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self._inside:
            return result
        tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
        sources = frozenset().union(*(self._sources.get(tensor, frozenset()) for tensor in tensors))
        if not sources:
            return result
        name = function._schema.name.partition("::")[2]
        results = [item for item in tree_leaves(result) if isinstance(item, torch.Tensor)]
        features = {tensor.shape[-1] for tensor in tensors if self._sources.get(tensor)}
        alone = torch.Tag.pointwise in function.tags or name in _KEEPS_FEATURES
        same = len(features) == 1 and all(item.ndim and item.shape[-1] in features for item in results)
        others = [tensor for tensor in tensors if not self._sources.get(tensor)]
        sliced = all(tensor.numel() == 1 and tensor not in self._parameters for tensor in others)
        if alone and same and sliced:
            for item in results:
                self._sources[item] = sources
        else:
            self._unfit |= sources
            if name in _MIXES_FEATURES and _along_features(tensors[0], args):
                self.mixed.update(dict.fromkeys(self._sources.get(tensors[0], ()), str(function)))
        return result


def _along_features(tensor: torch.Tensor, args: Sequence[Any]) -> bool:
    """Return whether the dimension that an operator names is the last one."""
    named = [item for arg in args[1:] for item in (arg if isinstance(arg, list | tuple) else [arg]) if type(item) is int]
    return bool(named) and any(item in (-1, tensor.ndim - 1) for item in named)

"""Whether the residual stream of a model can be sliced over the sequence: read from one forward without values.

The forward is called as sequence parallel calls it: the first layer takes a slice of the sequence, attention and MLP of each
layer take all of it, and the norm after the layers gives all of it to the head. The length of a slice and that of the whole are
two primes. So what adds the two, or mixes the tokens of a slice, shows by its shapes. Redistributions are new tensors of the
right shape.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.errors import Problems, Refusal
from meshwright.models.reading.tracing import (
    TokenDimension,
    call_on_meta,
    first_that_runs,
    hooked,
    meta_positions,
    meta_tensors,
    no_attention,
    prime_length,
)
from meshwright.plan.given.hidden_argument import hidden_argument, value_of, with_argument
from meshwright.plan.given.names import within
from meshwright.plan.given.sequence_regions import RegionFacts
from meshwright.plan.given.spec import ExpertsRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["trace_regions"]

SEQUENCE = 1
"""The dimension of the sequence in a hidden state [batch, sequence, features]."""


def trace_regions(model: "PreTrainedModel", layers: Sequence[str], experts: Sequence[ExpertsRule] = ()) -> RegionFacts:
    """Return which modules of a model need the whole sequence, or why the stream cannot be shared.

    Args:
        model: a causal language model, on any device; it is called with tensors on the meta device, and not changed.
        layers: names of its layers.
        experts: its mixtures. They are not called, because what they do depends on values.
    """
    regions = _regions_of(model, layers)
    if not regions:
        return RegionFacts(
            problem=Refusal("sp.regions", f"layer {layers[0]!r} has no attention and MLP that are modules of their own")
        )
    found, why = first_that_runs(partial(_traced, model, layers, regions, experts))
    if found is None:
        return RegionFacts(problem=Refusal("sp.stream", f"its stream cannot be sliced ({why})"))
    # The norm after the layers is not on a stage before the last, and what follows gets a slice there.
    cut, why = first_that_runs(partial(_traced, model, layers, regions, experts, cut=True))
    return (
        found
        if cut is not None
        else replace(found, problem_in_stages=Refusal("sp.stream", f"a slice cannot leave a stage ({why})"))
    )


def _regions_of(model: nn.Module, layers: Sequence[str]) -> list[str]:
    """Return the modules of layers that have children and hold matrices; none if a layer itself holds one."""
    regions = []
    for layer in layers:
        for own, child in model.get_submodule(layer).named_children():
            matrices = any(parameter.ndim > 1 for parameter in child.parameters())
            if matrices and (not any(True for _ in child.children()) or isinstance(child, nn.ModuleList | nn.ModuleDict)):
                return []
            regions += [f"{layer}.{own}"] if matrices else []
    return regions


def _traced(
    model: "PreTrainedModel",
    layers: Sequence[str],
    regions: Sequence[str],
    experts: Sequence[ExpertsRule],
    device: str | None,
    *,
    cut: bool = False,
) -> RegionFacts:
    length, tensors = prime_length(model), meta_tensors(model)
    trace = _Trace(model, layers, regions, length, prime_length(model, above=length), tensors.values(), cut=cut)
    with trace.watching():
        call_on_meta(model, experts, trace.attend, tensors, meta_positions(length), device)
    return trace.facts()


class _Trace(TorchDispatchMode):
    """Redistributes the stream at the borders of regions, and records what does not fit.

    Args:
        model: the model.
        layers: names of its layers.
        regions: names of its regions.
        whole: length of the sequence.
        part: length of a slice; no rank has so many tokens, but it is another prime.
        parameters: the tensors that stand for the model's parameters and buffers.
        cut: whether the sequence stays sliced after the layers, as on a stage before the last one.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[str], regions: Sequence[str], whole: int, part: int, parameters: Any,
        *, cut: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self._parameters = WeakIdKeyDictionary(dict.fromkeys(parameters, True))
        self.model, self.layers, self.regions = model, layers, regions
        self.whole, self.part, self.slices, self.cut = whole, part, TokenDimension(part), cut
        self.problems = Problems()
        self.around: dict[str, None] = {}
        self.after = [name for name, module in model.named_modules() if self._is_after(name, module)]
        self.ran: list[str] = []
        self._region = ""
        self._early: set[str] = set()
        self._inputs, self._products = WeakIdKeyDictionary(), WeakIdKeyDictionary()

    def _is_after(self, name: str, module: nn.Module) -> bool:
        """Return whether a module may run after the layers, on the stream: it has no matrix, and is in no layer."""
        plain = not any(True for _ in module.children()) and all(parameter.ndim == 1 for parameter in module.parameters())
        return plain and not within(name, self.layers)

    def facts(self) -> RegionFacts:
        if not self.problems and not self.ran:
            self.problems.add("sp.stream", "no norm after its layers gives the whole sequence to the head")
        return RegionFacts(tuple(self.regions), tuple(self.ran), tuple(self.around), self.problems[0] if self.problems else "")

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        """Stand in for an attention: its output depends on all three."""
        output = no_attention(module, query, key, value)
        self._products[output[0]] = True
        return output

    # -- the stream --------------------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles = []
        for name, module in self.model.named_modules():
            if name == self.layers[0]:
                handles.append(module.register_forward_pre_hook(self._at_first_layer, with_kwargs=True))
            elif name in self.regions:
                handles.append(module.register_forward_pre_hook(self._entering(name), with_kwargs=True))
                handles.append(module.register_forward_hook(self._leaving(name)))
            elif name in self.after:
                handles.append(module.register_forward_hook(self._norm(name)))
            if any(parameter.ndim > 1 for parameter in module.parameters(recurse=False)):
                handles.append(module.register_forward_hook(self._product))
        with hooked(handles), self:
            yield

    def _resized(self, hidden: torch.Tensor, before: int, after: int, name: str) -> torch.Tensor:
        if hidden.ndim < 2 or hidden.shape[SEQUENCE] != before:
            raise ValueError(f"{name!r} has a hidden state of shape {tuple(hidden.shape)} where the sequence should be sliced")
        return torch.empty((hidden.shape[0], after, *hidden.shape[2:]), dtype=hidden.dtype, device="meta")

    def _moved(self, module: nn.Module, args: Any, kwargs: Any, before: int, after: int, name: str) -> Any:
        argument = hidden_argument(module)
        moved = self._resized(value_of(argument, args, kwargs, name), before, after, name)
        return *with_argument(argument, args, kwargs, lambda _: moved, name), moved

    def _at_first_layer(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self._moved(module, args, kwargs, self.whole, self.part, self.layers[0])[:2]

    def _entering(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            args, kwargs, moved = self._moved(module, args, kwargs, self.part, self.whole, name)
            if any(self.slices.has(item) for item in _tensors((args, kwargs))):
                self.problems.add("sp.stream", f"{name!r} takes more of the residual stream than its hidden state")
            self._region = name
            self._inputs[moved] = True
            return args, kwargs

        return enter

    def _leaving(self, name: str) -> Any:
        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            if any(tensor in self._parameters for tensor in _tensors(output)):
                self.problems.add("sp.stream", f"{name!r} returns a parameter, whose gradient would be that of a slice")
            if hidden in self._inputs:
                self.around[name] = None
            self._region = ""
            moved = self._resized(hidden, self.whole, self.part, name)
            return (moved, *output[1:]) if isinstance(output, tuple) else moved

        return leave

    def _norm(self, name: str) -> Any:
        def norm(module: nn.Module, args: Any, output: Any) -> Any:
            if not isinstance(output, torch.Tensor) or output.ndim < 2:
                return output
            if output.shape[SEQUENCE] == self.whole and not self.ran:
                self._early.add(name)
            if output.shape[SEQUENCE] == self.part:
                if name in self._early:
                    self.problems.add("sp.stream", f"{name!r} runs before the layers and after them")
                self.ran.append(name)
                return output if self.cut else self._resized(output, self.part, self.whole, name)
            return output

        return norm

    def _product(self, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in _tensors(output):
            self._inputs.pop(tensor, None)
            self._products[tensor] = True

    # -- operators ---------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors, results = _tensors((args, kwargs)), _tensors(result)
        if self._region:
            inputs, products = (any(tensor in of for tensor in tensors) for of in (self._inputs, self._products))
            for tensor in results:
                if inputs:
                    self._inputs[tensor] = True
                if products:
                    self._products[tensor] = True
            if inputs and products:
                self.around[self._region] = None
        elif any(map(self.slices.has, tensors)):
            name = function._schema.name.partition("::")[2]
            if self.slices.mixed(name, tensors, args, results):
                self.problems.add(
                    "sp.stream", f"between attention and MLP, an operator mixes the tokens of a slice ({function})"
                )
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [item for item in tree_leaves(tree) if isinstance(item, torch.Tensor) and item.is_meta]

"""Whether the residual stream of a model can be sliced over the sequence: read from one forward without values.

The forward is called as sequence parallel calls it: the first layer takes a slice of the sequence, attention and MLP of each
layer take all of it, and the norm after the layers gives all of it to the head. The length of a slice and that of the whole are
two primes. So what adds the two, or mixes the tokens of a slice, shows by its shapes. Redistributions are new tensors of the
right shape.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright.errors import Problems, Refusal
from meshwright.models.reading.token_dimension import TokenDimension
from meshwright.models.reading.tracing import Attention, Inputs, Labels, Operator, Tracer, prime_length, tensors_in, traced
from meshwright.plan.given.hidden_argument import hidden_argument, value_of, with_argument
from meshwright.plan.given.names import within
from meshwright.plan.given.spec import ExpertsRule
from meshwright.plan.given.traces import RegionFacts

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
        why = f"layer {layers[0]!r} has no attention and MLP that are modules of their own"
        return RegionFacts(problem=Refusal("sp.regions", why))
    found, why = traced(model, experts, partial(_RegionTracer, model, layers, regions))
    if found is None:
        return RegionFacts(problem=Refusal("sp.stream", f"its stream cannot be sliced ({why})"))
    # The norm after the layers is not on a stage before the last, and what follows gets a slice there.
    cut, why = traced(model, experts, partial(_RegionTracer, model, layers, regions, cut=True))
    facts = found.facts()
    if cut is None:
        return replace(facts, problem_in_stages=Refusal("sp.stream", f"a slice cannot leave a stage ({why})"))
    return facts


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


class _RegionTracer(Tracer):
    """Redistributes the stream at the borders of regions, and records what does not fit.

    Args:
        model: the model.
        layers: names of its layers.
        regions: names of its regions.
        inputs: what it is called with.
        cut: whether the sequence stays sliced after the layers, as on a stage before the last one.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[str], regions: Sequence[str], inputs: Inputs, *, cut: bool = False
    ) -> None:
        super().__init__(inputs)
        self.layers, self.regions, self.cut = layers, regions, cut
        self.whole = inputs.positions.shape[1]
        self.part = prime_length(model, above=self.whole)  # no rank has so many tokens, but it is another prime
        self.slices = TokenDimension(self.part)
        self.problems = Problems()
        self.with_residual: dict[str, None] = {}
        self.after = {name for name, module in model.named_modules() if self._is_after(name, module)}
        self.ran: list[str] = []
        self._region = ""
        self._early: set[str] = set()
        self._parameters, self._inputs, self._products = Labels(), Labels(), Labels()
        self._parameters.put(inputs.tensors.values())

    def _is_after(self, name: str, module: nn.Module) -> bool:
        """Return whether a module may run after the layers, on the stream: it has no matrix, and is in no layer."""
        plain = not any(True for _ in module.children()) and all(parameter.ndim == 1 for parameter in module.parameters())
        return plain and not within(name, self.layers)

    def facts(self) -> RegionFacts:
        if not self.problems and not self.ran:
            self.problems.add("sp.stream", "no norm after its layers gives the whole sequence to the head")
        return RegionFacts(
            tuple(self.regions), tuple(self.ran), tuple(self.with_residual), self.problems[0] if self.problems else ""
        )

    # -- modules -----------------------------------------------------------------------------------------------------------

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Slice the sequence before the first layer, and give all of it to regions."""
        if name == self.layers[0]:
            return self._moved(module, args, kwargs, self.whole, self.part, name)[:2]
        if name not in self.regions:
            return None
        args, kwargs, moved = self._moved(module, args, kwargs, self.part, self.whole, name)
        if any(map(self.slices.has, tensors_in((args, kwargs)))):
            self.problems.add("sp.stream", f"{name!r} takes more of the residual stream than its hidden state")
        self._region = name
        self._inputs[moved] = True
        return args, kwargs

    def leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Slice what regions return, and give the whole sequence to what follows the last norm."""
        if name in self.regions:
            output = self._sliced(name, output)
        elif name in self.after:
            output = self._normed(name, output)
        if any(parameter.ndim > 1 for parameter in module.parameters(recurse=False)):
            for tensor in tensors_in(output):
                self._inputs.pop(tensor, None)
                self._products[tensor] = True
        return output

    def _resized(self, hidden: torch.Tensor, before: int, after: int, name: str) -> torch.Tensor:
        if hidden.ndim < 2 or hidden.shape[SEQUENCE] != before:
            raise ValueError(f"{name!r} has a hidden state of shape {tuple(hidden.shape)} where the sequence should be sliced")
        return torch.empty((hidden.shape[0], after, *hidden.shape[2:]), dtype=hidden.dtype, device="meta")

    def _moved(self, module: nn.Module, args: Any, kwargs: Any, before: int, after: int, name: str) -> Any:
        argument = hidden_argument(module)
        moved = self._resized(value_of(argument, args, kwargs, name), before, after, name)
        return *with_argument(argument, args, kwargs, lambda _: moved, name), moved

    def _sliced(self, name: str, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        if self._parameters.among(tensors_in(output)):
            self.problems.add("sp.stream", f"{name!r} returns a parameter, whose gradient would be that of a slice")
        if hidden in self._inputs:
            self.with_residual[name] = None
        self._region = ""
        moved = self._resized(hidden, self.whole, self.part, name)
        return (moved, *output[1:]) if isinstance(output, tuple) else moved

    def _normed(self, name: str, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or output.ndim < 2:
            return output
        if output.shape[SEQUENCE] == self.whole and not self.ran:
            self._early.add(name)
        if output.shape[SEQUENCE] != self.part:
            return output
        if name in self._early:
            self.problems.add("sp.stream", f"{name!r} runs before the layers and after them")
        self.ran.append(name)
        return output if self.cut else self._resized(output, self.part, self.whole, name)

    # -- operators ---------------------------------------------------------------------------------------------------------

    def attention(self, call: Attention) -> None:
        """The output of an attention depends on all that it reads."""
        self._products[call.output] = True

    def operator(self, operator: Operator) -> None:
        """Follow what regions compute, and look for what mixes tokens between them."""
        if self._region:
            inputs, products = (bool(labels.among(operator.on_meta)) for labels in (self._inputs, self._products))
            if inputs:
                self._inputs.put(operator.results)
            if products:
                self._products.put(operator.results)
            if inputs and products:
                self.with_residual[self._region] = None
        elif self.slices.mixed(operator):
            self.problems.add(
                "sp.stream", f"between attention and MLP, an operator mixes the tokens of a slice ({operator.function})"
            )

"""Follows the residual stream of a model as sequence parallel would slice it, through one forward without values."""

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from meshwright.errors import Problems
from meshwright.models.reading.model_code import place_now
from meshwright.models.reading.token_dimension import TokenDimension
from meshwright.models.reading.tracing import Attention, Inputs, Labels, Operator, Tracer, prime_length, tensors_in
from meshwright.plan.given.hidden_argument import first_of, hidden_argument, value_of, with_argument, with_first
from meshwright.plan.given.names import within
from meshwright.plan.given.traces import RegionFacts, Stretch

__all__ = ["SEQUENCE", "StreamTracer"]

SEQUENCE = 1
"""The dimension of the sequence in a hidden state [batch, sequence, features]."""


class StreamTracer(Tracer):
    """Redistributes the stream at the borders of regions, and records what does not fit.

    Args:
        model: the model.
        stacks: names of its layers, in the order in which they run: those of each part of the stream that is sliced.
        regions: names of its regions.
        inputs: what it is called with.
        mixtures: names of its mixtures that may take tokens of the stream as [rows x positions, features].
        joins: whether the last layer gives the whole sequence to what follows, and not the norm after it.
        cut: whether the sequence stays sliced after the layers, as on a stage before the last one.
    """

    def __init__(
        self,
        model: nn.Module,
        stacks: Sequence[Sequence[str]],
        regions: Sequence[str],
        inputs: Inputs,
        *,
        mixtures: Collection[str] = (),
        joins: bool = False,
        cut: bool = False,
    ) -> None:
        super().__init__(inputs)
        self.stacks, self.regions, self.joins, self.cut = stacks, regions, joins, cut
        self.layers = tuple(chain.from_iterable(stacks))
        self.firsts = {layers[0]: number for number, layers in enumerate(stacks)}
        self.lasts = {layers[-1] for layers in stacks}
        self.mixtures, self.on_stream = mixtures, dict[str, None]()
        self.ended = False
        self.running = 0
        self.flat: dict[str, None] = {}
        self.whole = inputs.positions.shape[1]
        self.part = prime_length(model, above=self.whole)  # no rank has so many tokens, but it is another prime
        self.slices = TokenDimension(self.part)
        self.problems = Problems()
        self.with_residual: dict[str, None] = {}
        self.after = {name for name, module in model.named_modules() if self._is_after(name, module)}
        self.ran: list[dict[str, None]] = [{} for _ in stacks]
        self.region = ""
        self._on_whole: set[str] = set()
        self._parameters, self._inputs, self._products, self._made = Labels(), Labels(), Labels(), Labels()
        self._parameters.put(inputs.tensors.values())

    def _is_after(self, name: str, module: nn.Module) -> bool:
        """Return whether a module may run after the layers, on the stream: it has no matrix, and is in no layer."""
        plain = not any(True for _ in module.children()) and all(parameter.ndim == 1 for parameter in module.parameters())
        return plain and not within(name, self.layers)

    def facts(self) -> RegionFacts:
        """Return what was read."""
        if not self.problems and not all(self.ran) and not self.joins:
            self.problems.add("sp.stream", "no norm after its layers gives the whole sequence to the head")
        problem = self.problems[0] if self.problems else ""
        return RegionFacts(
            tuple(self.regions),
            tuple(Stretch(tuple(layers), tuple(ran)) for layers, ran in zip(self.stacks, self.ran, strict=True)),
            tuple(self.with_residual),
            problem,
            flat=tuple(self.flat),
            mixtures=tuple(self.on_stream),
        )

    def refuse(self, why: str) -> None:
        """Note why the stream cannot be sliced, and the line of the model's code that runs now."""
        self.problems.add("sp.stream", why + place_now())

    # -- modules -----------------------------------------------------------------------------------------------------------

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Slice the sequence before the first layer, and give all of it to regions."""
        if name in self.firsts:
            self.running, self.ended = self.firsts[name], False
            return self.moved(module, args, kwargs, self.whole, self.part, name)[:2]
        if name in self.mixtures and not self.region:
            self._take_tokens(name, args, kwargs)
        if name not in self.regions:
            return None
        args, kwargs, moved = self.moved(module, args, kwargs, self.part, self.whole, name)
        if any(map(self.slices.has, tensors_in((args, kwargs)))):
            self.refuse(f"{name!r} takes more of the residual stream than its hidden state")
        self.region = name
        self._inputs[moved] = True
        self._made[moved] = name
        return args, kwargs

    def leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Slice what regions return, and give the whole sequence to what follows the last norm."""
        if name in self.lasts:
            self.ended = True
            if self.joins and not self.cut:
                output = self._joined(name, output)
        if name in self.regions:
            output = self._sliced(name, output)
        elif name in self.after and not self.joins:
            output = self._normed(name, output)
        if any(parameter.ndim > 1 for parameter in module.parameters(recurse=False)):
            for tensor in tensors_in(output):
                self._inputs.pop(tensor, None)
                self._products[tensor] = True
        return output

    def resized(self, hidden: torch.Tensor, before: int, after: int, name: str) -> torch.Tensor:
        if hidden.ndim < 2 or hidden.shape[SEQUENCE] != before:
            raise ValueError(f"{name!r} has a hidden state of shape {tuple(hidden.shape)} where the sequence should be sliced")
        return torch.empty((hidden.shape[0], after, *hidden.shape[2:]), dtype=hidden.dtype, device="meta")

    def moved(self, module: nn.Module, args: Any, kwargs: Any, before: int, after: int, name: str) -> Any:
        """Return the arguments of a module, with another length of its hidden state wherever that is given, and it."""
        argument = hidden_argument(module)
        moved = self.resized(value_of(argument, args, kwargs, name), before, after, name)
        return *with_argument(argument, args, kwargs, lambda _: moved, name), moved

    def _take_tokens(self, name: str, args: Any, kwargs: Any) -> None:
        """Note a mixture that takes tokens of the stream, with what its router made of the same tokens."""
        given = tensors_in((args, kwargs))
        if any(tensor.ndim != 2 or tensor.shape[0] != self.part for tensor in given):  # the trace has one row
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in given)
            raise ValueError(f"{name!r} takes {shapes}, and not [tokens, ...] of a slice")
        self.on_stream[name] = None

    def _joined(self, name: str, output: Any) -> Any:
        hidden = first_of(output)
        return with_first(output, self.resized(hidden, self.part, self.whole, name))

    def _sliced(self, name: str, output: Any) -> Any:
        hidden = first_of(output)
        if self._parameters.among(tensors_in(output)):
            self.refuse(f"{name!r} returns a parameter, whose gradient would be that of a slice")
        if hidden in self._inputs:
            self.with_residual[name] = None
        self.region = ""
        if hidden.ndim == 2 and hidden.shape[0] == self.whole:  # it got rows, and returns them as one dimension
            self.flat[name] = None
            return with_first(output, torch.empty((self.part, *hidden.shape[1:]), dtype=hidden.dtype, device="meta"))
        return with_first(output, self.resized(hidden, self.whole, self.part, name))

    def _normed(self, name: str, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or output.ndim < 2:
            return output
        if output.shape[SEQUENCE] == self.whole:
            self._on_whole.add(name)
        elif output.shape[SEQUENCE] == self.part:
            self.ran[self.running][name] = None
        if name in self._on_whole and any(name in ran for ran in self.ran):
            self.refuse(f"{name!r} runs on slices of the sequence and on all of it")
        if output.shape[SEQUENCE] != self.part:
            return output
        return output if self.cut else self.resized(output, self.part, self.whole, name)

    # -- operators ---------------------------------------------------------------------------------------------------------

    def attention(self, call: Attention) -> None:
        """The output of an attention depends on all that it reads."""
        self._products[call.output] = True
        if self.region:
            self._made[call.output] = self.region

    def operator(self, operator: Operator) -> None:
        """Follow what regions compute, and look for what mixes tokens between them."""
        if self.region:
            inputs, products = (bool(labels.among(operator.on_meta)) for labels in (self._inputs, self._products))
            if inputs:
                self._inputs.put(operator.results)
            if products:
                self._products.put(operator.results)
            if inputs and products:
                self.with_residual[self.region] = None
            if self._made.among(operator.on_meta):
                self._made.put(operator.results, self.region)
        elif made := self._made.among(operator.on_meta):
            self.refuse(f"what {made[0]!r} made of the whole sequence is used outside of it")
        elif self.slices.mixed(operator):
            self.refuse(f"between attention and MLP, an operator mixes the tokens of a slice ({operator.function})")

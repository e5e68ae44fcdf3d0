"""Whether the stream of a model can be sliced where an attention or MLP is no module with one input: read from a forward.

Where a pair of matrices (:mod:`~meshwright.models.reading.tensor.pairs`) is not all of a module, its *span* goes from the
modules that take the hidden state for the first matrices to the second matrix. It may begin inside of a module and end inside
of another, as in BERT, whose residual and norm are in the module of the second matrix; or its matrices may be in the layer
itself, as in OPT. The forward is called as sequence parallel would call it: the whole sequence enters a span, and a slice
leaves its second matrix. What else a layer has works on slices, and each of its parameters gets the gradient of a slice.
"""

from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.models.reading.tensor.stream import StreamTracer
from meshwright.models.reading.token_dimension import TokenDimension
from meshwright.models.reading.tracing import Attention, Inputs, Labels, Operator, tensors_in
from meshwright.plan.given.names import generalize, holder_of, inside, within
from meshwright.plan.given.sliceable_pairs import Pair
from meshwright.plan.given.traces import RegionFacts, Span

__all__ = ["SpanTracer", "Way", "is_apart", "ways"]

MOST = 16
"""Ways that are tried at most: the first is right for most models."""


class Way(NamedTuple):
    """Where the sequence may be whole.

    Attributes:
        regions: modules that get it as they are.
        spans: what gets it besides.
    """

    regions: tuple[str, ...]
    spans: tuple[Span, ...]


def ways(model: nn.Module, layers: Sequence[str], pairs: Sequence[Pair], experts: Sequence[str]) -> Iterator[Way]:
    """Yield where the sequence may be whole, the likeliest first.

    A span of a pair may begin at several modules. A module of a layer that holds matrices and no pair may be a region, may be a
    span up to its last matrix, or may process each token alone.

    Args:
        model: the model.
        layers: names of the layers that run.
        pairs: what can be sliced in them.
        experts: names of mixtures. What is around one, in a layer, is a region.
    """
    choices: dict[tuple[str, ...], list[list[str | Span | None]]] = {}
    mixing: list[str] = []
    for layer in layers:
        for name in _parts(model, layer):
            if any(within(mixture, [name]) for mixture in experts):
                mixing.append(name)
            elif not any(within(matrix, [name]) for pair in pairs for matrix in (*pair.firsts, pair.second)):
                matrices = [own for own, module in model.get_submodule(name).named_modules() if isinstance(module, nn.Linear)]
                spans = [Span((name,), f"{name}.{matrices[-1]}")] if len(matrices) > 1 else []
                choices.setdefault((generalize(name),), []).append([name, *spans, None])
    for pair in pairs:
        if within(pair.second, layers) and not within(pair.second, mixing):
            begins = [Span(entries, pair.second) for entries in _beginnings(model, layers, pair)]
            choices.setdefault(tuple(map(generalize, (*pair.firsts, pair.second))), []).append([*begins])
    counts = [min(map(len, alike)) for alike in choices.values()]
    for chosen in islice(product(*map(range, counts)), MOST):
        found = [one[index] for index, alike in zip(chosen, choices.values(), strict=True) for one in alike]
        regions = (*mixing, *(name for name in found if isinstance(name, str)))
        yield Way(regions, tuple(span for span in found if isinstance(span, Span)))


def is_apart(facts: RegionFacts, pairs: Sequence[Pair]) -> bool:
    """Return whether spans have no parameters but those of their pairs: otherwise ranks could not share what they compute."""
    own = {holder_of(name) for pair in pairs for name in pair.beside} | {
        name for pair in pairs for name in (*pair.firsts, pair.second)
    }
    paired = {pair.second for pair in pairs}
    return all(holder_of(name) in own for span in facts.spans if span.exit in paired for name in span.parameters)


def _parts(model: nn.Module, layer: str) -> Iterator[str]:
    """Yield the modules of a layer that have children and hold matrices; those in lists one by one."""
    for own, child in model.get_submodule(layer).named_children():
        name = f"{layer}.{own}"
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _parts(model, name)
        elif any(True for _ in child.children()) and any(parameter.ndim > 1 for parameter in child.parameters()):
            yield name


def _beginnings(model: nn.Module, layers: Sequence[str], pair: Pair) -> list[tuple[str, ...]]:
    """Return the modules that may take the whole sequence: one around all first matrices, or these themselves."""
    layer = next(name for name in layers if inside(pair.second, name))
    parts = [holder_of(name).split(".") for name in pair.firsts]
    shared = []
    for items in zip(*parts, strict=False):
        if len(set(items)) > 1:
            break
        shared.append(items[0])
    holder, around = ".".join(shared), []
    while inside(holder, layer):
        if not isinstance(model.get_submodule(holder), nn.ModuleList | nn.ModuleDict):
            around.append((holder,))
        holder = holder_of(holder)
    return [*around[:1], pair.firsts, *around[1:]]


class SpanTracer(StreamTracer):
    """Gives spans the whole sequence, and slices what their second matrices return.

    Args:
        model: the model.
        stacks: see :class:`~meshwright.models.reading.tensor.stream.StreamTracer`.
        way: the modules that need the whole sequence as they are, and the spans.
        inputs: what it is called with.
        joins: so too.
        cut: so too.
    """

    def __init__(
        self,
        model: nn.Module,
        stacks: Sequence[Sequence[str]],
        way: Way,
        inputs: Inputs,
        *,
        joins: bool = False,
        cut: bool = False,
    ) -> None:
        super().__init__(model, stacks, way.regions, inputs, joins=joins, cut=cut)
        self.spans = way.spans
        self.begins = {name: index for index, span in enumerate(self.spans) for name in span.entries}
        self.ends = {span.exit: index for index, span in enumerate(self.spans)}
        self.whole_of, self.named, self.handed = Labels(), Labels(), Labels()
        self.frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        for name, _ in model.named_parameters():
            self.named[inputs.tensors[name]] = frozenset([name])
        self.tokens = TokenDimension(self.whole)
        self.flat_spans: set[int] = set()
        self.on_slices: dict[str, None] = {}
        self.in_spans: list[dict[str, None]] = [{} for _ in self.spans]
        self.inner: list[dict[str, None]] = [{} for _ in self.spans]
        self.left: set[int] = set()

    def facts(self) -> RegionFacts:
        """Return what was read; a problem if a parameter is used on slices and on whole sequences."""
        for index, span in enumerate(self.spans):
            if index not in self.left:
                self.problems.add("sp.stream", f"{span.exit!r} does not run after {', '.join(map(repr, span.entries))}")
            for name in self.in_spans[index]:
                if name in self.on_slices:
                    self.problems.add("sp.stream", f"parameter {name!r} is used on slices of the sequence and on all of it")
        found = super().facts()
        spans = tuple(
            Span(span.entries, span.exit, tuple(self.in_spans[index]), tuple(self.inner[index]), index in self.flat_spans)
            for index, span in enumerate(self.spans)
        )
        sliced = tuple(name for name in self.on_slices if within(name, self.layers))
        return RegionFacts(**{**vars(found), "spans": spans, "on_slices": sliced})

    # -- modules -----------------------------------------------------------------------------------------------------------

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Give the whole sequence to what begins a span."""
        for index in {index for some in self.whole_of.among(tensors_in((args, kwargs))) for index in some}:
            self.inner[index][name] = None
        if name in self.begins:
            args, kwargs, moved = self.moved(module, args, kwargs, self.part, self.whole, name)
            self.whole_of[moved] = frozenset([self.begins[name]])
            if moved.ndim == 2:
                self.flat_spans.add(self.begins[name])
            return args, kwargs
        return super().enter(name, module, args, kwargs)

    def leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Slice what ends a span."""
        for names in self.named.among(tensors_in(output)):  # such as a bias that is added later
            for tensor in tensors_in(output):
                if self.named.get(tensor) == names and all(holder_of(own) == name for own in names):
                    self.handed[tensor] = True
        if name in self.ends:
            index = self.ends[name]
            if self.whole_of.get(output) != frozenset([index]):
                raise ValueError(
                    f"{name!r} does not get what {', '.join(map(repr, self.spans[index].entries))} made of the sequence"
                )
            if (output.ndim == 2) != (index in self.flat_spans):
                raise ValueError(f"{name!r} returns the tokens of all rows as one sequence, and does not get them so")
            self.left.add(index)
            return self.resized(output, self.whole, self.part, name)
        return super().leave(name, module, args, kwargs, output)

    def resized(self, hidden: torch.Tensor, before: int, after: int, name: str) -> torch.Tensor:
        """Return a tensor of another length. The rows of a batch may be one sequence, where each token is processed alone."""
        if hidden.ndim == 2 and hidden.shape[0] == before and (name in self.begins or name in self.ends):
            return torch.empty((after, hidden.shape[1]), dtype=hidden.dtype, device="meta")
        return super().resized(hidden, before, after, name)

    # -- operators ---------------------------------------------------------------------------------------------------------

    def attention(self, call: Attention) -> None:
        """An attention in no region is in a span."""
        super().attention(call)
        if self.region:
            return
        spans = self.whole_of.among((call.query, call.key, call.value))
        if len(spans) < 3:
            self.refuse(f"the attention of {call.module!r} gets a slice of the sequence")
        self.whole_of[call.output] = frozenset().union(*spans)

    def operator(self, operator: Operator) -> None:
        """Follow what spans compute, and which parameters are used on what."""
        super().operator(operator)
        if self.region:
            return
        tensors, results = operator.on_meta, operator.results
        spans = frozenset().union(*self.whole_of.among(tensors))
        sliced = any(map(self.slices.has, (*tensors, *results)))
        if spans:
            self.whole_of.put(results, spans)
            if sliced or len(spans) > 1 or self.ended:
                with_what = "slices of it" if sliced else "that of another" if len(spans) > 1 else "what follows the layers"
                self.refuse(f"the whole sequence of {self.spans[min(spans)].exit!r} meets {with_what}")
        names = frozenset().union(*self.named.among(tensors))
        if names and not spans and not sliced:
            self.named.put(results, names)
        for index in spans:
            self.in_spans[index] |= dict.fromkeys(name for name in names if within(name, self.layers))
            for name in names:
                if not within(name, self.layers) and name not in self.frozen:
                    self.refuse(f"parameter {name!r} is used before {self.spans[index].exit!r}, and is in no layer")
            if index in self.flat_spans and self.tokens.mixed(operator):
                self.refuse(f"an operator mixes the tokens of all rows before {self.spans[index].exit!r} ({operator.function})")
        if sliced:
            self._use_on_slices(operator, tensors, names)

    def _use_on_slices(self, operator: Operator, tensors: Sequence[torch.Tensor], names: frozenset[str]) -> None:
        """Note the parameters that an operator uses on a slice. Their module must be running, or have handed them out."""
        handed = frozenset().union(
            *(self.named[tensor] for tensor in tensors if tensor in self.named and tensor in self.handed)
        )
        for name in names:
            in_layers = within(name, self.layers)
            outside = name not in handed and not within(operator.module, [holder_of(name)])
            if outside or not (in_layers or self.cut or (self.ended and holder_of(name) in self.after)):
                self.refuse(f"parameter {name!r} is used on a slice, in {operator.module!r}")
            self.on_slices[name] = None

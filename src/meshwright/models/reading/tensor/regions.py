"""Whether the residual stream of a model can be sliced over the sequence: read from one forward without values.

The forward is called as sequence parallel calls it: the first layer takes a slice of the sequence, attention and MLP of each
layer take all of it, and the norm after the layers gives all of it to the head. The length of a slice and that of the whole are
two primes. So what adds the two, or mixes the tokens of a slice, shows by its shapes. Redistributions are new tensors of the
right shape.

What is tried, in this order: modules of layers that take the whole sequence; the same, where the last layer and not the norm
gives it to what follows; and spans between matrices (:mod:`~meshwright.models.reading.tensor.spans`). Routers and mixtures that
a layer calls itself work on tokens of a slice.

A model may have several stacks of layers, and run each several times. Either the stream is sliced through all of them, or it is
whole between them.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import nn

from meshwright.errors import Refusal
from meshwright.models.reading.tensor.spans import SpanTracer, is_apart, ways
from meshwright.models.reading.tensor.stream import StreamTracer
from meshwright.models.reading.tracing import Inputs, Tracer, traced
from meshwright.plan.given.names import holder_of, match_names
from meshwright.plan.given.sliceable_pairs import Pairs
from meshwright.plan.given.spec import ExpertsRule
from meshwright.plan.given.traces import RegionFacts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["trace_regions"]


def trace_regions(
    model: "PreTrainedModel",
    layers: Sequence[str],
    experts: Sequence[ExpertsRule] = (),
    pairs: Callable[[], Pairs] = Pairs,
) -> RegionFacts:
    """Return which modules of a model need the whole sequence, or why the stream cannot be shared.

    Args:
        model: a causal language model, on any device; it is called with tensors on the meta device, and not changed.
        layers: names of its layers.
        experts: its mixtures. They are not called, because what they do depends on values.
        pairs: returns what can be sliced in the layers. It is asked if the modules of layers do not tell.
    """
    order, why = traced(model, experts, partial(_Order, layers))
    ran = [] if order is None else order.found
    possible = _stacks(ran)
    if not possible:
        why = why or (f"layer {ran[0]!r} runs twice" if ran else "no layer runs")
        return RegionFacts(problem=Refusal("sp.stream", f"its stream cannot be sliced ({why})"))
    refused: dict[bool, RegionFacts] = {}  # whether the forward ran to its end, which tells more
    shown: RegionFacts | None = None
    for make in chain.from_iterable(_attempts(model, stacks, experts, pairs) for stacks in possible):
        for joins in (False, True):
            found, why = traced(model, experts, partial(make, joins=joins))
            facts = None if found is None else found.facts()
            if facts is not None and not facts.problem:
                # What gives the whole sequence is not on a stage before the last, and what follows gets a slice there.
                cut, why = traced(model, experts, partial(make, joins=joins, cut=True))
                problem = "" if cut is not None else Refusal("sp.stream", f"a slice cannot leave a stage ({why})")
                if len(facts.stretches) > 1:
                    problem = Refusal(
                        "sp.stacks",
                        "it has several stacks of layers, and what is a slice between stages is not traced for each",
                    )
                facts = replace(facts, problem_in_stages=problem)
                if not facts.spans or is_apart(facts, pairs().found):
                    return facts
                shown = shown or facts
                break
            problem = facts.problem if facts else Refusal("sp.stream", f"its stream cannot be sliced ({why})")
            refused.setdefault(facts is not None, RegionFacts(problem=problem))
    none = f"layer {ran[0]!r} has no attention and MLP that are modules of their own, and no pair of matrices"
    return shown or refused.get(True) or refused.get(False) or RegionFacts(problem=Refusal("sp.regions", none))


def _stacks(found: Sequence[str]) -> list[list[list[str]]]:
    """Return the stacks that layers may be, given the order in which they run: all of them one stack, or each list its own."""
    runs: list[list[str]] = []
    for name in found:
        if not runs or holder_of(runs[-1][-1]) != holder_of(name) or name in runs[-1]:
            runs.append([])
        runs[-1].append(name)
    stacks = list(map(list, dict.fromkeys(map(tuple, runs))))
    possible = [[[*found]]] if found and len(set(found)) == len(found) else []
    if len(set(chain.from_iterable(stacks))) == sum(map(len, stacks)) and stacks and [stacks] != possible:
        possible.append(stacks)
    return possible


def _attempts(
    model: "PreTrainedModel",
    stacks: Sequence[Sequence[str]],
    experts: Sequence[ExpertsRule],
    pairs: Callable[[], Pairs],
) -> Iterator[Callable[..., Any]]:
    """Yield what makes a tracer, given its inputs."""
    layers, modules = list(chain.from_iterable(stacks)), dict(model.named_modules())
    mixtures = [name for rule in experts for name in match_names(rule.pattern, modules)]
    routers = [name for rule in experts if rule.router for name in match_names(rule.router, modules)]
    if regions := _regions_of(model, layers, {*mixtures, *routers}):
        yield partial(StreamTracer, model, stacks, regions, mixtures=mixtures)
    for way in ways(model, layers, pairs().found, mixtures):
        yield partial(SpanTracer, model, stacks, way)


def _regions_of(model: nn.Module, layers: Sequence[str], on_stream: Collection[str]) -> list[str]:
    """Return the modules of layers that have children and hold matrices; none if a layer itself holds one.

    Args:
        model: the model.
        layers: names of its layers.
        on_stream: routers and mixtures, which are no regions themselves.
    """
    regions = []
    for layer in layers:
        for own, child in model.get_submodule(layer).named_children():
            matrices = f"{layer}.{own}" not in on_stream and any(parameter.ndim > 1 for parameter in child.parameters())
            if matrices and (not any(True for _ in child.children()) or isinstance(child, nn.ModuleList | nn.ModuleDict)):
                return []
            regions += [f"{layer}.{own}"] if matrices else []
    return regions


class _Order(Tracer):
    """Notes the layers that run, in this order."""

    def __init__(self, layers: Sequence[str], inputs: Inputs) -> None:
        super().__init__(inputs)
        self.layers, self.found = {*layers}, list[str]()

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if name in self.layers:
            self.found.append(name)

"""Whether the residual stream of a model can be sliced over the sequence: read from one forward without values.

The forward is called as sequence parallel calls it: the first layer takes a slice of the sequence, attention and MLP of each
layer take all of it, and the norm after the layers gives all of it to the head. The length of a slice and that of the whole are
two primes. So what adds the two, or mixes the tokens of a slice, shows by its shapes. Redistributions are new tensors of the
right shape.

What is tried, in this order: modules of layers that take the whole sequence; the same, where the last layer and not the norm
gives it to what follows; and spans between matrices (:mod:`~meshwright.models.reading.tensor.spans`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from meshwright.errors import Refusal
from meshwright.models.reading.tensor.spans import SpanTracer, is_apart, ways
from meshwright.models.reading.tensor.stream import StreamTracer
from meshwright.models.reading.tracing import Inputs, Tracer, traced
from meshwright.plan.given.names import match_names
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
    running = [] if order is None else list(dict.fromkeys(order.found))
    if order is None or len(running) < len(order.found) or not running:
        why = why or (f"layer {order.found[0]!r} runs twice" if order and order.found else "no layer runs")
        return RegionFacts(problem=Refusal("sp.stream", f"its stream cannot be sliced ({why})"))
    refused: dict[bool, RegionFacts] = {}  # whether the forward ran to its end, which tells more
    shown: RegionFacts | None = None
    for make in _attempts(model, running, experts, pairs):
        for joins in (False, True):
            found, why = traced(model, experts, partial(make, joins=joins))
            facts = None if found is None else found.facts()
            if facts is not None and not facts.problem:
                # What gives the whole sequence is not on a stage before the last, and what follows gets a slice there.
                cut, why = traced(model, experts, partial(make, joins=joins, cut=True))
                problem = "" if cut is not None else Refusal("sp.stream", f"a slice cannot leave a stage ({why})")
                facts = replace(facts, problem_in_stages=problem)
                if not facts.spans or is_apart(facts, pairs().found):
                    return facts
                shown = shown or facts
                break
            problem = facts.problem if facts else Refusal("sp.stream", f"its stream cannot be sliced ({why})")
            refused.setdefault(facts is not None, RegionFacts(problem=problem))
    none = f"layer {running[0]!r} has no attention and MLP that are modules of their own, and no pair of matrices"
    return shown or refused.get(True) or refused.get(False) or RegionFacts(problem=Refusal("sp.regions", none))


def _attempts(
    model: "PreTrainedModel", layers: Sequence[str], experts: Sequence[ExpertsRule], pairs: Callable[[], Pairs]
) -> Iterator[Callable[..., Any]]:
    """Yield what makes a tracer, given its inputs."""
    if regions := _regions_of(model, layers):
        yield partial(StreamTracer, model, layers, regions)
    modules = dict(model.named_modules())
    mixtures = [name for rule in experts for name in match_names(rule.pattern, modules)]
    for way in ways(model, layers, pairs().found, mixtures):
        yield partial(SpanTracer, model, layers, way)


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


class _Order(Tracer):
    """Notes the layers that run, in this order."""

    def __init__(self, layers: Sequence[str], inputs: Inputs) -> None:
        super().__init__(inputs)
        self.layers, self.found = {*layers}, list[str]()

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if name in self.layers:
            self.found.append(name)

"""What mixes the tokens of a model: its attentions, by the way in which ranks that share sequences can compute them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.errors import coded
from meshwright.models.reading.context.attention_calls import trace_uncached
from meshwright.models.reading.context.cached_calls import trace_cached
from meshwright.models.reading.repeated_layers import RepeatedLayers
from meshwright.plan.given.attentions import Attentions
from meshwright.plan.given.spec import ExpertsRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["attentions_of_all", "trace_attentions"]


def trace_attentions(model: "PreTrainedModel", experts: Sequence[ExpertsRule] = ()) -> Attentions:
    """Return the attentions of a model, and what else of it mixes tokens.

    Attentions that call the function of transformers are replaced. If that cannot be, each computes as it is written, with keys
    and values that come through its cache.

    Args:
        model: a causal language model, on any device; it is called with tensors on the meta device, and not changed.
        experts: its mixtures. They are not called, because what they do depends on values.
    """
    found = trace_uncached(model, experts)
    if not (found.problems or found.states or any(facts.problem for facts in found.rows)):
        return found
    cached = trace_cached(model, experts)
    if isinstance(cached, Attentions):
        return cached
    problems = [coded(problem, "cp.attention").within("", f"; through its cache: {cached}") for problem in found.problems]
    states = [
        (name, problem.within("", f" (through its cache: {cached})") if problem.code == "cp.mixes_tokens" else problem)
        for name, problem in ((name, coded(problem, "cp.state")) for name, problem in found.states)
    ]
    return replace(found, problems=tuple(problems), states=tuple(states))


def attentions_of_all(found: Attentions, repeated: RepeatedLayers) -> Attentions | None:
    """Return the attentions of all layers from those of the layers that ran; ``None``: what was found may differ in others."""
    if found.problems or found.states or found.counted or any(facts.problem for facts in found.rows):
        return None
    rows = repeated.spread(found.rows)
    return None if rows is None else replace(found, rows=rows)

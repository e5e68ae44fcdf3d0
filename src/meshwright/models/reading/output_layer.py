"""Which module of a language model gives its logits, and whether they can be computed in chunks: read from one forward."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshwright.distributed.memory.chunked_loss import DeferredLogits, deferring
from meshwright.errors import UnsupportedError
from meshwright.models import _transformers_compat as compat
from meshwright.models.reading.tracing import (
    Inputs,
    Tracer,
    first_that_runs,
    forward,
    meta_positions,
    meta_tensors,
    prime_length,
)
from meshwright.plan.given.spec import ExpertsRule
from meshwright.plan.given.traces import HeadFacts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["trace_head"]


def trace_head(model: "PreTrainedModel", experts: Sequence[ExpertsRule] = ()) -> HeadFacts:
    """Return the output head of a model, and why its logits cannot be computed in chunks, if they cannot.

    Args:
        model: a causal language model, on any device; it is called with tensors on the meta device, and not changed.
        experts: its mixtures. They are not called, because what they do depends on values.
    """
    _, head = compat.embedding_and_head(model)
    names = {id(module): name for name, module in model.named_modules()}
    weight = getattr(head, "weight", None)
    if head is None or weight is None or id(head) not in names:
        return HeadFacts(problem="its output head is unknown")
    name, words, tensors = names[id(head)], weight.shape[0], meta_tensors(model)
    for own, parameter in model.named_parameters():  # a learned scale of logits would lose its gradient
        tensors[own].requires_grad_(parameter.requires_grad)

    def called(device: str | None) -> Any:
        with deferring(head, words):
            try:
                return forward(model, experts, Tracer(Inputs(tensors, meta_positions(prime_length(model)), device)))
            except UnsupportedError as error:
                return error

    found, why = first_that_runs(called)
    if found is None:
        return HeadFacts(name, words, f"its forward cannot be traced without values ({why})")
    if isinstance(found, UnsupportedError):
        return HeadFacts(name, words, str(found).partition(": ")[2].partition(";")[0])
    whole = isinstance(getattr(found, "logits", None), DeferredLogits)
    return HeadFacts(name, words, "" if whole else f"what it returns is not the output of {name!r}")

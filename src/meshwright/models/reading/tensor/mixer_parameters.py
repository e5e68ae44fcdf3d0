"""Parameters of mixers that all heads use, such as the norm of each head: a rank has a part of their gradients.

How heads divide is known (:mod:`meshwright.models.reading.context.mixer_heads`): of some parameters a rank uses a part. Whether
the others are used between the first matrices and the last one, or before the first, or nowhere, follows from derivatives too.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from meshwright.models.reading.context.mixer_calls import MixerCalls, linear_layers
from meshwright.models.reading.context.mixers_of_model import DRAWS, CallTracer
from meshwright.models.reading.tracing import traced
from meshwright.plan.given.sequence.mixer_shares import MixerShare
from meshwright.plan.given.spec import ExpertsRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["trace_mixer_parameters"]


def trace_mixer_parameters(
    model: "PreTrainedModel", experts: Sequence[ExpertsRule], shares: Mapping[str, MixerShare]
) -> Mapping[str, tuple[str, ...]]:
    """Return the parameters of mixers that all heads use, by name of the mixer.

    A mixer of which that is unknown, or that also uses one before its first matrices, is left out.

    Args:
        model: a causal language model, on any device. It is not changed.
        experts: its mixtures, which are not called.
        shares: how heads of the mixers divide. Those with a problem are left out.
    """
    wanted = [name for name, share in shares.items() if not share.problem and not share.after]
    tracer, _ = traced(model, experts, partial(CallTracer, wanted), (None, "cpu", "meta")) if wanted else (None, "")
    found: dict[str, tuple[str, ...]] = {}
    known: dict[str, tuple[str, ...] | None] = {}
    for name in wanted if tracer is not None else ():
        module = model.get_submodule(name)
        kind = repr((type(module), [(own, tuple(item.shape)) for own, item in module.named_parameters()], shares[name]))
        kind = kind.replace(repr(name), "")
        if kind not in known and tracer is not None and name in tracer.calls:
            known[kind] = _used_by_all(model, shares[name], tracer.calls[name][0])
        if (own := known.get(kind)) is not None:
            found[name] = own
    return found


def _used_by_all(model: "PreTrainedModel", share: MixerShare, call: tuple[Any, Any]) -> tuple[str, ...] | None:
    module = model.get_submodule(share.module)
    for dtype in (torch.float64, torch.float32):
        try:
            draws = [MixerCalls(module, share.module, share.hidden, *call, lowest, dtype) for lowest in DRAWS]
            return _differentiated(draws, share)
        except Exception:  # whatever a module does with random values
            continue
    return None


def _differentiated(draws: Sequence[MixerCalls], share: MixerShare) -> tuple[str, ...] | None:
    """Return the parameters between, of which no rank has a part; ``None``: one is used before, too, or its use is unknown."""
    before, between = (set[str]().union(*found) for found in zip(*(_used(calls, share) for calls in draws), strict=True))
    parted = {own for own, _, _ in share.slices}
    parameters = {name for name, _ in draws[0].mixer.named_parameters()} & draws[0].between().keys()
    shared = (between & parameters) - parted
    unknown = parameters - parted - before - between
    return None if unknown or shared & before or parted & before else tuple(sorted(shared))


def _used(calls: MixerCalls, share: MixerShare) -> tuple[set[str], set[str]]:
    """Return what the first matrices depend on in a draw, and what later ones do."""
    parted = {own for own, _, _ in share.slices}
    summed = {own for own, _ in share.summed}
    for name in linear_layers(calls.mixer):
        if f"{name}.weight" in parted and name not in summed:  # its matrix is read by the mixer's own code
            calls = calls.without(name)
    given = {own: calls.random(*calls.given().shape[:-1], calls.linear[own][1]) for own in (*dict(share.openings), *summed)}
    before: list[torch.Tensor] = []
    between: list[torch.Tensor] = []

    def linear(name: str, arguments: list[torch.Tensor]) -> torch.Tensor:
        if name == share.closing or name in summed:
            between.extend(arguments)
        else:
            before.extend(arguments)
        width = calls.linear[name][1] if name in calls.linear else arguments[0].shape[-1]
        return given[name] if name in given else calls.random(*arguments[0].shape[:-1], width)

    tensors = {name: own.requires_grad_() for name, own in calls.between().items()}
    calls.run(linear, tensors, also=share.closing)
    return _names_with_gradient(calls, tensors, before), _names_with_gradient(calls, tensors, between)


def _names_with_gradient(calls: MixerCalls, tensors: dict[str, torch.Tensor], entered: list[torch.Tensor]) -> set[str]:
    sums = [(own * calls.random(*own.shape).to(own.dtype)).sum() for own in entered if own.requires_grad]
    if not sums:
        return set()
    gradients = torch.autograd.grad(
        torch.stack([own.double() for own in sums]).sum(), list(tensors.values()), retain_graph=True, allow_unused=True
    )
    return {name for name, own in zip(tensors, gradients, strict=True) if own is not None and bool((own != 0).any())}

"""The mixers of a model, and how their heads divide over ranks: one is looked at of each kind."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright.models.reading.context.mixer_calls import MixerCalls
from meshwright.models.reading.context.mixer_heads import divide
from meshwright.models.reading.tracing import Inputs, Tracer, traced
from meshwright.plan.given.context.mixer_shares import MixerShare
from meshwright.plan.given.hidden_argument import hidden_argument
from meshwright.plan.given.spec import ExpertsRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["trace_mixers"]

_DRAWS = (0.1, -0.5)
"""The smallest value of each draw: all positive, and of both signs."""
_DTYPES = (torch.float64, torch.float32)
_PLACE = ("layer_idx", "layer_id", "layer_index")
"""Attributes that say where a module is, and not what it computes with."""


class _CallTracer(Tracer):
    """Notes what some modules are called with."""

    def __init__(self, wanted: Sequence[str], inputs: Inputs) -> None:
        super().__init__(inputs)
        self.wanted = frozenset(wanted)
        self.calls: dict[str, list[tuple[Any, Any]]] = {}

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note a call."""
        if name in self.wanted:
            self.calls.setdefault(name, []).append((args, kwargs))


def trace_mixers(
    model: "PreTrainedModel", experts: Sequence[ExpertsRule], states: Sequence[tuple[str, str]], ranks: int
) -> Mapping[str, MixerShare]:
    """Return how the heads of each mixer divide over ranks, by name.

    Args:
        model: a causal language model, on any device. It is not changed.
        experts: its mixtures, which are not called.
        states: the mixers (:class:`~meshwright.plan.given.attentions.Attentions`).
        ranks: number of ranks, above 1.
    """
    names = [name for name, _ in states]
    tracer, why = traced(model, experts, partial(_CallTracer, names), (None, "cpu", "meta"))
    if tracer is None:
        return {name: MixerShare(name, problem=f"its forward cannot be traced without values ({why})") for name in names}
    shares: dict[str, MixerShare] = {}
    known: dict[str, MixerShare] = {}
    for name in names:
        module, calls = model.get_submodule(name), tracer.calls.get(name, [])
        if len(calls) != 1:
            shares[name] = MixerShare(name, problem=f"it runs {len(calls)} times in a forward")
            continue
        kind = _kind(module)
        if kind not in known:
            hidden = hidden_argument(module)
            for dtype in _DTYPES:
                draws = [MixerCalls(module, name, hidden, *calls[0], lowest, dtype) for lowest in _DRAWS]
                share = divide(draws, ranks)
                if kind not in known or not share.problem:
                    known[kind] = share
                if not share.problem:
                    break
        shares[name] = replace(known[kind], module=name)
    return shares


def _kind(module: nn.Module) -> str:
    """Return what decides how a module divides: its class, its numbers and names, and the shapes of what it holds."""
    named = (*module.named_parameters(), *module.named_buffers())
    parts = [
        (place, type(own), {key: value for key, value in vars(own).items() if type(value) in (int, str, bool, float)})
        for place, own in module.named_modules()
    ]
    numbers = [(place, own, {key: value for key, value in values.items() if key not in _PLACE}) for place, own, values in parts]
    return repr(([(name, tuple(tensor.shape)) for name, tensor in named], numbers))

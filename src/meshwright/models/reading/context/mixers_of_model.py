"""The mixers of a model, and how ranks share them: one is looked at of each kind.

What needs only a few tokens before a token gets these (:mod:`~meshwright.models.reading.context.tokens_before`). The heads of
another mixer are divided (:mod:`~meshwright.models.reading.context.mixer_heads`); in it modules without parameters, such as a
shift by one token, may get the tokens before.
"""

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright.models import _transformers_compat as compat
from meshwright.models.reading.context.mixer_calls import MixerCalls
from meshwright.models.reading.context.mixer_heads import divide
from meshwright.models.reading.context.tokens_before import tokens_before
from meshwright.models.reading.tracing import Inputs, Tracer, traced
from meshwright.plan.given.hidden_argument import hidden_argument
from meshwright.plan.given.names import holder_of
from meshwright.plan.given.sequence.mixer_shares import MixerShare
from meshwright.plan.given.spec import ExpertsRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["DRAWS", "CallTracer", "trace_mixers"]

DRAWS = (0.1, -0.5)
"""The smallest value of each draw: all positive, and of both signs."""
_DTYPES = (torch.float64, torch.float32)
_PLACE = ("layer_idx", "layer_id", "layer_index")
"""Attributes that say where a module is, and not what it computes with."""


class CallTracer(Tracer):
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
    movers = {name: _without_parameters(model.get_submodule(name), name) for name in names}
    wanted = [*names, *(mover for own in movers.values() for mover in own)]
    tracer, why = traced(model, experts, partial(CallTracer, wanted), (None, "cpu", "meta"))
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
            known[kind] = _share(model, name, movers[name], tracer, ranks)
        shares[name] = replace(known[kind], module=name)
    return shares


def _without_parameters(mixer: nn.Module, name: str) -> list[str]:
    """Return the names of the modules in a mixer that hold nothing, and may move tokens all the same."""
    return [
        f"{name}.{own}"
        for own, module in mixer.named_modules()
        if own and not any(True for _ in (*module.children(), *module.parameters(), *module.buffers()))
    ]


def _share(model: "PreTrainedModel", name: str, movers: Sequence[str], tracer: CallTracer, ranks: int) -> MixerShare:
    """Return how ranks share one mixer: each has the tokens before its own, or some heads for all tokens."""
    module = model.get_submodule(name)
    before, width = _before(model, name, tracer)
    hidden = hidden_argument(module)
    if before:
        return MixerShare(name, hidden, before=before, width=width)
    shifts = {mover: _before(model, mover, tracer) for mover in movers}
    shifted = tuple(
        (mover[len(name) + 1 :], *found, hidden_argument(model.get_submodule(mover)))
        for mover, found in shifts.items()
        if found[0]
    )
    inner = tuple(own for own, *_ in shifted)

    def divided(dtype: torch.dtype, buffers: Mapping[str, torch.Tensor]) -> MixerShare:
        call, positions = tracer.calls[name][0], tracer.inputs.positions
        draws = [MixerCalls(module, name, hidden, *call, lowest, dtype, positions, inner, buffers) for lowest in DRAWS]
        return replace(divide(draws, ranks), shifts=shifted)

    problems = []
    for dtype in _DTYPES:
        share = divided(dtype, {})
        if not share.problem:
            return share
        problems.append(share)
    if buffers := _initial_buffers(model, name):  # with other values, more may depend on more than it does
        share = divided(_DTYPES[0], buffers)
        if not share.problem:
            return share
    return problems[0]


def _before(model: "PreTrainedModel", name: str, tracer: CallTracer) -> tuple[int, int]:
    """Return how many tokens before a token a module needs, and the features of each; 0: none, or more than a few."""
    module, calls = model.get_submodule(name), tracer.calls.get(name, [])
    if len(calls) != 1:
        return 0, 0
    hidden = hidden_argument(module)
    try:
        draws = [MixerCalls(module, name, hidden, *calls[0], lowest, positions=tracer.inputs.positions) for lowest in DRAWS]
    except Exception:  # it gets no hidden state
        return 0, 0
    return tokens_before(draws) or 0, draws[0].given().shape[-1]


def _initial_buffers(model: "PreTrainedModel", name: str) -> dict[str, torch.Tensor]:
    """Return the buffers of a module with the values that the family gives them, of those that it gives any."""
    try:
        module = copy.deepcopy(model.get_submodule(name)).to("meta")
    except RuntimeError:  # it keeps a tensor of its last call, which cannot be copied
        return {}
    with torch.no_grad():
        for own in module.modules():
            for key, buffer in own.named_buffers(recurse=False):
                value = torch.full(buffer.shape, float("nan")) if buffer.is_floating_point() else buffer
                own.register_buffer(key, value, key not in own._non_persistent_buffers_set)
        for own in module.modules():
            if any(True for _ in own.named_buffers(recurse=False)):
                with suppress(Exception):  # what it needs may be elsewhere
                    compat.initialize_module(_owner(model, name), own)
    return {key: value for key, value in module.named_buffers() if not value.is_meta and not bool(value.isnan().any())}


def _owner(model: "PreTrainedModel", name: str) -> "PreTrainedModel":
    """Return the innermost model of transformers around a module, whose rules initialize it."""
    while name and not hasattr(model.get_submodule(name), "_init_weights"):
        name = holder_of(name)
    owner: Any = model.get_submodule(name)
    return owner


def _kind(module: nn.Module) -> str:
    """Return what decides how a module divides: its class, its numbers and names, and the shapes of what it holds."""
    named = (*module.named_parameters(), *module.named_buffers())
    parts = [
        (place, type(own), {key: value for key, value in vars(own).items() if type(value) in (int, str, bool, float)})
        for place, own in module.named_modules()
    ]
    numbers = [(place, own, {key: value for key, value in values.items() if key not in _PLACE}) for place, own, values in parts]
    return repr(([(name, tuple(tensor.shape)) for name, tensor in named], numbers))

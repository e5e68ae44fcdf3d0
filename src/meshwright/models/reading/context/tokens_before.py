"""How many tokens before a token a module needs: found by the derivatives of its own code, and tried.

A short convolution, or a shift by one token, mixes tokens, but no state goes through the whole sequence. A rank that gets the
few tokens before its own computes them as one process does. Derivatives by the hidden state show how many those are: one that
is zero for random values is zero. Then it is tried: what the module puts out for the tokens after a cut, from these and the few
before, must be what it puts out for them among all.
"""

from collections.abc import Sequence
from typing import Any

import torch

from meshwright.models.reading.context.mixer_calls import MixerCalls
from meshwright.models.reading.context.mixer_roles import Recorder
from meshwright.models.reading.tracing import tensors_in

__all__ = ["tokens_before"]

MOST_BEFORE = 16
"""The largest number of tokens before that is a few: fewer than a call has, so that more would show."""
_CLOSE = 1e-5
"""The largest relative difference between what is put out for some tokens and among all. Parts may compute in float32."""


def tokens_before(draws: Sequence[MixerCalls]) -> int | None:
    """Return how many tokens before a token a module needs; ``None``: many, later ones, or something beside its hidden state.

    Args:
        draws: the module with several draws of values in float64. What is zero for one of them may not be so for another.
    """
    used: dict[str, torch.Tensor] = {}
    try:
        found = [_needed(calls, used) for calls in draws]
        before = max(-1 if one is None else one for one in found)
        # A weight that nothing depends on may be one of a token that lies further back than a call has tokens.
        if None in found or before > MOST_BEFORE or not all(bool(own.all()) for own in used.values()):
            return None
        return before if all(_computes_alone(calls, before) for calls in draws) else None
    except Exception:  # whatever a module does with random values, or with fewer tokens
        return None


class _Run:
    """Calls a module with linear layers of rank one, and the same values each time."""

    def __init__(self, calls: MixerCalls) -> None:
        self.calls, self.linear, self.tensors = calls, Recorder(calls), calls.between()

    def __call__(self, hidden: torch.Tensor, beside: Any = None) -> list[torch.Tensor]:
        """Return the tensors of floating point that the module puts out for a hidden state [rows, tokens, features]."""
        output = self.calls.run(self.linear, self.tensors, hidden, beside=beside)
        return [own for own in tensors_in(output) if own.is_floating_point()]


def _needed(calls: MixerCalls, used: dict[str, torch.Tensor]) -> int | None:
    """Return how many tokens before a token have a derivative, and note of each parameter which entries have one."""
    hidden, run = calls.given().clone().requires_grad_(), _Run(calls)
    if hidden.ndim != 3:
        return None
    parameters = {name: run.tensors[name].requires_grad_() for name, _ in calls.mixer.named_parameters() if name in run.tensors}
    outputs = run(hidden)
    if not outputs or any(own.ndim < 3 or own.shape[:2] != hidden.shape[:2] for own in outputs):
        return None
    before = 0
    for token in (calls.tokens - 1, calls.tokens // 2, calls.tokens // 3):
        total = torch.stack([(own[:, token] * calls.random(*own[:, token].shape)).sum() for own in outputs]).sum()
        gradient, *others = torch.autograd.grad(total, [hidden, *parameters.values()], retain_graph=True, allow_unused=True)
        for (name, own), other in zip(parameters.items(), others, strict=True):
            nonzero = torch.zeros_like(own, dtype=torch.bool) if other is None else other != 0
            used[name] = used[name] | nonzero if name in used else nonzero
        tokens = (gradient != 0).any(2).any(0).nonzero().flatten()
        if not len(tokens) or int(tokens[-1]) > token:
            return None
        before = max(before, token - int(tokens[0]))
    return before


@torch.no_grad()
def _computes_alone(calls: MixerCalls, before: int) -> bool:
    """Return whether a part of the tokens, with those before it, gives what it gives among all, whatever else is passed."""
    run, hidden, length = _Run(calls), calls.given(), calls.tokens
    whole = run(hidden)
    parts = [(0, length, calls.others()), (0, length, calls.elsewhere())]
    parts += [(start, length, None) for start in {1, 2, before, before + 1, length // 2, length - 1} if start]
    parts += [(0, stop, None) for stop in {2, before + 2, length // 2}]
    for start, stop, beside in parts:
        first = max(0, start - before)
        alone = run(hidden[:, first:stop], beside)
        for own, among in zip(alone, whole, strict=True):
            expected = among[:, start:stop]
            own = own[:, start - first :]
            if own.shape != expected.shape or not bool(((own - expected).abs() <= _CLOSE * among.abs().max()).all()):
                return False
    return True

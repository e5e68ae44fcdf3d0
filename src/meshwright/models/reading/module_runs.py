"""How often each module runs in a forward, and how often with gradient."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright.models.reading.tracing import Inputs, Tracer, traced
from meshwright.plan.given.spec import ExpertsRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["count_runs"]


def count_runs(model: "PreTrainedModel", experts: Sequence[ExpertsRule] = ()) -> dict[str, tuple[int, int]]:
    """Return how often each module runs in one forward on tokens, and how often with gradient.

    A vision tower does not run, and a stack of layers may run twice. What is inside of a mixture is not called. The result is
    empty if the forward cannot be called without values.

    Args:
        model: a causal language model, on any device; it is called with tensors on the meta device, and not changed.
        experts: its mixtures.
    """
    counted, _ = traced(model, experts, _Runs)
    return {} if counted is None else {name: counted.runs.get(name, (0, 0)) for name, _ in model.named_modules()}


class _Runs(Tracer):
    """Counts calls of modules."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        self.runs: dict[str, tuple[int, int]] = {}

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        runs, with_gradient = self.runs.get(name, (0, 0))
        self.runs[name] = (runs + 1, with_gradient + torch.is_grad_enabled())

"""What crosses the cuts of a model beside its hidden state on a rank of `tp`, which has slices: traced with their shapes."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright.models.reading.pipeline.cut_trace import StageTracer, stage_positions
from meshwright.models.reading.tracing import Inputs, meta_tensors, traced
from meshwright.plan.given.cut_points import Carried, RankSlices
from meshwright.plan.given.hidden_argument import first_of, hidden_argument, with_argument, with_first
from meshwright.plan.given.spec import ExpertsRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["trace_carried"]


def trace_carried(
    model: "PreTrainedModel", layers: Sequence[str], experts: Sequence[ExpertsRule], slices: RankSlices
) -> tuple[Carried, ...] | None:
    """Return what crosses cuts on a rank; ``None``: the model does not run with slices.

    Args:
        model: a causal language model, on any device. It is not changed.
        layers: names of its layers that run.
        experts: its mixtures, which are not called.
        slices: what the rank has of the model.
    """
    tensors = meta_tensors(model)
    for name, shape in slices.parameters.items():
        tensors[name] = tensors[name].new_empty(shape)
    make = partial(_SliceTracer, model, layers, slices)
    found, _ = traced(model, experts, make, tensors=tensors, positions=stage_positions(model))
    return None if found is None else found.carried.facts()


class _SliceTracer(StageTracer):
    """Gives modules, and what follows them, the features that a rank has there."""

    def __init__(self, model: nn.Module, layers: Sequence[str], slices: RankSlices, inputs: Inputs) -> None:
        super().__init__(model, layers, inputs)
        self.slices = slices

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Give a module the features that enter it on a rank."""
        args, kwargs = super().enter(name, module, args, kwargs) or (args, kwargs)
        if features := self.slices.entering.get(name):
            change = partial(_with_features, features=features)
            args, kwargs = with_argument(hidden_argument(module), args, kwargs, change, name)
        return args, kwargs

    def leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Let a module return the features that leave it on a rank."""
        changed = super().leave(name, module, args, kwargs, output)
        output = output if changed is None else changed
        features = self.slices.leaving.get(name)
        return with_first(output, _with_features(first_of(output), features)) if features else output


def _with_features(tensor: torch.Tensor, features: int) -> torch.Tensor:
    """Return a tensor with another number of features, computed from it."""
    copies = -(-features // tensor.shape[-1])
    return torch.cat([tensor] * copies, -1).narrow(-1, 0, features)

"""Whether the backward of a stage can be halved, for inputs and for weights: tried without values.

torch's half for weights goes on from where weights meet what is computed from inputs. A weight that is used twice, the second
time on what it was used for, takes all in between with it. Where other weights are used there too, such as those of layers
that share parameters, or within a layer with a router that predicts and corrects, their part is computed twice, and fails.
"""

import copy
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright.distributed import _torch_compat
from meshwright.distributed.pipeline.cut import crossing_of, cut_model
from meshwright.distributed.pipeline.stage import explained_half
from meshwright.errors import UnsupportedError
from meshwright.models.reading.tracing import Inputs, Tracer, meta_positions, meta_tensors, prime_length, tensors_in, traced
from meshwright.plan.axes.pipeline.stage_plan import cut_of
from meshwright.plan.given.cut_points import StageFacts
from meshwright.plan.given.parameter_storage import names_of_parameters
from meshwright.plan.given.spec import ExpertsRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["halves_backward"]


def halves_backward(
    model: "PreTrainedModel",
    facts: StageFacts,
    experts: Sequence[ExpertsRule],
    trained: Collection[str],
    first: str,
    last: str,
) -> bool:
    """Return whether the backward of a stage can be halved. It is taken to be so if the stage cannot be tried.

    Args:
        model: the model, which is not changed.
        facts: where it can be cut.
        experts: its mixtures, which are not called.
        trained: first names of the parameters that have a gradient.
        first: the first layer of the stage, which is not the model's first.
        last: its last layer.
    """
    layers = [layer.name for layer in facts.layers]
    own = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    part = copy.deepcopy(model, dict(own))
    cut_model(part, cut_of(facts, layers.index(first), layers.index(last) + 1))
    positions = meta_positions(prime_length(model), rows=2)
    crossing, dtype = crossing_of(part), next(model.parameters()).dtype
    received = torch.empty(crossing.shape(*positions.shape), dtype=dtype, device="meta", requires_grad=True)
    crossing.received = received
    names = {alias for of in names_of_parameters(model).values() if of[0] in trained for alias in of}
    tensors = meta_tensors(part)
    leaves = {name: nn.Parameter(tensor) for name, tensor in tensors.items() if name in names}
    found, _ = traced(part, experts, _OutputTracer, tensors={**tensors, **leaves}, positions=positions)
    outputs = [] if found is None else [tensor for tensor in tensors_in(found.output) if tensor.requires_grad][:1]
    stage: Any = SimpleNamespace(submod=nn.ParameterList(leaves.values()))
    given = {"stage_output": outputs, "output_grads": list(map(torch.empty_like, outputs)), "input_values": [received]}
    try:
        _, groups = _torch_compat.backward_of_stage("input", stage, given)
    except Exception:  # a torch whose halves are refused when they run, or whatever a model does without values
        return True
    try:
        with explained_half(layers.index(first)):
            _torch_compat.backward_of_stage("weight", stage, {"param_groups": groups})
    except UnsupportedError:
        return False
    except Exception:  # whatever a model does without values
        pass
    return True


class _OutputTracer(Tracer):
    """Keeps what a model returns, with a graph through its attentions."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        self.output: Any = None

    def functions(self, model: nn.Module, attend: Any) -> AbstractContextManager[Any]:
        """Inside, attentions compute something of queries, keys and values."""
        return super().functions(model, _attend)

    def leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note what the model returns."""
        if not name:
            self.output = output


def _attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None, **_: Any
) -> tuple[torch.Tensor, None]:
    """Stand in for the attention function: whatever is computed of all three, in the shape of its output."""
    weights = query.mean(-1, keepdim=True) * key.mean()
    return (weights * value.mean((1, 2), keepdim=True)).transpose(1, 2), None

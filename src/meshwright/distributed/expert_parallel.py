"""Expert parallel: each rank of `ep` holds some of the experts, whole, and tokens are sent to them.

The forward of an experts module is replaced, on the instance. The new one dispatches tokens (:mod:`meshwright.moe.dispatch`),
and computes with this rank's experts by the model's own implementation.
"""

from typing import Any

import torch
from torch import nn

from meshwright.distributed.mesh import ParallelMesh
from meshwright.distributed.tensor_parallel import local_parameters
from meshwright.moe.dispatch import dispatch
from meshwright.plan.program import Dispatch

__all__ = ["dispatch_tokens"]


def dispatch_tokens(model: nn.Module, action: Dispatch, mesh: ParallelMesh) -> None:
    """Send the tokens of a mixture to its experts. The experts were sliced over the axis before."""
    module = model.get_submodule(action.module)
    group = mesh[action.axis].get_group()
    token_group = mesh[action.token_axis].get_group() if action.token_axis else None
    compute = module.forward

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        with local_parameters(module):
            return dispatch(compute, action.experts, group, hidden_states, top_k_index, top_k_weights, token_group)

    module.forward = forward

"""Expert parallel: each rank of `ep` is given ``experts / ep`` whole experts of a layer, and tokens are sent to them.

FSDP shards these experts further, over `ep_shard`. The forward of an experts module is replaced, on the instance, by one that
dispatches tokens (:mod:`meshwright.distributed.experts.dispatch`) and computes this rank's experts with the model's own
implementation. If several ranks have the same tokens (`token_axis`, the ranks of `tp`), each of them sends only its share.
"""

from typing import Any

import torch
from torch import nn

from meshwright.distributed.experts.dispatch import dispatch
from meshwright.distributed.mesh import ParallelMesh
from meshwright.distributed.tensor.slicing import local_parameters
from meshwright.plan.result.program import Dispatch

__all__ = ["dispatch_tokens"]


def dispatch_tokens(model: nn.Module, action: Dispatch, mesh: ParallelMesh) -> None:
    """Send the tokens of a mixture to its experts. The experts were sliced over the axis before."""
    module = model.get_submodule(action.module)
    group = mesh[action.axis].get_group()
    token_group = mesh[action.row.token_axis].get_group() if action.row.token_axis else None
    compute = module.forward

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        with local_parameters(module):
            return dispatch(compute, action.row.experts, group, hidden_states, top_k_index, top_k_weights, token_group)

    module.forward = forward

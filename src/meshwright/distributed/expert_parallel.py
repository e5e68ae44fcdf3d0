"""Expert parallel: each rank of `ep` holds whole experts, and tokens travel to them.

Parameters become DTensors on the `ep` axis, sliced by experts, so that FSDP (over `ep_shard`), checkpoints and loading know
what each rank holds. The forward of an experts module is replaced on its instance by one that dispatches tokens
(:mod:`meshwright.moe.dispatch`), and computes with this rank's experts by whatever implementation the model has.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from meshwright.distributed.mesh import ParallelMesh
from meshwright.distributed.tensor_parallel import local_parameters
from meshwright.moe.dispatch import dispatch
from meshwright.plan.sharding_plan import ExpertsRow, ShardingPlan

__all__ = ["apply_expert_parallel"]


def apply_expert_parallel(model: nn.Module, plan: ShardingPlan, mesh: ParallelMesh) -> None:
    """Share the mixtures of a plan over `ep`.

    Args:
        model: on the meta device, or with the same values on every rank; changed in place.
        plan: has a row for each mixture.
        mesh: of the plan's layout.
    """
    shared: dict[int, nn.Parameter] = {}
    for row in plan.experts:
        module = model.get_submodule(row.module)
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in shared:  # a tied one is shared once
                value = distribute_tensor(parameter.data, mesh["ep"], [Shard(0)], src_data_rank=None)
                shared[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            module._parameters[name] = shared[id(parameter)]
        if hasattr(module, "num_experts"):  # that its implementation computes with
            module.num_experts = row.local  # type: ignore[assignment]
        _dispatching(module, row, mesh)


def _dispatching(module: nn.Module, row: ExpertsRow, mesh: ParallelMesh) -> None:
    group = mesh["ep"].get_group()
    token_group = mesh[row.token_axis].get_group() if row.token_axis else None
    compute = module.forward

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        with local_parameters(module):
            return dispatch(compute, row.experts, group, hidden_states, top_k_index, top_k_weights, token_group)

    module.forward = forward

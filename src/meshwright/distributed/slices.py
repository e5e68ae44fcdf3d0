"""What is done to parameters and attributes: slices over an axis, counts of heads or experts on a rank, trainability."""

import copy
from collections.abc import Iterable

from torch import nn
from torch.distributed.tensor import Placement, Shard, distribute_tensor

from meshwright.distributed import _torch_compat
from meshwright.distributed.mesh import ParallelMesh
from meshwright.plan.result.program import Assign, Freeze, Slice

__all__ = ["assign", "freeze", "replace_parameter", "slice_parameter"]


def slice_parameter(model: nn.Module, action: Slice, mesh: ParallelMesh) -> None:
    """Make a parameter, on the meta device or with the same values on every rank, a DTensor under all its names."""
    parameter = model.get_parameter(action.names[0])
    placement: Placement = Shard(action.dim)
    if action.pieces > 1:
        placement = _torch_compat.strided_shard(action.dim, action.pieces)
    value = distribute_tensor(parameter.data, mesh[action.axis], [placement], src_data_rank=None)
    replace_parameter(model, action.names, nn.Parameter(value, requires_grad=parameter.requires_grad))


def replace_parameter(model: nn.Module, names: Iterable[str], parameter: nn.Parameter) -> None:
    """Put a parameter in the place of another one, under all its names."""
    for name in names:
        module, _, own = name.rpartition(".")
        model.get_submodule(module)._parameters[own] = parameter


def assign(model: nn.Module, action: Assign, mesh: ParallelMesh | None = None) -> None:
    """Set attributes of a module."""
    module = model.get_submodule(action.module)
    for name in action.own:
        setattr(module, name, copy.copy(getattr(module, name)))
    for path, value in action.values:
        *places, own = path.split(".")
        holder = module
        for place in places:
            holder = getattr(holder, place)
        setattr(holder, own, value)


def freeze(model: nn.Module, action: Freeze, mesh: ParallelMesh) -> None:
    """Say of every parameter whether it is trained."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in action.parameters)

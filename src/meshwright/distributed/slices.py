"""What is done to parameters and attributes: slices over axes and back, counts of heads or experts on a rank, trainability."""

import copy
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor

from meshwright.distributed import _torch_compat
from meshwright.distributed.mesh import ParallelMesh
from meshwright.plan.result.program import Assign, Freeze, Slice

__all__ = ["assign", "freeze", "replace_parameter", "slice_like", "slice_parameter", "whole_tensor"]


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


def slice_like(tensor: DTensor, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's slice of a whole tensor that every rank has, cut as another one is; nothing is sent.

    ``distribute_tensor`` cuts in the order of the mesh. FSDP cuts after tensor parallel, and its axis comes first. torch 2.13
    and later say so in the placement, torch 2.11 does not where tensor parallel slices a packed matrix.
    """
    part = whole
    for axis, dim, sizes in _cuts(tensor):
        at = tensor.device_mesh.get_local_rank(axis)
        pieces = part.split([sum(of_ranks) for of_ranks in sizes], dim)
        own = [piece.narrow(dim, sum(of_ranks[:at]), of_ranks[at]) for piece, of_ranks in zip(pieces, sizes, strict=True)]
        part = own[0] if len(own) == 1 else torch.cat(own, dim)
    return part


@torch.no_grad()
def whole_tensor(tensor: DTensor) -> torch.Tensor:
    """The global values of a tensor, gathered over one axis after another; all ranks of its mesh take part.

    ``full_tensor`` does the same where one all-gather can undo the cuts. It cannot where several axes cut one dimension in
    another order than that of the mesh, as FSDP does after tensor parallel, nor (torch 2.11) where a matrix is packed.
    """
    mesh, part = tensor.device_mesh, tensor.to_local()
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Partial):
            part = part.clone()
            dist.all_reduce(part, group=mesh.get_group(axis))
            if placement.reduce_op == "avg":
                part /= mesh.size(axis)
    for axis, dim, sizes in reversed(_cuts(tensor)):
        of_ranks = [sum(of_piece) for of_piece in zip(*sizes, strict=True)]  # the first rank's is the largest
        padded = part.new_zeros([*part.shape[:dim], of_ranks[0], *part.shape[dim + 1 :]])
        padded.narrow(dim, 0, part.shape[dim]).copy_(part)
        gathered = [torch.empty_like(padded) for _ in of_ranks]
        dist.all_gather(gathered, padded, group=mesh.get_group(axis))
        starts = [0] * len(of_ranks)
        parts = []
        for of_piece in sizes:
            for rank, length in enumerate(of_piece):
                parts.append(gathered[rank].narrow(dim, starts[rank], length))
                starts[rank] += length
        part = torch.cat(parts, dim)
    return part


def _cuts(tensor: DTensor) -> list[tuple[int, int, list[list[int]]]]:
    """Return how a tensor was cut, in order: (axis of the mesh, dimension, for each piece of it the lengths on ranks)."""
    lengths, cuts = list(tensor.shape), []
    for axis, dim, pieces in _torch_compat.cuts_of(tensor):
        sizes = [_chunks(piece, tensor.device_mesh.size(axis)) for piece in _chunks(lengths[dim], pieces)]
        lengths[dim] = sum(of_ranks[tensor.device_mesh.get_local_rank(axis)] for of_ranks in sizes)
        cuts.append((axis, dim, sizes))
    return cuts


def _chunks(length: int, count: int) -> list[int]:
    """Return the lengths of the chunks of ``torch.chunk``, with those that would be empty."""
    longest = -(-length // count)
    return [max(0, min(longest, length - index * longest)) for index in range(count)]

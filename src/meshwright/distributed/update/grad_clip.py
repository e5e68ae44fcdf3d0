"""Gradient norm and clipping over parameters on different meshes.

torch's ``clip_grad_norm_`` stacks all norms in one DTensor and so fails where parameters live on more than one mesh
(experts beside dense layers, tensor parallel beside replicated norms). Here each rank adds the powers of its local
entries, and each group of parameters is summed over exactly the mesh axes that its placements shard.
"""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

__all__ = ["clip_grad_norm_", "total_grad_norm"]

EPSILON = 1e-6
"""Added to a norm that gradients are divided by, as in torch."""


def total_grad_norm(
    parameters: Iterable[torch.Tensor], norm_type: float = 2.0, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """The norm of all gradients as one vector, equal to that of one process holding them whole.

    Args:
        parameters: plain tensors and DTensors on any meshes; those without a gradient are left out. Every rank must pass
            the same parameters.
        norm_type: the p of the p-norm; ``inf`` for the largest entry.
        group: ranks that hold other parameters, as those of `pp` do; ``None``: there are none. A parameter that several of them
            hold is passed on one of them.

    Returns:
        A scalar in fp32 (fp64 where a gradient is) on the device of the gradients, the same on all ranks: a NaN or an infinity
        on any rank is seen by all.
    """
    groups: dict[tuple[object, ...], list[torch.Tensor]] = {}
    meshes: dict[tuple[object, ...], DTensor] = {}
    parameters = list(parameters)
    # A rank whose parameters are all frozen adds a zero, on the device of the others.
    device, dtype = parameters[0].device if parameters else torch.device("cpu"), torch.float32
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        key: tuple[object, ...] = ()
        if isinstance(gradient, DTensor):
            if any(isinstance(placement, Partial) for placement in gradient.placements):
                placements = [Replicate() if isinstance(p, Partial) else p for p in gradient.placements]
                gradient = gradient.redistribute(placements=placements)
            key = (gradient.device_mesh, *(isinstance(p, Replicate) for p in gradient.placements))
            meshes.setdefault(key, gradient)
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        device, dtype = local.device, torch.promote_types(dtype, local.dtype)
        groups.setdefault(key, []).append(local)

    largest = math.isinf(norm_type)
    total: torch.Tensor | None = None
    for key, locals_ in groups.items():
        part = _local_power(locals_, norm_type, device, dtype)
        if key:
            example = meshes[key]
            for axis, placement in enumerate(example.placements):
                if not isinstance(placement, Replicate) and example.device_mesh.size(axis) > 1:
                    shards = example.device_mesh.get_group(axis)
                    if largest:
                        part = _max_with_nan(part, shards)
                    else:
                        dist.all_reduce(part, group=shards)
        total = part if total is None else torch.maximum(total, part) if largest else total + part
    if total is None:
        total = torch.zeros((), dtype=dtype, device=device)
    if group is not None:
        total = total.double()
        if largest:
            total = _max_with_nan(total, group)
        else:
            dist.all_reduce(total, group=group)
    return total if largest else total ** (1.0 / norm_type)


def _local_power(tensors: list[torch.Tensor], norm_type: float, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Sum of p-th powers of the entries (or their maximum); empty shards add nothing."""
    full = [tensor for tensor in tensors if tensor.numel()]
    if not full:
        return torch.zeros((), dtype=dtype, device=device)
    norms = torch.stack(torch._foreach_norm(full, norm_type, dtype=dtype))
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()


def _max_with_nan(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Maximum over ranks in which a NaN wins: gloo's and NCCL's MAX may drop it."""
    pair = torch.stack([value.nan_to_num(nan=0.0, posinf=math.inf), value.isnan().to(value.dtype)])
    dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=group)
    return torch.where(pair[1] > 0, torch.full_like(value, math.nan), pair[0])


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[torch.Tensor],
    max_norm: float | None,
    norm_type: float = 2.0,
    *,
    group: dist.ProcessGroup | None = None,
    counted_elsewhere: Iterable[torch.Tensor] = (),
) -> torch.Tensor:
    """Scale all gradients so that their total norm is at most ``max_norm``.

    Args:
        parameters: see :func:`total_grad_norm`.
        max_norm: ``None`` or ``inf`` only measures.
        norm_type: the p of the p-norm.
        group: see :func:`total_grad_norm`.
        counted_elsewhere: those of the parameters that another rank of the group adds to the norm.

    Returns:
        The norm before clipping, see :func:`total_grad_norm`. If it is not finite, gradients are left as they are, so
        that the caller can look at them and decide.
    """
    parameters = list(parameters)
    others = set(counted_elsewhere)
    norm = total_grad_norm([parameter for parameter in parameters if parameter not in others], norm_type, group)
    if max_norm is None or math.isinf(max_norm):
        return norm
    # Without a branch on the value: reading it would make the host wait for the device. Of a norm that is not finite the
    # denominator is 0, so that the factor is 1.
    finite = norm.nan_to_num(nan=-EPSILON, posinf=-EPSILON)
    scale = (max_norm / (finite + EPSILON)).clamp(max=1.0)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    locals_ = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    by_dtype: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in locals_:
        by_dtype.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for (_, device), tensors in by_dtype.items():
        torch._foreach_mul_(tensors, scale.to(device))
    return norm

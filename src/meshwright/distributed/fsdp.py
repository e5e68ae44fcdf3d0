"""FSDP2 and HSDP units from the rows of a plan, and torch's ``replicate`` where nothing is sharded."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Shard

from meshwright.distributed import _torch_compat
from meshwright.distributed.mesh import ParallelMesh
from meshwright.distributed.twins import Twins
from meshwright.plan.options import GradientReduction
from meshwright.plan.prefetch import prefetch_targets
from meshwright.plan.sharding_plan import ParameterRow, ShardingPlan, UnitRow, shard_axis

__all__ = ["apply_units", "enter_by", "fsdp_units", "gathered", "move_buffers", "shard_unit"]


def apply_units(model: nn.Module, plan: ShardingPlan, mesh: ParallelMesh) -> None:
    """Make each unit of the plan an FSDP unit, inside out, the root last."""
    twins = Twins(model, plan)
    dims = {
        id(model.get_parameter(name)): dim
        for row in plan.parameters if (dim := _sharded_dim(row))
        for name in (row.name, *row.aliases)
    }  # fmt: skip
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if plan.options.cpu_offload else OffloadPolicy()
    data_group = mesh["dp_cp"].get_group()
    again = any(unit.forwards > 1 or unit.twin_of for unit in plan.units)
    # named_modules() lists parents first, so its reverse wraps children first.
    for unit in reversed(plan.fsdp_units):
        module = model.get_submodule(unit.name)
        modules = [model.get_submodule(part.name) for part in plan.parts(unit)]
        policy = _mixed_precision(unit)
        axis = shard_axis(plan.layout, unit.kind)
        unit_mesh = mesh.fsdp_experts() if axis == "ep_shard" else mesh.fsdp()
        if mesh.replicated:
            _torch_compat.replicate_module(modules, unit_mesh, policy, offload)
            _torch_compat.supervise(module, data_group)
        else:
            shard_unit(modules, unit_mesh, policy, offload, unit.reshard_after_forward, dims, data_group)
        if plan.options.gradient_reduction is GradientReduction.SUM:
            _divide(module, 1.0)
        elif axis == "ep_shard":
            # An expert has the tokens of several data ranks, and its group is smaller than theirs.
            ranks = plan.layout.size("dp_replicate") * plan.layout.size("dp_shard_cp")
            _divide(module, float(ranks), alone=plan.layout.size(axis) == 1)
        if len(modules) > 1:
            _torch_compat.hook_each_run(modules)
        if again:
            _torch_compat.forget_runs_without_gradient(module)
    twins.join()
    _prefetch(model, plan)


def _divide(module: nn.Module, factor: float, *, alone: bool = False) -> None:
    """Let a unit divide the sum of its gradients by a factor. ``alone``: there is one rank to scatter to."""
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(factor)
    # A plain sum on every backend: NCCL's and gloo's premultiplied sums have gaps. Alone, FSDP2 divides where it copies,
    # and with a plain sum once more after it (foreach_reduce of torch 2.13).
    module.set_force_sum_reduction_for_comms(not alone)


def _prefetch(model: nn.Module, plan: ShardingPlan) -> None:
    """Tell units which others to gather ahead of their use, where the options say how many."""
    forward, backward = prefetch_targets(plan)
    for targets, where in ((forward, "forward"), (backward, "backward")):
        for name, ahead in targets.items():
            set_modules = getattr(model.get_submodule(name), f"set_modules_to_{where}_prefetch")
            set_modules([model.get_submodule(other) for other in ahead])


def shard_unit(
    modules: list[nn.Module],
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    reshard: bool,
    dims: Mapping[int, int] = MappingProxyType({}),
    data_group: dist.ProcessGroup | None = None,
) -> None:
    """Make modules one FSDP unit over a 1-D (shard) or 2-D (replicate, shard) mesh.

    Args:
        modules: usually one; their parameters that are in no other unit are sharded by rows.
        mesh: to shard over.
        mp_policy: dtypes.
        offload_policy: where shards live.
        reshard: whether gathered parameters are freed after forward.
        dims: id of each parameter that is sharded along another dimension to that.
        data_group: of all ranks that read data for this unit; ``None``: those of the mesh.
    """

    def placement(parameter: nn.Parameter) -> Shard | None:
        return Shard(dims[id(parameter)]) if id(parameter) in dims else None

    fully_shard(
        modules if len(modules) > 1 else modules[0],
        mesh=mesh,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        reshard_after_forward=reshard,
        shard_placement_fn=placement if dims else None,
    )
    _torch_compat.supervise(modules[0], data_group)


def _sharded_dim(row: ParameterRow) -> int:
    """The dimension that FSDP shards."""
    placements = dict(row.placements)
    placement = next((placements[axis] for axis in ("dp_shard", "dp_shard_cp", "ep_shard") if axis in placements), "Shard(0)")
    return int(placement.removeprefix("Shard(").removesuffix(")"))


def _mixed_precision(unit: UnitRow) -> MixedPrecisionPolicy:
    def dtype(name: str | None) -> torch.dtype | None:
        return None if name is None else getattr(torch, name)

    return MixedPrecisionPolicy(
        param_dtype=dtype(unit.param_dtype),
        reduce_dtype=dtype(unit.reduce_dtype),
        output_dtype=dtype(unit.output_dtype),
        cast_forward_inputs=True,
    )


def fsdp_units(model: nn.Module) -> dict[str, FSDPModule]:
    """Name to module of every FSDP unit, found from FSDP state, parents first.

    Modules that were wrapped together are one unit, under the name of the first.
    """
    seen: set[int] = set()
    found = {}
    for name, module in model.named_modules():
        state = _torch_compat.fsdp_state(module)
        if state is not None and id(state) not in seen:
            seen.add(id(state))
            found[name] = module
    return found


def enter_by(unit: nn.Module, method: str) -> None:
    """Let a method of a unit gather and reshard it, as its forward does."""
    register_fsdp_forward_method(unit, method)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Put buffers where the model computes. With CPU offload the shards live elsewhere, and FSDP moves only parameters."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


@contextmanager
def gathered(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, every unit holds its whole parameters; on the way out all are resharded, also after an exception.

    Nested uses gather once, and reshard when the outermost ends.
    """
    units = fsdp_units(model).values()
    depth = getattr(model, "_gathered_depth", 0)
    model._gathered_depth = depth + 1  # type: ignore[assignment]
    try:
        if depth == 0:
            for unit in units:
                unit.unshard()
        yield model
    finally:
        model._gathered_depth = depth  # type: ignore[assignment]
        if depth == 0:
            for unit in units:
                unit.reshard()

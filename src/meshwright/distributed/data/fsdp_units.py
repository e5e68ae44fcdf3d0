"""Units of FSDP2 and HSDP, and of torch's ``replicate`` where nothing is sharded."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

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
from torch.distributed.tensor import DTensor, Shard

from meshwright.distributed import _torch_compat
from meshwright.distributed.class_names import class_name
from meshwright.distributed.mesh import ParallelMesh
from meshwright.errors import PlanError
from meshwright.plan.result.program import Engine, Prefetch, Wrap

__all__ = [
    "ShardFunction",
    "enter_by",
    "fsdp_units",
    "gathered",
    "move_buffers",
    "prefetch",
    "refuse_parallelized",
    "refuse_sliced",
    "shard_by",
    "shard_unit",
    "sharding_by",
    "wrap",
]


def wrap(model: nn.Module, action: Wrap, mesh: ParallelMesh) -> None:
    """Make modules one unit, as an action says."""
    modules = [model.get_submodule(name) for name in action.modules]
    param_dtype, reduce_dtype, output_dtype = (
        None if name is None else getattr(torch, name)
        for name in (action.row.param_dtype, action.row.reduce_dtype, action.row.output_dtype)
    )
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype, output_dtype, cast_forward_inputs=True)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if action.offload else OffloadPolicy()
    unit_mesh, data_group = mesh.submesh(action.axes, experts=action.experts), mesh["dp_cp"].get_group()
    unit = modules[0]
    if action.sharded_by:
        _shard_by_user(unit, unit_mesh, policy, offload, action, data_group)
        return
    if action.engine is Engine.REPLICATE:
        _torch_compat.replicate_module(modules, unit_mesh, policy, offload)
        _torch_compat.supervise(unit, data_group)
    else:
        dims = {id(model.get_parameter(name)): dim for name, dim in action.dims}
        shard_unit(modules, unit_mesh, policy, offload, action.row.reshard_after_forward, dims, data_group)
    assert isinstance(unit, FSDPModule)
    if action.divisor is not None:
        unit.set_gradient_divide_factor(action.divisor)
        unit.set_force_sum_reduction_for_comms(action.plain_sum)
    if action.each_run:
        _torch_compat.hook_each_run(unit, [model.get_submodule(name) for name in action.around] or modules)
    if action.around:
        _torch_compat.reduce_at_the_end(unit)
    if action.no_grad_runs:
        _torch_compat.forget_runs_without_gradient(unit)


ShardFunction = Callable[..., Any]
"""A function of the user that makes units, with the arguments of torch's ``fully_shard``: ``(module, mesh=, mp_policy=,
offload_policy=, reshard_after_forward=)``."""


def shard_by(
    function: ShardFunction,
    shown: str,
    unit: nn.Module,
    name: str,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    reshard: bool,
) -> None:
    """Let a function of the user make a unit. Errors show the function as `shown`, and the unit as `name`.

    Raises:
        PlanError: it returned another module.
    """
    made = function(unit, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=reshard)
    if made is not None and made is not unit:
        raise PlanError("fsdp.function", f"fully_shard_fn: {shown} returned another module for {name!r}; shard it in place")


_USERS: ContextVar[ShardFunction] = ContextVar("function that makes units")


@contextmanager
def sharding_by(function: ShardFunction | None) -> Iterator[None]:
    """Inside, a function of the user makes the units of a plan that says so (``sharded_by``); ``None``: torch does."""
    token = _USERS.set(function) if function is not None else None
    try:
        yield
    finally:
        if token is not None:
            _USERS.reset(token)


def _shard_by_user(
    unit: nn.Module,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    action: Wrap,
    group: dist.ProcessGroup,
) -> None:
    function = _USERS.get(None)
    if function is None:
        raise PlanError(
            "fsdp.function",
            f"the plan leaves its units to {action.sharded_by}, a function of the user; pass it as fully_shard_fn= of the "
            "strategy's parallelize()",
        )
    shard_by(function, action.sharded_by, unit, action.unit, mesh, policy, offload, action.row.reshard_after_forward)
    units = fsdp_units(unit)
    if action.unit == "" and not units and mesh.size() > 1:
        raise PlanError(
            "fsdp.function",
            f"fully_shard_fn: {action.sharded_by} made no FSDP unit, neither of the root nor inside it, so {mesh.size()} ranks "
            "would train apart; it has to call torch's fully_shard",
        )
    for module in units.values():
        _torch_compat.supervise(module, group)
    if isinstance(unit, FSDPModule):
        if action.divisor is not None:
            unit.set_gradient_divide_factor(action.divisor)
            unit.set_force_sum_reduction_for_comms(action.plain_sum)
        if action.no_grad_runs:
            _torch_compat.forget_runs_without_gradient(unit)


def prefetch(model: nn.Module, action: Prefetch, mesh: ParallelMesh) -> None:
    """Set the units that a unit prefetches."""

    def made(names: Iterable[str]) -> list[FSDPModule]:  # a function of the user need not make all
        return [module for name in names if isinstance(module := model.get_submodule(name), FSDPModule)]

    for unit in made([action.unit]):
        if forward := made(action.forward):
            unit.set_modules_to_forward_prefetch(forward)
        if backward := made(action.backward):
            unit.set_modules_to_backward_prefetch(backward)


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
        modules: usually one. Their parameters that are in no other unit are sharded along dimension 0.
        mesh: the mesh to shard over.
        mp_policy: dtypes.
        offload_policy: where shards are stored.
        reshard: whether the unit reshards after forward.
        dims: id of a parameter to the dimension that it is sharded along, if that is not 0.
        data_group: the process group of all ranks that read data for this unit; ``None``: the ranks of the mesh.
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


def fsdp_units(model: nn.Module) -> dict[str, FSDPModule]:
    """Return name to module for each FSDP unit, parents first. Units are found by their FSDP state.

    Modules that were wrapped together are one unit, under the name of the first.
    """
    seen: set[int] = set()
    units = {}
    for name, module in model.named_modules():
        state = _torch_compat.fsdp_state(module)
        if state is not None and id(state) not in seen:
            seen.add(id(state))
            units[name] = module
    return units


def refuse_parallelized(model: nn.Module) -> None:
    """Refuse a model that was parallelized before.

    Raises:
        PlanError: it has FSDP units.
    """
    for name in fsdp_units(model):
        raise PlanError(
            "fsdp.already",
            f"{class_name(model)}: the model is already parallelized ({name or 'its root'} is an FSDP unit); call this before "
            "that, or build the model anew",
        )


def refuse_sliced(model: nn.Module) -> None:
    """Refuse a model whose parameters were sliced by hand.

    Raises:
        PlanError: it has parameters that are DTensors.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise PlanError(
                "fsdp.already",
                f"{class_name(model)}: {name!r} is a DTensor already, so parallelize_module was called; leave that to "
                "tp_shard_plan, or shard all of the model by hand",
            )


def enter_by(unit: nn.Module, method: str) -> None:
    """Make a method of a unit unshard and reshard it, as its forward does."""
    register_fsdp_forward_method(unit, method)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers to the device of compute. With CPU offload the shards are on the host, and FSDP moves parameters only."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


_GATHERED: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""How many contexts of :func:`gathered` are open for a model."""


@contextmanager
def gathered(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, all units are unsharded. At the end all are resharded, also after an exception.

    Uses may be nested. Units are unsharded by the outermost, and resharded at its end.
    """
    units = fsdp_units(model).values()
    depth = _GATHERED.get(model, 0)
    _GATHERED[model] = depth + 1
    try:
        if depth == 0:
            for unit in units:
                unit.unshard()
        yield model
    finally:
        _GATHERED[model] = depth
        if depth == 0:
            for unit in units:
                unit.reshard()

"""The conductor: carries a plan out on a model, always in one order.

Tensor and expert parallel -> context parallel -> activation checkpointing -> trainability -> mixed precision ->
FSDP units inside out -> root -> compile.
"""

from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.distributed import _torch_compat
from meshwright.distributed.activation_checkpointing import checkpoint_layer, find_operators
from meshwright.distributed.compilation import compile_layers
from meshwright.distributed.expert_parallel import apply_expert_parallel
from meshwright.distributed.fsdp import apply_units
from meshwright.distributed.mesh import ParallelMesh
from meshwright.distributed.tensor_parallel import apply_tensor_parallel
from meshwright.errors import PlanError, UnsupportedError
from meshwright.layout import Layout
from meshwright.plan.options import ActivationCheckpointing
from meshwright.plan.sharding_plan import ShardingPlan

__all__ = ["check_supported", "parallelize"]

_NOT_YET = {
    "pp": "pipeline parallel",
    "cp": "context parallel",
}


def check_supported(layout: Layout) -> None:
    """Refuse the axes that this version plans but does not carry out.

    Raises:
        UnsupportedError: one message an axis.
    """
    found = [
        f"{axis}={layout.size(axis)}: {what} is planned but not carried out by this version; the legal value is 1"
        for axis, what in _NOT_YET.items()
        if layout.size(axis) > 1
    ]
    if found:
        raise UnsupportedError(found)


def parallelize(model: nn.Module, plan: ShardingPlan, mesh: ParallelMesh) -> nn.Module:
    """Carry a plan out on a model, in place.

    Args:
        model: the model that the plan was resolved for, on the meta device or materialised (then each rank must hold the
            same values, and keeps its shards).
        plan: the rows to carry out.
        mesh: the mesh of the plan's layout.

    Returns:
        The same model; its units are ``FSDPModule``.

    Raises:
        UnsupportedError: an axis that is not carried out yet.
        PlanError: plan, model and mesh do not belong together.
    """
    _torch_compat.check()
    check_supported(plan.layout)
    _check_belongs(model, plan, mesh)
    kept = find_operators(plan.options.activation_checkpointing_save)

    if plan.tensor_parallel:
        apply_tensor_parallel(model, plan, mesh["tp"])
    if plan.layout.ep > 1:
        apply_expert_parallel(model, plan, mesh)
    # Whoever chooses experts stands beside them, so that where it is unknown, all that is beside them may be it.
    routing = [
        model.get_submodule(name) for row in plan.experts for name in (row.module, row.router or row.module.rpartition(".")[0])
    ]
    for unit in plan.units:
        checkpoint_layer(model.get_submodule(unit.name), unit.activation_checkpointing, kept, routing)
    if any(unit.activation_checkpointing is not ActivationCheckpointing.NONE for unit in plan.units):
        _without_cache(model)
    parameters = dict(model.named_parameters())
    for row in plan.parameters:
        parameters[row.name].requires_grad_(row.trainable)
    apply_units(model, plan, mesh)
    compile_layers(model, plan)
    return model


def _without_cache(model: nn.Module) -> None:
    """Models of transformers fill a cache of keys and values unless told not to; a recomputed layer would fill it twice."""
    for module in model.modules():
        if getattr(getattr(module, "config", None), "use_cache", False):
            module.config.use_cache = False  # type: ignore[union-attr]


def _check_belongs(model: nn.Module, plan: ShardingPlan, mesh: ParallelMesh) -> None:
    found = []
    if mesh.layout != plan.layout:
        found.append(f"the mesh has the layout ({mesh.layout}), the plan has ({plan.layout})")
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    planned = {row.name: row.shape for row in plan.parameters}
    found.extend(f"parameter {name!r} is in the model but not in the plan" for name in shapes.keys() - planned.keys())
    found.extend(f"parameter {name!r} is in the plan but not in the model" for name in planned.keys() - shapes.keys())
    for name in shapes.keys() & planned.keys():
        if shapes[name] != planned[name]:
            found.append(f"parameter {name!r} has shape {shapes[name]} in the model and {planned[name]} in the plan")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        found.append("the model has FSDP units already")
    if found:
        raise PlanError(sorted(found))

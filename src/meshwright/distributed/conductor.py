"""The conductor: performs the program of a plan on a model, action after action.

The resolver writes the program in one order: the cut of a pipeline stage -> tensor parallel -> expert parallel -> context
parallel -> activation checkpointing -> trainability -> matrices in 4 bits -> FSDP units inside out, the root last, each with
its dtypes -> prefetching -> compilation. Under tensor parallel a recomputed layer is compiled before its checkpoint is put
around it.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.distributed import _torch_compat
from meshwright.distributed.context.attend import attend_over_ranks
from meshwright.distributed.context.cache_door import give_cache
from meshwright.distributed.context.count_positions import count_positions
from meshwright.distributed.context.share_heads import share_heads
from meshwright.distributed.context.take_before import take_tokens_before
from meshwright.distributed.data.fsdp_units import prefetch, wrap
from meshwright.distributed.data.twin_units import join_twins, part_twins
from meshwright.distributed.experts.placement import dispatch_tokens
from meshwright.distributed.memory.activation_checkpointing import find_operators, recompute
from meshwright.distributed.memory.chunked_loss import chunk_loss
from meshwright.distributed.memory.compile_layers import compile_module
from meshwright.distributed.memory.nf4 import pack
from meshwright.distributed.mesh import ParallelMesh
from meshwright.distributed.pipeline.cut import cut_model
from meshwright.distributed.slices import assign, freeze, slice_parameter
from meshwright.distributed.tensor.mixer_slices import mix_channels
from meshwright.distributed.tensor.slicing import compute_with_slices
from meshwright.errors import PlanError, Problems, Refusal
from meshwright.plan.result.program import (
    Action,
    Assign,
    Attend,
    ChunkLoss,
    Compile,
    Compute,
    CountPositions,
    Cut,
    Dispatch,
    Freeze,
    GiveCache,
    JoinTwins,
    MixChannels,
    Pack,
    PartTwins,
    Prefetch,
    Recompute,
    ShareHeads,
    Slice,
    TakeTokensBefore,
    Wrap,
)
from meshwright.plan.result.sharding_plan import NO_PROGRAM, ShardingPlan

__all__ = ["PERFORMERS", "parallelize"]

PERFORMERS: dict[type[Action], Callable[[nn.Module, Any, ParallelMesh], None]] = {
    Cut: cut_model,
    Slice: slice_parameter,
    Assign: assign,
    MixChannels: mix_channels,
    Compute: compute_with_slices,
    Dispatch: dispatch_tokens,
    Attend: attend_over_ranks,
    TakeTokensBefore: take_tokens_before,
    ShareHeads: share_heads,
    CountPositions: count_positions,
    GiveCache: give_cache,
    ChunkLoss: chunk_loss,
    Recompute: recompute,
    Freeze: freeze,
    Pack: pack,
    PartTwins: part_twins,
    Wrap: wrap,
    JoinTwins: join_twins,
    Prefetch: prefetch,
    Compile: compile_module,
}
"""Kind of an action to what performs it."""


def parallelize(model: nn.Module, plan: ShardingPlan, mesh: ParallelMesh) -> nn.Module:
    """Carry a plan out on a model, in place.

    Args:
        model: the model that the plan was resolved for, on the meta device or materialised (then each rank must hold the
            same values, and keeps its shards).
        plan: whose program is performed.
        mesh: the mesh of the plan's layout.

    Returns:
        The same model; its units are ``FSDPModule``.

    Raises:
        PlanError: plan, model and mesh do not belong together.
    """
    _torch_compat.check()
    cuts = [action for action in plan.program if isinstance(action, Cut)]
    for cut in cuts:
        PERFORMERS[Cut](model, cut, mesh)
    _check_belongs(model, plan, mesh)
    for names in {action.operators for action in plan.program if isinstance(action, Recompute)}:
        find_operators(names)  # before anything is changed
    for action in plan.program[len(cuts) :]:
        PERFORMERS[type(action)](model, action, mesh)
    return model


def _check_belongs(model: nn.Module, plan: ShardingPlan, mesh: ParallelMesh) -> None:
    problems = Problems()
    if not plan.has_program:
        problems.add("plan.model", NO_PROGRAM)
    if mesh.layout != plan.layout:
        problems.add("plan.mesh", f"the mesh has the layout ({mesh.layout}), the plan has ({plan.layout})")
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    planned = {row.name: row.shape for row in plan.parameters}
    problems.extend(
        Refusal("plan.model", f"parameter {name!r} is in the model but not in the plan")
        for name in shapes.keys() - planned.keys()
    )
    problems.extend(
        Refusal("plan.model", f"parameter {name!r} is in the plan but not in the model")
        for name in planned.keys() - shapes.keys()
    )
    for name in shapes.keys() & planned.keys():
        if shapes[name] != planned[name]:
            problems.add(
                "plan.model", f"parameter {name!r} has shape {shapes[name]} in the model and {planned[name]} in the plan"
            )
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        problems.add("fsdp.already", "the model has FSDP units already")
    if problems:
        raise PlanError(sorted(problems))

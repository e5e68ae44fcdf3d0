"""The functions of NeMo AutoModel's parallelizer, under the same names."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor.parallel import ParallelStyle

from meshwright.distributed.class_names import class_name
from meshwright.distributed.data.fsdp_units import ShardFunction, gathered, refuse_parallelized, shard_by, shard_unit
from meshwright.errors import ModelError, PlanError
from meshwright.models.specs.registry import get_parallelization_strategy, spec_of
from meshwright.models.specs.strategy import check_depths, check_shard_function, name_of_function
from meshwright.nemo.tp_plans import _get_parallel_plan
from meshwright.plan.given.names import match_names

__all__ = [
    "_get_parallel_plan",
    "apply_fsdp2_sharding_recursively",
    "fsdp2_strategy_parallelize",
    "get_lm_ac_layers",
    "unshard_fsdp2_model",
]


# -- sharding ----------------------------------------------------------------------------------------------------------------


def fsdp2_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    sequence_parallel: bool = False,
    activation_checkpointing: bool = False,
    tp_shard_plan: Mapping[str, ParallelStyle | str] | str | None = None,
    dp_replicate_mesh_name: str = "dp_replicate",
    dp_shard_cp_mesh_name: str = "dp_shard_cp",
    tp_mesh_name: str = "tp",
    **others: Any,
) -> nn.Module:
    """Parallelize a model over an existing mesh, with the strategy of its family.

    All arguments are those of :meth:`~meshwright.models.specs.strategy.ParallelizationStrategy.parallelize`; ``others`` are its
    keywords beyond those of the reference page.
    """
    # By name, as in NeMo AutoModel: a strategy of the user may have them in another order.
    return get_parallelization_strategy(model).parallelize(
        model=model,
        device_mesh=device_mesh,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        sequence_parallel=sequence_parallel,
        activation_checkpointing=activation_checkpointing,
        tp_shard_plan=tp_shard_plan,
        dp_replicate_mesh_name=dp_replicate_mesh_name,
        dp_shard_cp_mesh_name=dp_shard_cp_mesh_name,
        tp_mesh_name=tp_mesh_name,
        **others,
    )


def apply_fsdp2_sharding_recursively(
    module: nn.Module,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None,
    offload_policy: OffloadPolicy | None = None,
    enable_fsdp2_prefetch: bool = False,
    fsdp2_backward_prefetch_depth: int = 2,
    fsdp2_forward_prefetch_depth: int = 1,
    reshard_after_forward: bool | None = None,
    fully_shard_fn: ShardFunction | None = None,
) -> None:
    """Make every entry of each ``ModuleList`` or ``ModuleDict`` an FSDP unit. Other parameters are left to the caller's root.

    What is inside an entry belongs to its unit, with its lists. A container inside a container is searched too, and is no unit.
    An entry that is the last of its container keeps its gathered parameters after forward, because backward starts there.

    Args:
        module: root of the search, changed in place.
        mesh: 1-D mesh (shard) or 2-D mesh (replicate, shard).
        mp_policy: dtypes; ``None``: bf16 compute, fp32 reduction.
        offload_policy: ``None``: no offload.
        enable_fsdp2_prefetch: let each unit start the all-gathers of the next ones of its container; otherwise FSDP2 decides.
        fsdp2_backward_prefetch_depth: how many, in backward; 0: FSDP2 decides.
        fsdp2_forward_prefetch_depth: how many, in forward; 0: FSDP2 decides.
        reshard_after_forward: if given, it holds for all units, including the last entry of each container.
        fully_shard_fn: makes a unit in place of torch's ``fully_shard``: ``fn(module, mesh=, mp_policy=, offload_policy=,
            reshard_after_forward=)``.

    Raises:
        PlanError: `fully_shard_fn` cannot be called so, or returns another module; or prefetching as chosen has no effect.
    """
    check_shard_function(fully_shard_fn)
    check_depths(bool(enable_fsdp2_prefetch), fsdp2_forward_prefetch_depth, fsdp2_backward_prefetch_depth)
    if enable_fsdp2_prefetch and not (fsdp2_forward_prefetch_depth or fsdp2_backward_prefetch_depth):
        raise PlanError(
            "fsdp.prefetch",
            "enable_fsdp2_prefetch=True: has no effect with both depths 0; legal are a depth of 1 or more, and "
            "enable_fsdp2_prefetch=False",
        )
    if enable_fsdp2_prefetch and reshard_after_forward is False:
        raise PlanError(
            "fsdp.prefetch",
            "enable_fsdp2_prefetch=True: has no effect with reshard_after_forward=False; legal with it is "
            "enable_fsdp2_prefetch=False",
        )
    policy = mp_policy or MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = offload_policy or OffloadPolicy()
    depths = (fsdp2_backward_prefetch_depth, fsdp2_forward_prefetch_depth) if enable_fsdp2_prefetch else (0, 0)
    children = list(module.children())
    entries = [child for child in children if _is_container(module) and not _is_container(child)]
    for child in children:
        if child not in entries:
            apply_fsdp2_sharding_recursively(
                child,
                mesh,
                policy,
                offload,
                enable_fsdp2_prefetch,
                fsdp2_backward_prefetch_depth,
                fsdp2_forward_prefetch_depth,
                reshard_after_forward,
                fully_shard_fn,
            )
            continue
        reshard = child is not children[-1] if reshard_after_forward is None else reshard_after_forward
        if fully_shard_fn is None:
            shard_unit([child], mesh, policy, offload, reshard)
        else:
            shard_by(
                fully_shard_fn, name_of_function(fully_shard_fn), child, type(child).__name__, mesh, policy, offload, reshard
            )
    _chain([entry for entry in entries if isinstance(entry, FSDPModule)], *depths)


def _chain(units: list[FSDPModule], backward: int, forward: int) -> None:
    """Let each unit start the all-gathers of the next ones."""
    for index, unit in enumerate(units):
        if ahead := units[index + 1 : index + 1 + forward]:
            unit.set_modules_to_forward_prefetch(ahead)
        if behind := units[max(0, index - backward) : index][::-1]:
            unit.set_modules_to_backward_prefetch(behind)


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def get_lm_ac_layers(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of a model, in model order: the layers that activation checkpointing applies to.

    For a plain module, these are the entries of its lists whose entries are all of one class and have parameters.

    Raises:
        ModelError: the model does not declare its layers, or a plain module has no such lists.
        PlanError: the model is parallelized already.
    """
    refuse_parallelized(model)
    patterns = spec_of(model).layers
    if not patterns:
        raise ModelError(
            "model.layers",
            f"{class_name(model)}: has no layers, which are entries of one class in a ModuleList or ModuleDict; register a "
            "strategy that declares them (docs/adding-a-family.md)",
        )
    return [module for name, module in model.named_modules() if any(match_names(pattern, [name]) for pattern in patterns)]


def unshard_fsdp2_model(model: nn.Module) -> AbstractContextManager[nn.Module]:
    """Inside this context, every FSDP unit of the model is gathered; at its end all are resharded, also after an exception."""
    return gathered(model)


# -- tensor parallel plans ---------------------------------------------------------------------------------------------------


# -- names -------------------------------------------------------------------------------------------------------------------

"""Undocumented names of torch that the files beside this one need.

:func:`check` looks them up when a mesh is built or a model is parallelized. A torch release that moved one of them is refused
with its name, instead of failing in the middle of a step or silently. ``tests/distributed/test_torch_compat.py`` checks that
every name these files use is in the tables, except optional ones.
"""

import inspect
from collections.abc import Iterator
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ParamModuleInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, FSDPStateContext
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from meshwright.errors import Refusal, UnsupportedError

__all__ = ["CEILING", "INSTANCE_ATTRIBUTES", "MINIMUM_TORCH", "NAMES", "check", "check_gathers_bytes", "untested"]

MINIMUM_TORCH = (2, 11)
CEILING = (2, 14)
"""The newest torch that the tests have run with."""

NAMES: dict[Any, tuple[str, ...]] = {
    distributed_c10d: (
        "_get_default_group",
        "_get_default_store",
        "_set_pg_timeout",
        "default_pg_nccl_timeout",
        "default_pg_timeout",
    ),
    dist.Store: ("clone",),
    dist.ProcessGroup: ("_device_types", "_get_backend", "unbox"),
    DeviceMesh: ("_concatenate", "_flatten", "_init_one_process_group", "get_all_groups"),
    FSDPModule: (
        "_get_fsdp_state",
        "set_force_sum_reduction_for_comms",
        "set_gradient_divide_factor",
        "set_reshard_after_forward",
    ),
    FSDPParamGroup: (
        "_record_post_forward",
        "_register_post_backward_hook",
        "_reshard_after_forward",
        "is_unsharded",
        "lazy_init",
        "post_backward",
        "pre_backward",
        "pre_forward",
        "wait_for_unshard",
    ),
    FSDPParam: ("reset_sharded_param", "to_accumulated_grad_if_needed"),
    FSDPState: ("_lazy_init", "_post_forward", "_pre_forward", "_root_post_backward_final_callback"),
    TrainingState: ("IDLE", "POST_BACKWARD", "PRE_BACKWARD"),
    torch._C: (
        "DispatchKey",
        "_SetExcludeDispatchKeyGuard",
        "_current_autograd_node",
        "_current_graph_task_id",
        "_dispatch_get_all_op_names",
    ),
    torch._C.DispatchKey: ("ADInplaceOrView", "CompositeImplicitAutograd"),
    torch._ops.OpOverload: ("has_kernel_for_dispatch_key",),
    torch.autograd.Variable: ("_execution_engine",),
    torch.UntypedStorage: ("_cdata",),
}
"""Owner to attributes that it has."""

INSTANCE_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    FSDPParamGroup: (
        "_all_gather_result",
        "_partial_reduce_output",
        "_post_forward_indices",
        "_training_state",
        "all_reduce_grads",
        "fsdp_params",
        "mesh_info",
        "reduce_grads",
        "reshard_after_backward",
    ),
    FSDPParam: (
        "_module_info",
        "_sharded_param_data",
        "_sharding_spec",
        "_unsharded_param",
        "sharded_param",
        "unsharded_accumulated_grad",
    ),
    FSDPState: (
        "_auto_reshard_after_forward",
        "_comm_ctx",
        "_fsdp_param_group",
        "_is_root",
        "_post_forward_hook_handle",
        "_pre_forward_hook_handle",
        "_state_ctx",
        "_training_state",
    ),
    FSDPStateContext: ("iter_forward_root", "post_backward_final_callback_queued"),
    FSDPCommContext: ("post_forward_order",),
    FSDPMeshInfo: ("mesh",),
    ParamModuleInfo: ("module", "param_name"),
    DTensor: ("_local_tensor",),
    _StridedShard: ("split_factor",),
}
"""Class to attributes that its objects have. One that moved would be created anew in silence, or be taken for not there yet."""

GLOO = ("create_default_device", "create_device", "_Options._devices", "_Options._threads", "_Options._timeout")
"""Attributes of ``ProcessGroupGloo``, where there is one."""


def check() -> None:
    """Refuse a torch that lacks a name used here.

    Raises:
        UnsupportedError: names the release and what is missing.
    """
    missing = [Refusal("torch.version", f"torch {torch.__version__}: {line}") for line in _missing()]
    if missing:
        raise UnsupportedError(missing)


def check_gathers_bytes(knob: str) -> None:
    """Refuse a torch whose FSDP2 makes numbers of bytes when it shards or gathers them (pytorch issue 177844).

    Args:
        knob: what asks for it.

    Raises:
        UnsupportedError: names the release.
    """
    dtypes = getattr(FSDPParam, "init_dtype_attrs", None)
    if dtypes is None or "is_floating_point" not in dtypes.__code__.co_names:
        raise UnsupportedError(
            "torch.version", f"{knob}: FSDP2 of torch {torch.__version__} shards numbers alone, and no bytes; take torch 2.13"
        )


def untested() -> str:
    """What to tell about a torch that is newer than all that the tests have run with; empty for another."""
    newest = ".".join(map(str, CEILING))
    return f"torch {torch.__version__}: Meshwright's tests have run with {newest} at the newest" if _version() > CEILING else ""


def _missing() -> Iterator[str]:
    if _version() < MINIMUM_TORCH:
        yield f"Meshwright needs {'.'.join(map(str, MINIMUM_TORCH))} or later"
    for owner, names in NAMES.items():
        yield from (f"{owner.__name__} has no {name}" for name in names if not hasattr(owner, name))
    for kind, names in INSTANCE_ATTRIBUTES.items():
        known = _names_in(kind)
        yield from (f"objects of {kind.__name__} have no {name}" for name in names if name not in known)
    if dist.is_gloo_available():
        yield from (f"ProcessGroupGloo has no {name}" for name in GLOO if not _has(distributed_c10d.ProcessGroupGloo, name))


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def _names_in(kind: type) -> set[str]:
    """Attributes that the methods of a class and of those above it use, and that these declare."""
    names: set[str] = set()
    for base in kind.__mro__:
        names |= set(vars(base)) | set(vars(base).get("__annotations__", {}))
        methods = (inspect.unwrap(item) for item in vars(base).values() if isinstance(item, FunctionType))
        names |= {name for method in methods if isinstance(method, FunctionType) for name in method.__code__.co_names}
    return names


def _has(owner: Any, path: str) -> bool:
    """Whether there is an attribute of an attribute."""
    try:
        attrgetter(path)(owner)
    except AttributeError:
        return False
    return True

"""Units of FSDP2: their state, their parameter groups, and the hooks around their forwards.

Note on twin units. Two modules with the same parameters are to be two FSDP units. FSDP2 refuses that, so the second unit is
wrapped around copies of the parameters, and its module attributes are set to the ``sharded_param`` of the first unit
(:mod:`~meshwright.distributed.data.twin_units`). That is enough for shards without padding: in its first forward
(``reset_sharded_param``) the second unit takes a view of the first one's shard. A shard that has to be padded is copied:
``_sharded_param_data`` of the second unit and ``sharded_param._local_tensor`` then use new memory, and the first unit goes on
to all-gather from the old one, which the optimizer no longer updates. So :func:`share_shards` gives the second unit the
``sharded_param``, ``_sharded_param_data`` and ``_sharding_spec`` of the first, before that can happen.

Note on one unit of two modules. FSDP2 treats modules that are wrapped together as one run: it unshards before the forward of
the first, and reshards after the forward of the last. For two layers that share parameters and run in different passes, this
would keep all of them unsharded from the first pass to the second. :func:`hook_each_run` puts FSDP's hooks on each module.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from meshwright.distributed._torch_compat.tensors import memory_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

__all__ = [
    "before_each_run",
    "before_first_run",
    "finish_prefetch",
    "forget_runs_without_gradient",
    "fsdp_state",
    "holders",
    "hook_each_run",
    "is_set_up",
    "is_unsharded",
    "owned_parameters",
    "param_groups",
    "reduce_at_the_end",
    "replicate_module",
    "reshards_after_forward",
    "set_up",
    "share_shards",
]


def replicate_module(
    modules: list[nn.Module], mesh: DeviceMesh, mp_policy: "MixedPrecisionPolicy", offload_policy: "OffloadPolicy"
) -> None:
    """Make modules one unit of torch's ``replicate``: the FSDP2 engine with whole parameters, and one all-reduce a unit.

    The modules become ``FSDPModule`` too, so the state machine of gradient sync is the same as with shards.
    """
    replicate(modules if len(modules) > 1 else modules[0], mesh=mesh, mp_policy=mp_policy, offload_policy=offload_policy)


def fsdp_state(module: nn.Module | FSDPModule) -> Any:
    """The FSDP state of a module, or ``None``. Modules that were wrapped together share one."""
    return module._get_fsdp_state() if isinstance(module, FSDPModule) else None


def param_groups(module: nn.Module | FSDPModule) -> list[Any]:
    """The parameter groups that a unit unshards and reduces. Empty for a unit without parameters of its own."""
    state = fsdp_state(module)
    if state is None:
        return []
    if hasattr(state, "_fsdp_param_groups"):  # torch 2.13 and later: one group for each mesh
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group
    return [] if group is None else [group]


def owned_parameters(module: nn.Module | FSDPModule) -> list[nn.Parameter]:
    """The sharded parameters of this unit, without those of units inside it."""
    return [fsdp_param.sharded_param for group in param_groups(module) for fsdp_param in group.fsdp_params]


def holders(module: nn.Module | FSDPModule) -> list[nn.Module]:
    """The modules that hold the parameters of this unit."""
    return [fsdp_param._module_info.module for group in param_groups(module) for fsdp_param in group.fsdp_params]


def is_unsharded(module: nn.Module | FSDPModule) -> bool:
    """Whether a unit holds unsharded parameters now."""
    return any(group.is_unsharded for group in param_groups(module))


def is_set_up(module: nn.Module | FSDPModule) -> bool:
    """Whether a unit, or its root, ran forward once. Before that a unit does not know its root and its streams."""
    return fsdp_state(module)._is_root is not None


def set_up(root: nn.Module) -> None:
    """Let all units know their root, if it is one, before a unit inside it runs without it."""
    state = fsdp_state(root)
    if state is not None and state._is_root is None:
        state._lazy_init()


def finish_prefetch(module: nn.Module | FSDPModule) -> None:
    """Finish a prefetch that nothing has used: wait for its all-gather. The unit is unsharded afterwards."""
    for group in param_groups(module):
        if group._all_gather_result is not None:
            group.wait_for_unshard()


def reshards_after_forward(module: nn.Module | FSDPModule, *, is_root: bool) -> bool:
    """Whether a unit reshards after forward, by its current flags.

    A root that was wrapped without ``reshard_after_forward`` does not reshard, and learns in its first forward that it is one.
    """
    state = fsdp_state(module)
    if is_root and getattr(state, "_auto_reshard_after_forward", False):
        return False
    return any(group._reshard_after_forward for group in param_groups(module))


def hook_each_run(unit: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Make a unit unshard and reshard around each forward of each of some modules (note at the head)."""
    state = fsdp_state(unit)
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    for module in modules:
        module.register_forward_pre_hook(state._pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(state._post_forward, prepend=False)


def reduce_at_the_end(unit: nn.Module) -> None:
    """Make a unit reduce at the end of backward, and not after those of its runs whose input has a gradient."""
    for group in param_groups(unit):
        group._register_post_backward_hook = lambda args, kwargs: (args, kwargs)


def forget_runs_without_gradient(module: nn.Module | FSDPModule) -> None:
    """Leave forwards under ``no_grad`` out of the recorded order of units, from which FSDP2 prefetches in backward."""
    for group in param_groups(module):
        record = group._record_post_forward

        def recorded(record: Any = record) -> None:
            if torch.is_grad_enabled():
                record()

        group._record_post_forward = recorded


def before_each_run(root: nn.Module | FSDPModule, do: Callable[[], None]) -> None:
    """Call a function at the start of each forward of a root, also of a registered forward method.

    The first call comes before the units are initialised for their first run.
    """
    state = fsdp_state(root)
    initialize = state._lazy_init

    def first_do() -> None:
        do()
        initialize()

    state._lazy_init = first_do


def before_first_run(unit: nn.Module | FSDPModule, do: Callable[[], None]) -> None:
    """Call a function before a unit is initialised for its first run, whatever its root is."""
    for group in param_groups(unit):
        group.lazy_init = partial(_first, do, group.lazy_init)


def _first(do: Callable[[], None], initialize: Callable[[], None]) -> None:
    do()
    initialize()


def share_shards(first: nn.Module | FSDPModule, second: nn.Module | FSDPModule) -> None:
    """Make two units with the same parameters use the shards of the first (note at the head). Idempotent.

    Call it before their first forward.
    """
    for ours, theirs in zip(param_groups(first), param_groups(second), strict=True):
        for own, other in zip(ours.fsdp_params, theirs.fsdp_params, strict=True):
            # Memory is compared, not tensors: for fake tensors torch makes a new view of the shard in the first forward.
            same_memory = memory_of(other._sharded_param_data) == memory_of(own._sharded_param_data)
            if other.sharded_param is own.sharded_param and same_memory:
                continue
            own.reset_sharded_param()
            place = other._module_info
            other.sharded_param = own.sharded_param
            other._sharded_param_data, other._sharding_spec = own._sharded_param_data, own._sharding_spec
            setattr(place.module, place.param_name, own.sharded_param)

"""What a unit does within a microbatch. FSDP2 does not count forwards, backwards and reductions; this module does.

Note on reductions. FSDP2 calls ``post_backward`` of a parameter group after each backward through its unit, and once more at
the end of the whole backward (``_root_post_backward_final_callback``) for each group whose ``_training_state`` is not
``POST_BACKWARD``. It reduces the parameters that have a gradient: ``unsharded_accumulated_grad`` (kept from earlier
microbatches) or ``_unsharded_param.grad`` (of this one), all in one flat buffer. That is wrong in two cases.

1. Ranks, or microbatches, use different parameters of one unit. Their flat buffers then hold different parameters, and the
   reduction adds the gradient of one parameter to that of another. Here, before a unit that ran is reduced, each trainable
   parameter without a gradient gets a gradient of zeros. (``set_reduce_scatter_unused_params`` of torch 2.13 does this too. It
   misses gradients that earlier microbatches kept in another dtype, and units that ran in earlier microbatches only.)
2. A unit runs several times in a microbatch. FSDP2 would reduce after each of its backwards. Here forwards and backwards are
   counted, and the unit is reduced when their numbers are equal. But a forward need not have a backward: its loss may be
   dropped, or may not depend on it. Such a forward looks like one whose backward is still to come until the whole backward
   ends. So a group with forwards left over is put into the state ``IDLE``, which makes FSDP2 call its ``post_backward`` at
   the end of the backward. That call comes from outside of any autograd node, nothing in this backward can follow it, and so it
   always reduces.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from meshwright.distributed._torch_compat.tensors import in_backward
from meshwright.distributed._torch_compat.unit_state import finish_prefetch, fsdp_state, is_set_up, param_groups

__all__ = [
    "Event",
    "after_backward",
    "data_groups",
    "end_backward",
    "forget_runs",
    "keep_between_runs",
    "open_reductions",
    "post_backward",
    "reset_iteration",
    "supervise",
    "take_use",
    "tell_events",
    "waits_for_reduction",
]

_RESTING = TrainingState.IDLE


class Event(StrEnum):
    """An event of a unit. Each may be a collective, so all ranks must have the same events in the same order."""

    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCTION = "reduction"


@dataclass
class _GroupState:
    """What :func:`supervise` records of a parameter group.

    Attributes:
        data_group: the process group of all ranks that read data for this unit; ``None``: unknown.
        runs: number of forwards whose backward has not come yet.
        stays: whether the unit stays unsharded between two of its backwards.
        ran: whether the unit ran with gradient since it was last reduced.
        used: indices, in the group, of the parameters that had a gradient in a reduction since :func:`take_use`.
        fresh: indices of the parameters that were reduced since then and had no sharded gradient before.
        tell: is called with each event, before it happens.
        at_end: is called at the end of the next backward.
    """

    data_group: dist.ProcessGroup | None = None
    runs: int = 0
    stays: bool = False
    ran: bool = False
    used: set[int] = field(default_factory=set)
    fresh: set[int] = field(default_factory=set)
    tell: Callable[[Event], None] | None = None
    at_end: Callable[[], None] | None = None

    def say(self, event: Event) -> None:
        if self.tell is not None:
            self.tell(event)


def supervise(module: nn.Module | FSDPModule, data_group: dist.ProcessGroup | None = None) -> None:
    """Make a unit reduce once for all its runs in a microbatch, and reduce all its trainable parameters if it ran.

    The note at the head of this module says why, and how. A second call changes nothing. It is for every unit, also of a model
    that claims to use all its parameters: the check of the claim reads what is recorded here, and the zeros are what keeps the
    collectives matched until it has reported. The cost is a pass over the unit's parameters when it is reduced.

    Args:
        module: the unit.
        data_group: the process group of all ranks that read data for the unit; ``None``: unknown.
    """
    for group in param_groups(module):
        if not hasattr(group, "_meshwright_course"):
            course = group._meshwright_course = _GroupState(data_group)
            group.pre_forward = partial(_pre_forward, course, group.pre_forward)
            group.pre_backward = partial(_pre_backward, group, course, group.pre_backward)
            group._register_post_backward_hook = partial(_count_run, course, group._register_post_backward_hook)
            group.post_backward = partial(_post_backward, group, course, group.post_backward)


def _pre_forward(course: _GroupState, pre_forward: Any, *args: Any) -> Any:
    if not in_backward():  # a forward within backward is a recomputation
        course.say(Event.FORWARD)
        course.ran |= torch.is_grad_enabled()
    return pre_forward(*args)


def _pre_backward(group: Any, course: _GroupState, pre_backward: Any, *args: Any) -> None:
    if group._training_state != TrainingState.PRE_BACKWARD:
        course.say(Event.BACKWARD)
    pre_backward(*args)


def _count_run(course: _GroupState, register: Any, args: Any, kwargs: Any) -> Any:
    registered = register(args, kwargs)
    # A recomputation (activation checkpointing, within backward) has no backward of its own.
    course.runs += not in_backward() and (registered[0] is not args or registered[1] is not kwargs)
    return registered


def _post_backward(group: Any, course: _GroupState, post_backward: Any, *unused: Any) -> None:
    if course.at_end is not None and in_backward():
        call, course.at_end = course.at_end, None
        # FSDP's roots queue callbacks later than this one. Queueing from within a callback puts `call` behind them.
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(call))
    if not _was_gathered(group):  # the unit never ran, so it has no unsharded parameters, which FSDP2 would look for
        group._training_state = TrainingState.POST_BACKWARD
        return
    outside = torch._C._current_autograd_node() is None
    course.runs = 0 if outside else max(0, course.runs - 1)
    reduces, reshards, last = group.reduce_grads, group.reshard_after_backward, course.runs == 0
    group.reduce_grads = reduces and last
    group.reshard_after_backward = reshards and (last or not course.stays)
    try:
        if group.reduce_grads:
            _complete_gradients(group, course)
        post_backward(*unused)
    finally:
        group.reduce_grads, group.reshard_after_backward = reduces, reshards
    if not last:
        group._training_state = _RESTING  # the next backward of the unit may begin from this state too


def _was_gathered(group: Any) -> bool:
    return all(hasattr(fsdp_param, "_unsharded_param") for fsdp_param in group.fsdp_params)


def _complete_gradients(group: Any, course: _GroupState) -> None:
    """Before a group is reduced, give its trainable parameters without a gradient a gradient of zeros, in one dtype."""
    trained = {index: item for index, item in enumerate(group.fsdp_params) if item.sharded_param.requires_grad}
    kept = {index for index, item in trained.items() if item.unsharded_accumulated_grad is not None}
    used = kept | {index for index, item in trained.items() if item._unsharded_param.grad is not None}
    # Sums that were reduced within each replica still have to be all-reduced across replicas, even if the unit ran no more.
    ran = course.ran or (group.all_reduce_grads and group._partial_reduce_output is not None)
    course.ran = False
    if not trained or not (ran or used):
        return
    course.say(Event.REDUCTION)
    course.used |= used
    course.fresh |= {index for index, item in trained.items() if item.sharded_param.grad is None}
    for index, item in trained.items():
        if index not in used:
            item._unsharded_param.grad = torch.zeros_like(item._unsharded_param)
        if kept and index not in kept:
            item.to_accumulated_grad_if_needed()


def waits_for_reduction(module: nn.Module | FSDPModule) -> bool:
    """Whether a unit ran with gradient and was not reduced since, or holds sums that were not all-reduced across replicas."""
    return any(
        group._meshwright_course.ran or group._partial_reduce_output is not None
        for group in param_groups(module)
        if _was_gathered(group)
    )


def take_use(module: nn.Module | FSDPModule) -> list[tuple[nn.Parameter, bool, bool]]:
    """Return and reset what was recorded since the last call.

    Returns:
        For each trainable parameter of the unit: the parameter, whether it had a gradient on this rank, and whether its sharded
        gradient was made since the last call.
    """
    parameters = []
    for group in param_groups(module):
        course = group._meshwright_course
        for index, item in enumerate(group.fsdp_params):
            if item.sharded_param.requires_grad:
                parameters.append((item.sharded_param, index in course.used, index in course.fresh))
        course.used, course.fresh = set(), set()
    return parameters


def tell_events(module: nn.Module | FSDPModule, tell: Callable[[Event], None] | None) -> None:
    """Call a function before each forward, backward and reduction of a unit; ``None``: stop calling it."""
    for group in param_groups(module):
        group._meshwright_course.tell = tell


def forget_runs(module: nn.Module | FSDPModule) -> None:
    """Expect no backward of the forwards that a unit ran so far."""
    for group in param_groups(module):
        group._meshwright_course.runs = 0


def keep_between_runs(module: nn.Module | FSDPModule, keep: bool) -> None:
    """Say whether a unit that runs several times stays unsharded between its backwards."""
    for group in param_groups(module):
        group._meshwright_course.stays = keep


def after_backward(module: nn.Module | FSDPModule, call: Callable[[], None]) -> None:
    """Call a function at the end of the next backward in which a unit takes part."""
    for group in param_groups(module):
        group._meshwright_course.at_end = call


def data_groups(module: nn.Module | FSDPModule) -> list[dist.ProcessGroup]:
    """The process groups, of more than one rank, whose union is all ranks that read data for a unit."""
    groups = []
    for group in param_groups(module):
        data_group, mesh = group._meshwright_course.data_group, group.mesh_info.mesh
        groups += [mesh.get_group(axis) for axis in range(mesh.ndim)] if data_group is None else [data_group]
    return [group for group in groups if dist.get_world_size(group) > 1]


def post_backward(module: nn.Module | FSDPModule) -> None:
    """Reduce and reshard a unit according to its flags, as FSDP does after its backward. Idempotent."""
    for group in param_groups(module) if is_set_up(module) else ():
        group.post_backward()


def end_backward(module: nn.Module | FSDPModule) -> None:
    """If a unit is a root, do what FSDP does at the end of a backward: wait for reductions, and reset the states."""
    state = fsdp_state(module)
    if state._is_root:
        state._root_post_backward_final_callback()


def reset_iteration(module: nn.Module | FSDPModule) -> None:
    """Reset a unit after an iteration that failed: reshard it, and drop its gradients and the reductions under way."""
    state = fsdp_state(module)
    _drop_reductions(module, state)
    state._training_state = _RESTING
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    state._comm_ctx.post_forward_order.clear()
    for group in param_groups(module):
        group._training_state = _RESTING
        group._post_forward_indices.clear()
        group._partial_reduce_output = None
        group._meshwright_course.ran = False
    forget_runs(module)
    take_use(module)
    finish_prefetch(module)
    for group in param_groups(module):
        for fsdp_param in group.fsdp_params:
            fsdp_param.unsharded_accumulated_grad = None
            if hasattr(fsdp_param, "_unsharded_param"):
                fsdp_param._unsharded_param.grad = None


_REDUCTIONS = {
    "context": ("all_gather_state", "reduce_scatter_state"),
    "group": ("_all_reduce_state", "_post_reduce_event", "_reshard_after_forward_event"),
}
"""Where FSDP2 before torch 2.13 keeps the buffers and events of collectives under way, which the next step would wait for."""


def open_reductions(module: nn.Module | FSDPModule) -> list[object]:
    """What FSDP2 keeps of reductions under way: buffers, and events to wait for."""
    context = fsdp_state(module)._comm_ctx
    names = ("reduce_scatter_states", "_last_post_reduce_events", "reduce_scatter_state")  # the last one before torch 2.13
    return [kept for name in names if (kept := getattr(context, name, None))]


def _drop_reductions(module: nn.Module | FSDPModule, state: Any) -> None:
    """Wait for the collectives that a failed iteration began, and free their buffers."""
    reset: Callable[[], None] | None = getattr(module, "reset_iter_state", None)  # torch 2.13
    if reset is not None:
        if state._is_root:
            reset()
        return
    owners = [(state._comm_ctx, _REDUCTIONS["context"]), *((group, _REDUCTIONS["group"]) for group in param_groups(module))]
    for owner, names in owners:
        for name in names:
            kept = getattr(owner, name, None)
            event = getattr(kept, "event", kept)
            if event is not None:
                event.synchronize()
            if kept is not None:
                setattr(owner, name, None)

"""What a unit does in a microbatch: the course of its forwards, backwards and reductions, which FSDP2 does not count."""

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
from meshwright.distributed._torch_compat.units import fsdp_state, is_set_up, param_groups, settle

__all__ = [
    "Event",
    "after_backward",
    "data_groups",
    "end_backward",
    "forget_runs",
    "keep_between_runs",
    "post_backward",
    "reset_iteration",
    "supervise",
    "take_use",
    "tell_events",
    "waits_for_reduction",
]

_RESTING = TrainingState.IDLE


class Event(StrEnum):
    """What a unit does that all ranks have to do in the same order, because it may be a collective."""

    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCTION = "reduction"


@dataclass
class _Course:
    """What :func:`supervise` knows of a parameter group beside what FSDP2 knows itself.

    Attributes:
        runs: forwards whose backward is still to come.
        stays: whether it stays gathered from one of its backwards to the next.
        ran: whether it ran with gradient since it last reduced.
        used: parameters, by their number in the group, that had a gradient in a reduction since :func:`take_use`.
        fresh: those that were reduced since then and had no sharded gradient before.
        tell: takes each event before it happens.
        at_end: is called at the end of the next backward.
        data_group: of all ranks that read data for this unit; ``None``: unknown.
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
    """Let a unit reduce once for all its runs in a microbatch, and all its trainable parameters if it ran.

    A second call changes nothing: the first one's ``data_group``, the ranks that read data for the unit, stays.

    FSDP2 reduces what has a gradient. So ranks, or microbatches, that use different parameters of a unit would add the
    gradient of one parameter to that of another, for a reduction is one flat buffer. Here a parameter without a gradient is
    reduced as zeros wherever its unit ran. (``set_reduce_scatter_unused_params`` of torch 2.13 does so too. It knows
    neither gradients that were kept from earlier microbatches in another dtype, nor units that ran in earlier ones only.)

    A unit may run several times. FSDP2 reduces after each backward what was kept until then. Here forwards and backwards are
    counted, and the unit reduces where they are even. Not every forward has a backward: its loss may be dropped, or not
    depend on it. Nothing tells such a forward from one whose backward is still to come, until the backward of the whole model
    ends. FSDP2 then calls ``post_backward`` once more, from outside of any node of autograd, for each group that is not in the
    state that ``post_backward`` leaves it in. So a group that waits for more is not left in that state, and this call,
    behind which nothing can come in the same backward, is the last whatever was counted.
    """
    for group in param_groups(module):
        if not hasattr(group, "_meshwright_course"):
            course = group._meshwright_course = _Course(data_group)
            group.pre_forward = partial(_pre_forward, course, group.pre_forward)
            group.pre_backward = partial(_pre_backward, group, course, group.pre_backward)
            group._register_post_backward_hook = partial(_count_run, course, group._register_post_backward_hook)
            group.post_backward = partial(_post_backward, group, course, group.post_backward)


def _pre_forward(course: _Course, pre_forward: Any, *args: Any) -> Any:
    if not in_backward():  # there it is a recomputation
        course.say(Event.FORWARD)
        course.ran |= torch.is_grad_enabled()
    return pre_forward(*args)


def _pre_backward(group: Any, course: _Course, pre_backward: Any, *args: Any) -> None:
    if group._training_state != TrainingState.PRE_BACKWARD:
        course.say(Event.BACKWARD)
    pre_backward(*args)


def _count_run(course: _Course, register: Any, args: Any, kwargs: Any) -> Any:
    found = register(args, kwargs)
    # One that activation checkpointing runs again, in backward, has no backward of its own.
    course.runs += not in_backward() and (found[0] is not args or found[1] is not kwargs)
    return found


def _post_backward(group: Any, course: _Course, post_backward: Any, *unused: Any) -> None:
    if course.at_end is not None and in_backward():
        call, course.at_end = course.at_end, None
        # Behind the callbacks of FSDP's roots, some of which are queued later than this one.
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(call))
    if not _was_gathered(group):  # FSDP2 would look for the gathered parameters that a unit that never ran never had
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
        group._training_state = _RESTING  # the next run's backward begins from it as well as from POST_BACKWARD


def _was_gathered(group: Any) -> bool:
    return all(hasattr(fsdp_param, "_unsharded_param") for fsdp_param in group.fsdp_params)


def _complete_gradients(group: Any, course: _Course) -> None:
    """Before a group reduces: gradients of zero for trainable parameters that have none, all of them in one dtype."""
    trained = {index: item for index, item in enumerate(group.fsdp_params) if item.sharded_param.requires_grad}
    kept = {index for index, item in trained.items() if item.unsharded_accumulated_grad is not None}
    used = kept | {index for index, item in trained.items() if item._unsharded_param.grad is not None}
    # Sums that were reduced inside each replica are due to be reduced across replicas, whether the unit ran again or not.
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
    """Whether a unit ran with gradient, or holds sums of its replica alone, and has not reduced since."""
    return any(
        group._meshwright_course.ran or group._partial_reduce_output is not None
        for group in param_groups(module)
        if _was_gathered(group)
    )


def take_use(module: nn.Module | FSDPModule) -> list[tuple[nn.Parameter, bool, bool]]:
    """Of each trainable parameter of a unit: whether it had a gradient on this rank since the last call of this, and whether
    the sharded gradient that it has now was made since then.
    """
    found = []
    for group in param_groups(module):
        course = group._meshwright_course
        for index, item in enumerate(group.fsdp_params):
            if item.sharded_param.requires_grad:
                found.append((item.sharded_param, index in course.used, index in course.fresh))
        course.used, course.fresh = set(), set()
    return found


def tell_events(module: nn.Module | FSDPModule, tell: Callable[[Event], None] | None) -> None:
    """Have a function called before a unit runs, goes back through itself, or reduces; ``None``: no more."""
    for group in param_groups(module):
        group._meshwright_course.tell = tell


def forget_runs(module: nn.Module | FSDPModule) -> None:
    """Let a unit wait for no backward of the forwards that it ran so far."""
    for group in param_groups(module):
        group._meshwright_course.runs = 0


def keep_between_runs(module: nn.Module | FSDPModule, keep: bool) -> None:
    """Whether a unit that runs several times stays gathered from one of its backwards to the next."""
    for group in param_groups(module):
        group._meshwright_course.stays = keep


def after_backward(module: nn.Module | FSDPModule, call: Callable[[], None]) -> None:
    """Call something at the end of the next backward that ends a unit."""
    for group in param_groups(module):
        group._meshwright_course.at_end = call


def data_groups(module: nn.Module | FSDPModule) -> list[dist.ProcessGroup]:
    """The process groups of more than one rank that together reach all ranks that read data for a unit."""
    found = []
    for group in param_groups(module):
        whole, mesh = group._meshwright_course.data_group, group.mesh_info.mesh
        found += [mesh.get_group(axis) for axis in range(mesh.ndim)] if whole is None else [whole]
    return [group for group in found if dist.get_world_size(group) > 1]


def post_backward(module: nn.Module | FSDPModule) -> None:
    """What FSDP does behind the backward of a unit: reduce and free it, as it is set. Nothing, where it was done already."""
    for group in param_groups(module) if is_set_up(module) else ():
        group.post_backward()


def end_backward(module: nn.Module | FSDPModule) -> None:
    """What FSDP does at the end of a backward, where a unit is a root that ran: wait for reductions, and be at rest."""
    state = fsdp_state(module)
    if state._is_root:
        state._root_post_backward_final_callback()


def reset_iteration(module: nn.Module | FSDPModule) -> None:
    """Bring a unit back to rest after an iteration that failed: nothing gathered, no gradient kept unsharded."""
    state = fsdp_state(module)
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
    settle(module)
    for group in param_groups(module):
        for fsdp_param in group.fsdp_params:
            fsdp_param.unsharded_accumulated_grad = None
            if hasattr(fsdp_param, "_unsharded_param"):
                fsdp_param._unsharded_param.grad = None

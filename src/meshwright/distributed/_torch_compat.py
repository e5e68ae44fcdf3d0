"""Every private name of torch that Meshwright touches, and nothing else.

Each is looked up once here. :func:`check` runs before a process group is used, so that a torch release that moved one
of them is refused with its name, not with an ``AttributeError`` in the middle of a step.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import _disable_current_modes

from meshwright.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

__all__ = [
    "MINIMUM_TORCH",
    "Event",
    "after_backward",
    "alias",
    "all_gather_single",
    "backward_of_stage",
    "before_each_run",
    "check",
    "concatenate_meshes",
    "control_store",
    "data_groups",
    "device_of_control",
    "end_backward",
    "flatten_mesh",
    "flight_records",
    "forget_runs",
    "forget_runs_without_gradient",
    "fsdp_state",
    "group_of_call",
    "group_ranks",
    "hook_each_run",
    "in_backward",
    "inherit_timeout",
    "is_decomposed",
    "is_set_up",
    "is_unsharded",
    "keep_between_runs",
    "memory_of",
    "one_gloo_worker",
    "operator_names",
    "operator_schema",
    "own_backward_of_stage",
    "own_memory",
    "owned_parameters",
    "param_groups",
    "plain_placements",
    "post_backward",
    "reduce_scatter_single",
    "replicate_module",
    "reset_iteration",
    "reshards_after_forward",
    "settle",
    "share_shards",
    "strided_shard",
    "supervise",
    "take_use",
    "tell_events",
    "unseen",
    "waits_for_reduction",
]

MINIMUM_TORCH = (2, 11)
_WITH_TIMEOUT = tuple(
    kind for kind in (getattr(distributed_c10d, f"ProcessGroup{name}", None) for name in ("Gloo", "NCCL")) if kind is not None
)
_RESTING = TrainingState.IDLE


# torch 2.13 renamed both; 2.11 has only the older names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def one_gloo_worker() -> None:
    """Let every gloo group that is made from here on run its collectives in one thread, not in two. Idempotent.

    Both threads of a group write the name of the collective that ended last into one string without a lock. Names of over 15
    letters (functional all-gathers, so DTensor's) live on the heap, which is corrupted once in some thousand jobs
    (docs/upstream.md). The order of a group's collectives is the same on all ranks, so one thread is enough.
    """
    if not dist.is_gloo_available():
        return
    gloo: Any = distributed_c10d.ProcessGroupGloo
    if getattr(gloo.__init__, "_meshwright", False):
        return
    create = gloo.__init__

    def create_with_one_thread(self: Any, store: Any, rank: int, size: int, *given: Any, **named: Any) -> None:
        options = next((item for item in (*given, *named.values()) if isinstance(item, gloo._Options)), None)
        if options is None:
            options = gloo._Options()
            # Read as torch reads it: one device for each interface, or the one that the host's name leads to.
            interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
            options._devices = [gloo.create_device(interface=name) for name in interfaces] or [gloo.create_default_device()]
            timeout = given[0] if given else named.get("timeout")
            options._timeout = distributed_c10d.default_pg_timeout if timeout is None else timeout
        options._threads = 1
        create(self, store, rank, size, options)

    create_with_one_thread._meshwright = True  # type: ignore[attr-defined]
    gloo.__init__ = create_with_one_thread


def inherit_timeout(mesh: DeviceMesh) -> None:
    """Give the groups of a mesh the timeout of the default group. By itself torch gives them that of their backend: half an
    hour for gloo, ten minutes for NCCL. A group that has another one, which its maker chose, keeps it.
    """
    own = {distributed_c10d.default_pg_timeout, distributed_c10d.default_pg_nccl_timeout}
    wanted = _timeout_of(distributed_c10d._get_default_group())
    for group in mesh.get_all_groups():
        if wanted is not None and _timeout_of(group) in own:
            distributed_c10d._set_pg_timeout(wanted, group)


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout of a group; ``None`` where its backends have none."""
    backends = [group._get_backend(device) for device in group._device_types]
    return next((backend.options._timeout for backend in backends if isinstance(backend, _WITH_TIMEOUT)), None)


def control_store(prefix: str) -> dist.Store:
    """The store of the default group, over a connection of its own: a thread that waits on it makes no other thread wait.

    Args:
        prefix: of the keys.
    """
    return dist.PrefixStore(f"meshwright/{prefix}", distributed_c10d._get_default_store().clone())  # type: ignore[attr-defined]


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The 1-D mesh over all ranks of ``mesh``, called ``name`` and known to its root mesh."""
    return mesh._flatten(name)


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the axes of several submeshes of the same root; no new process groups."""
    return DeviceMesh._concatenate(list(meshes))


def strided_shard(dim: int, pieces: int) -> Placement:
    """The placement of a dimension that holds several tensors one after another, each of which is sharded."""
    return _StridedShard(dim, split_factor=pieces)


def plain_placements(tensor: DTensor) -> tuple[Placement, ...] | None:
    """Placements without strides that only slice a packed dimension; ``None`` where there are none of these.

    FSDP's own strides stay: they stand for a dimension that a later axis of the mesh shards too, and DCP knows them.
    """
    found = list(tensor.placements)
    for axis, placement in enumerate(found):
        if isinstance(placement, _StridedShard):
            later = [other for other in found[axis + 1 :] if isinstance(other, Shard) and other.dim == placement.dim]
            if not later:
                found[axis] = Shard(placement.dim)
    return tuple(found) if found != list(tensor.placements) else None


def replicate_module(
    modules: list[nn.Module], mesh: DeviceMesh, mp_policy: "MixedPrecisionPolicy", offload_policy: "OffloadPolicy"
) -> None:
    """torch's ``replicate``: the FSDP2 engine with whole parameters and one all-reduce a unit.

    Its modules are ``FSDPModule`` too, so that gradient sync is the same state machine as with shards.
    """
    from torch.distributed._composable.replicate_with_fsdp import replicate

    replicate(modules if len(modules) > 1 else modules[0], mesh=mesh, mp_policy=mp_policy, offload_policy=offload_policy)


def fsdp_state(module: nn.Module | FSDPModule) -> Any:
    """The FSDP state of a module, or ``None``. Modules that were wrapped together share one."""
    return module._get_fsdp_state() if isinstance(module, FSDPModule) else None


def param_groups(module: nn.Module | FSDPModule) -> list[Any]:
    """The parameter groups that a unit gathers and reduces. Empty for a unit without parameters of its own."""
    state = fsdp_state(module)
    if state is None:
        return []
    if hasattr(state, "_fsdp_param_groups"):  # torch 2.13 and later: one group for each mesh
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group
    return [] if group is None else [group]


def owned_parameters(module: nn.Module | FSDPModule) -> list[nn.Parameter]:
    """The sharded parameters that this unit itself gathers, without those of units inside it."""
    return [fsdp_param.sharded_param for group in param_groups(module) for fsdp_param in group.fsdp_params]


def is_unsharded(module: nn.Module | FSDPModule) -> bool:
    """Whether a unit holds its gathered parameters now."""
    return any(group.is_unsharded for group in param_groups(module))


def settle(module: nn.Module | FSDPModule) -> None:
    """Finish an all-gather that was started ahead and that nothing has used; the unit is gathered then."""
    for group in param_groups(module):
        if group._all_gather_result is not None:
            group.wait_for_unshard()


def reshards_after_forward(module: nn.Module | FSDPModule, *, is_root: bool) -> bool:
    """Whether a unit frees its gathered parameters after forward, as it is set now.

    A root that was wrapped without saying so learns only in its first forward that it is one, and does not.
    """
    state = fsdp_state(module)
    if is_root and getattr(state, "_auto_reshard_after_forward", False):
        return False
    return any(group._reshard_after_forward for group in param_groups(module))


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


def hook_each_run(modules: Sequence[nn.Module]) -> None:
    """Let modules that are one unit gather and free it around each run of each of them.

    By itself FSDP2 takes them for one run: it gathers before the first and frees after the last.
    """
    state = fsdp_state(modules[0])
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    for module in modules:
        module.register_forward_pre_hook(state._pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(state._post_forward, prepend=False)


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


def device_of_control(group: dist.ProcessGroup) -> torch.device:
    """The CPU where a group has a backend for it, otherwise the device that it is for."""
    devices = group._device_types
    return torch.device("cpu") if torch.device("cpu") in devices else devices[0]


@contextmanager
def unseen() -> Iterator[None]:
    """Inside, no dispatch mode sees what is called."""
    with _disable_current_modes():
        yield


def is_set_up(module: nn.Module | FSDPModule) -> bool:
    """Whether a unit, or the root that it is in, ran forward once: only then does it know its root and its streams."""
    return fsdp_state(module)._is_root is not None


def post_backward(module: nn.Module | FSDPModule) -> None:
    """What FSDP does behind the backward of a unit: reduce and free it, as it is set. Nothing, where it was done already."""
    for group in param_groups(module) if is_set_up(module) else ():
        group.post_backward()


def end_backward(module: nn.Module | FSDPModule) -> None:
    """What FSDP does at the end of a backward, where a unit is a root that ran: wait for reductions, and be at rest."""
    state = fsdp_state(module)
    if state._is_root:
        state._root_post_backward_final_callback()


def backward_of_stage(kind: str, stage: Any, arguments: dict[str, Any]) -> Any:
    """One of the backwards of a pipeline stage: (gradients of inputs, groups of parameters for ``weight``).

    Args:
        kind: ``full``, ``input`` or ``weight``.
        stage: of torch's pipelining.
        arguments: what its schedule gives ``backward_maybe_with_nosync``.
    """
    _backward, _ = _pipelining()
    if kind == "weight":
        return _backward.stage_backward_weight(stage.submod.parameters(), arguments["param_groups"]), None
    values = (arguments["stage_output"], arguments["output_grads"], arguments["input_values"])
    if kind == "input":
        return _backward.stage_backward_input(*values, stage.submod.parameters())
    return _backward.stage_backward(*values), None


def _pipelining() -> tuple[Any, Any]:
    """torch's backwards of stages, and what all its stages are. Only pipelines need them, so :func:`check` does not ask."""
    try:
        from torch.distributed.pipelining import _backward
        from torch.distributed.pipelining.stage import _PipelineStageBase
    except ImportError as error:
        raise UnsupportedError(f"torch {torch.__version__}: pipelining is not as it was ({error})") from error
    return _backward, _PipelineStageBase


def own_backward_of_stage(kind: str, stage: Any, arguments: dict[str, Any], *, last: bool) -> Any:
    """torch's own ``backward_maybe_with_nosync``."""
    _, stage_type = _pipelining()
    return stage_type.backward_maybe_with_nosync(stage, kind, arguments, last_backward=last)


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread, so that a forward now is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def keep_between_runs(module: nn.Module | FSDPModule, keep: bool) -> None:
    """Whether a unit that runs several times stays gathered from one of its backwards to the next."""
    for group in param_groups(module):
        group._meshwright_course.stays = keep


def forget_runs_without_gradient(module: nn.Module | FSDPModule) -> None:
    """Keep runs under ``no_grad`` out of the order that backward prefetches in, which they would lead astray."""
    for group in param_groups(module):
        record = group._record_post_forward

        def recorded(record: Any = record) -> None:
            if torch.is_grad_enabled():
                record()

        group._record_post_forward = recorded


def before_each_run(root: nn.Module | FSDPModule, do: Callable[[], None]) -> None:
    """Have something done as a root begins to run, in whatever method, before its units are readied for their first run."""
    state = fsdp_state(root)
    initialize = state._lazy_init

    def first_do() -> None:
        do()
        initialize()

    state._lazy_init = first_do


def share_shards(first: nn.Module | FSDPModule, second: nn.Module | FSDPModule) -> None:
    """Give two units with the same parameters one sharded copy: that of the first. Before their first forward; idempotent.

    Each pads its shards into memory of its own when it is first used, so the names alone would part them: one would go on
    gathering what the optimizer no longer changes.
    """
    for ours, theirs in zip(param_groups(first), param_groups(second), strict=True):
        for mine, other in zip(ours.fsdp_params, theirs.fsdp_params, strict=True):
            # By memory: where tensors have none (fake ones), torch makes a new view of the same shard as a unit is first used.
            same_memory = memory_of(other._sharded_param_data) == memory_of(mine._sharded_param_data)
            if other.sharded_param is mine.sharded_param and same_memory:
                continue
            mine.reset_sharded_param()
            place = other._module_info
            other.sharded_param = mine.sharded_param
            other._sharded_param_data, other._sharding_spec = mine._sharded_param_data, mine._sharding_spec
            setattr(place.module, place.param_name, mine.sharded_param)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Inside a dispatch mode: another tensor over the same memory, unknown to autograd, that has the same version counter."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def memory_of(tensor: torch.Tensor) -> int:
    """A number that tensors over the same memory share, while one of them is alive; of a DTensor, that of its local part."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()._cdata


def own_memory(tensor: torch.Tensor) -> None:
    """Give a tensor, of a DTensor its local part, memory of its own and of its own size.

    What is read from a file on the CPU is a view of the file's pages: a shard holds its whole parameter, and changes with the
    file.
    """
    if isinstance(tensor, DTensor):
        tensor._local_tensor = tensor._local_tensor.detach().clone()
    else:
        tensor.data = tensor.detach().clone()


def operator_names() -> list[str]:
    """All operators that are registered now, as ``aten.mm.default``."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        operator, _, overload = rest.partition(".")
        found.append(f"{space}.{operator}.{overload or 'default'}")
    return found


def is_decomposed(operator: torch._ops.OpOverload) -> bool:
    """Whether an operator is taken apart into others above autograd, so that nothing below ever sees it: ``aten.linear``."""
    return operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def operator_schema(operator: Any) -> Any:
    """Arguments, returns and mutability of an operator; ``None`` for a higher-order one, such as flex attention."""
    return getattr(operator, "_schema", None)


def flight_records() -> list[dict[str, Any]] | None:
    """What torch's flight recorders hold of this process, one for gloo and one for NCCL.

    They record where ``TORCH_FR_BUFFER_SIZE`` was set before the process had its first group. Only a report reads them,
    so that a torch without them is not refused by :func:`check`. Ask when the process stands still: what the recorder knows of
    groups it reads without a lock, while a collective of another thread may add to it.

    Returns:
        ``None`` where this torch has no recorder that can be read as JSON.
    """
    names = ["_dump_fr_trace_json", *(["_dump_nccl_trace_json"] if torch.cuda.is_initialized() else [])]
    library = getattr(torch._C, "_distributed_c10d", None)
    dumps = [getattr(library, name) for name in names if hasattr(library, name)]
    return [json.loads(dump(includeCollectives=True)) for dump in dumps] or None


def group_ranks() -> dict[str, tuple[int, ...]]:
    """The global ranks of every process group that this process is in, by torch's name of the group."""
    world = getattr(distributed_c10d, "_world", None)
    names, ranks = getattr(world, "pg_names", {}), getattr(world, "pg_group_ranks", {})
    return {name: tuple(sorted(ranks[group])) for group, name in list(names.items()) if group in ranks}


def group_of_call(args: Sequence[Any]) -> tuple[int, ...]:
    """The global ranks of the group of a collective, from the arguments that its operator was called with.

    Those of ``c10d`` hold the group in a box, as the first of its kind; the functional ones its name, as the last text.
    """
    box = next((item for item in args if isinstance(item, torch.ScriptObject)), None)
    if box is not None:
        return tuple(distributed_c10d.get_process_group_ranks(distributed_c10d.ProcessGroup.unbox(box)))
    name = next((item for item in reversed(args) if isinstance(item, str)), "")
    return group_ranks().get(name, ())


def _has(owner: Any, path: str) -> bool:
    """Whether there is an attribute of an attribute."""
    try:
        attrgetter(path)(owner)
    except AttributeError:
        return False
    return True


def check() -> None:
    """Refuse a torch that lacks a name used here.

    Raises:
        UnsupportedError: names the release and what is missing.
    """
    found = []
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < MINIMUM_TORCH:
        found.append(f"torch {torch.__version__}: Meshwright needs {'.'.join(map(str, MINIMUM_TORCH))} or later")
    for owner, name in (
        (distributed_c10d, "_get_default_group"),
        (distributed_c10d, "_get_default_store"),
        (dist.Store, "clone"),
        (distributed_c10d, "_set_pg_timeout"),
        (DeviceMesh, "_flatten"),
        (DeviceMesh, "_concatenate"),
        (FSDPModule, "_get_fsdp_state"),
        (FSDPModule, "set_force_sum_reduction_for_comms"),
        (FSDPModule, "set_gradient_divide_factor"),
        (FSDPModule, "set_reshard_after_forward"),
        (FSDPParamGroup, "is_unsharded"),
        (FSDPParamGroup, "wait_for_unshard"),
        (FSDPParamGroup, "_reshard_after_forward"),
        (FSDPParamGroup, "_register_post_backward_hook"),
        (FSDPParamGroup, "_record_post_forward"),
        (FSDPParamGroup, "pre_backward"),
        (FSDPParamGroup, "pre_forward"),
        (FSDPParamGroup, "post_backward"),
        (FSDPParam, "reset_sharded_param"),
        (FSDPParam, "to_accumulated_grad_if_needed"),
        (FSDPState, "_fsdp_param_group"),
        (FSDPState, "_lazy_init"),
        (torch._C, "_current_autograd_node"),
        (torch._C, "_current_graph_task_id"),
        (torch.autograd.Variable, "_execution_engine"),
        (torch._C, "_dispatch_get_all_op_names"),
        (torch._C, "_SetExcludeDispatchKeyGuard"),
        (torch._ops.OpOverload, "has_kernel_for_dispatch_key"),
    ):
        if not hasattr(owner, name):
            found.append(f"torch {torch.__version__} has no {owner.__name__}.{name}")
    # Attributes that are set in constructors; one that moved would be created anew in silence.
    for kind, names in (
        (
            FSDPParamGroup,
            ("_partial_reduce_output", "_all_gather_result", "_post_forward_indices", "_training_state", "mesh_info"),
        ),
        (FSDPParam, ("unsharded_accumulated_grad", "_module_info")),
        (FSDPState, ("_training_state", "_state_ctx", "_comm_ctx", "_is_root")),
    ):
        known = kind.__init__.__code__.co_names
        found.extend(f"torch {torch.__version__}: {kind.__name__} has no {name}" for name in names if name not in known)
    if dist.is_gloo_available():
        gloo = distributed_c10d.ProcessGroupGloo
        for name in ("create_default_device", "create_device", "_Options._devices", "_Options._threads", "_Options._timeout"):
            if not _has(gloo, name):
                found.append(f"torch {torch.__version__} has no ProcessGroupGloo.{name}")
    try:
        from torch.distributed._composable.replicate_with_fsdp import replicate  # noqa: F401
    except ImportError:
        found.append(f"torch {torch.__version__} has no torch.distributed._composable.replicate_with_fsdp")
    if found:
        raise UnsupportedError(found)

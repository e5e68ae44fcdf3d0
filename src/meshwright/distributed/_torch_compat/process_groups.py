"""Process groups and meshes: gloo's threads, timeouts, stores, and records of the flight recorder."""

import atexit
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from meshwright.device import own_backends

__all__ = [
    "all_gather_single",
    "concatenate_meshes",
    "control_store",
    "device_of_control",
    "flatten_mesh",
    "flight_records",
    "group_of_call",
    "group_over",
    "group_ranks",
    "inherit_timeout",
    "mend_gloo",
    "offer_groups",
    "reduce_scatter_single",
    "shared_groups",
]

# torch 2.13 renamed both; 2.11 has only the older names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout  # public in torch 2.14


def mend_gloo() -> None:
    """Keep this process from two defects of gloo (docs/upstream.md). Idempotent.

    All groups that are created from now on use one thread instead of two, and the process ends when they are idle.

    Both threads of a group write the name of the last collective into one string without a lock. A name of over 15 letters
    (functional all-gathers, which DTensor uses) is stored on the heap, and the heap gets corrupted once in some thousand jobs
    (docs/upstream.md). The order of a group's collectives is the same on all ranks, so one thread is enough.
    """
    if not dist.is_gloo_available():
        return
    gloo: Any = distributed_c10d.ProcessGroupGloo
    if hasattr(gloo.__init__, "_meshwright"):
        return
    create = gloo.__init__

    def create_with_one_thread(self: Any, store: Any, rank: int, size: int, *positional: Any, **named: Any) -> None:
        options = next((item for item in (*positional, *named.values()) if isinstance(item, gloo._Options)), None)
        if options is None:
            options = gloo._Options()
            # As torch does: one device for each interface, otherwise the device of the host's name.
            interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
            options._devices = [gloo.create_device(interface=name) for name in interfaces] or [gloo.create_default_device()]
            timeout = positional[0] if positional else named.get("timeout")
            options._timeout = distributed_c10d.default_pg_timeout if timeout is None else timeout
        options._threads = 1
        create(self, store, rank, size, options)

    create_with_one_thread._meshwright = create  # type: ignore[attr-defined]
    gloo.__init__ = create_with_one_thread
    atexit.register(_wait_for_threads)


def _wait_for_threads(seconds: float = 1.0) -> None:
    """Wait until no other thread of this process runs, or until some seconds are over.

    A thread of gloo lets go of the tensors of a collective after it has woken the caller. If the interpreter ends in between,
    the thread owns a Python object that it cannot free, and aborts the process. Other threads may compute for longer.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.001)  # also lets threads run that wait for the interpreter
        if not any(map(_runs, Path("/proc/self/task").glob("*"))):  # none where there is no /proc
            return


def _runs(thread: Path) -> bool:
    """Whether another thread than this one computes, or would if it had a core."""
    try:
        state = (thread / "stat").read_text().rpartition(")")[2].split()[0]  # the name before it may have spaces
    except OSError:
        return False  # it has ended
    return state == "R" and thread.name != str(threading.get_native_id())


def _has_two_gloo_threads(group: dist.ProcessGroup) -> bool:
    """Return whether all collectives of a group are gloo's, and more than one thread runs them."""
    gloo = getattr(distributed_c10d, "ProcessGroupGloo", None)
    backends = [group._get_backend(device) for device in group._device_types]
    return gloo is not None and all(isinstance(own, gloo) and own.options._threads > 1 for own in backends)


def inherit_timeout(mesh: DeviceMesh) -> None:
    """Give the groups of a mesh the timeout of the default group.

    By default torch gives them the timeout of their backend: half an hour for gloo, ten minutes for NCCL. A group that was
    created with another timeout keeps it.
    """
    own = {distributed_c10d.default_pg_timeout, distributed_c10d.default_pg_nccl_timeout}
    wanted = _timeout_of(distributed_c10d._get_default_group())
    for group in mesh.get_all_groups():
        if wanted is not None and _timeout_of(group) in own:
            set_timeout(wanted, group)


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout of a group; ``None`` if its backends have none."""
    options = [_options_of(group._get_backend(device)) for device in group._device_types]
    return next((own._timeout for own in options if own is not None and hasattr(own, "_timeout")), None)


def _options_of(backend: Any) -> Any:
    """The options of a backend; ``None`` if it has none. From torch 2.14 on one that is not torch's own may then raise."""
    try:
        return getattr(backend, "options", None)
    except RuntimeError:
        return None


def control_store(prefix: str) -> dist.Store:
    """The store of the default group, over a connection of its own, so a thread that waits on it blocks no other thread.

    Args:
        prefix: is put before all keys.
    """
    return dist.PrefixStore(f"meshwright/{prefix}", distributed_c10d._get_default_store().clone())  # type: ignore[attr-defined]


@contextmanager
def shared_groups() -> Iterator[None]:
    """Inside, meshes create as few process groups as possible.

    Axes over the same ranks share one group. All axes of size 1 share one group, which a rank creates without waiting for other
    ranks. By default torch creates a group for each row of each axis. Each costs a round of all ranks through the store, and
    threads: in a world of 1,024, an axis of size 1 costs 1,024 rounds.

    Axes whose collectives are inside of layers share none with those that FSDP gathers over. A communicator carries out one
    thing after another, in the order of the calls, on whichever stream: in a common one, the gather of the next layer would
    begin only after the exchange at the end of this one, and be hidden by nothing.
    """
    known = _SHARED.setdefault(distributed_c10d._get_default_group(), {})
    make = DeviceMesh._init_one_process_group

    def shared(axis: Any, ranks: torch.Tensor, name: str, backend: Any) -> Any:
        world = dist.get_world_size()
        alone, whole = axis.numel() == 1 < world, axis.numel() == world
        # Beside `tp` of all ranks nothing is gathered, so it takes the default group.
        in_layers = name in _OF_LAYERS and axis.numel() > 1 and not (name == "tp" and whole)
        key = "alone" if alone else f"{axis} {ranks.tolist()} {backend} {in_layers}"
        if key not in known:
            if alone:
                group: Any = dist.new_group([dist.get_rank()], use_local_synchronization=True, group_desc="mesh_alone")
                known[key] = group.group_name
            elif whole and in_layers:
                known[key] = dist.new_group(list(range(world)), group_desc=f"mesh_{name}").group_name
            elif whole and _has_two_gloo_threads(distributed_c10d._get_default_group()):
                # torch would take the default group, which its caller created before `mend_gloo` was called.
                known[key] = dist.new_group(group_desc="mesh_default").group_name
            else:
                known[key] = make(axis, ranks, name, backend)
        return known[key]

    DeviceMesh._init_one_process_group = staticmethod(shared)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        DeviceMesh._init_one_process_group = staticmethod(make)  # type: ignore[method-assign]


_OF_LAYERS = ("tp", "cp", "ep")
"""Axes whose collectives are inside of layers."""

_SHARED: WeakKeyDictionary[dist.ProcessGroup, dict[str, Any]] = WeakKeyDictionary()
"""Names of the groups that :func:`shared_groups` created, by the default group at that time."""


_BY_RANKS: WeakKeyDictionary[dist.ProcessGroup, WeakValueDictionary[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()
"""Groups of meshes by their ranks, for each default group."""


def offer_groups(mesh: DeviceMesh) -> None:
    """Let :func:`group_over` find the groups of a mesh. The first of some ranks is kept."""
    known = _BY_RANKS.setdefault(distributed_c10d._get_default_group(), WeakValueDictionary())
    for group in mesh.get_all_groups():
        known.setdefault(tuple(dist.get_process_group_ranks(group)), group)


def group_over(mesh: DeviceMesh, axes: Sequence[int]) -> dist.ProcessGroup:
    """Return the group of the ranks that differ from this one on some axes of a mesh alone.

    Of one axis, it is that of the mesh. Of several, it is one that was offered, or else one that is made. Only the ranks of the
    group need to call this.
    """
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    own = mesh.get_coordinate()
    assert own is not None
    members = mesh.mesh[tuple(slice(None) if axis in axes else place for axis, place in enumerate(own))]
    ranks = tuple(sorted(members.flatten().tolist()))
    known = _BY_RANKS.setdefault(distributed_c10d._get_default_group(), WeakValueDictionary())
    if (found := known.get(ranks)) is None:
        timeout = _timeout_of(mesh.get_group(axes[0]))
        found = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True, group_desc="mesh_update")
        known[ranks] = found
    return found


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The 1-D mesh over all ranks of ``mesh``. Its root mesh knows it by ``name``."""
    return mesh._flatten(name)


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the axes of several submeshes of the same root; no new process groups."""
    return DeviceMesh._concatenate(list(meshes))


def device_of_control(group: dist.ProcessGroup) -> torch.device:
    """The CPU if a group has a backend for it, otherwise the group's device."""
    devices = group._device_types
    return torch.device("cpu") if torch.device("cpu") in devices else devices[0]


def flight_records() -> list[dict[str, Any]] | None:
    """The records of this process in torch's flight recorders, one for gloo and one for the backend of the accelerators.

    A recorder is on if ``TORCH_FR_BUFFER_SIZE`` was set before the process created its first group. Only the report of a hang
    reads it, so :func:`check` does not require it. Call this while the process waits: the recorder reads its data on groups
    without a lock, and a collective of another thread may change them.

    Returns:
        ``None`` if this torch has no recorder that can be read as JSON.
    """
    names = ["_dump_fr_trace_json", *(f"_dump_{own}_trace_json" for own in own_backends())]
    library = getattr(torch._C, "_distributed_c10d", None)
    dumps = [getattr(library, name) for name in names if hasattr(library, name)]
    return [json.loads(dump(includeCollectives=True)) for dump in dumps] or None


def group_ranks() -> dict[str, tuple[int, ...]]:
    """Torch's name of each process group that this process is in, to the global ranks of the group."""
    world = getattr(distributed_c10d, "_world", None)
    names, ranks = getattr(world, "pg_names", {}), getattr(world, "pg_group_ranks", {})
    return {name: tuple(sorted(ranks[group])) for group, name in list(names.items()) if group in ranks}


def group_of_call(args: Sequence[Any]) -> tuple[int, ...]:
    """The global ranks of the group of a collective, read from the arguments of its operator.

    In the arguments of an operator of ``c10d``, the first ``ScriptObject`` is the boxed group. In those of a functional
    collective, the last string is the name of the group.
    """
    box = next((item for item in args if isinstance(item, torch.ScriptObject)), None)
    if box is not None:
        return tuple(distributed_c10d.get_process_group_ranks(distributed_c10d.ProcessGroup.unbox(box)))
    name = next((item for item in reversed(args) if isinstance(item, str)), "")
    return group_ranks().get(name, ())

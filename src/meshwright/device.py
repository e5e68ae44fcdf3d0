"""The one door to ``torch.accelerator``: which device a process has, and what differs from one kind of device to the next.

A *kind* is torch's type of a device: ``cpu``, ``cuda`` (also AMD's), ``xpu``, ``npu``, or any that a package beside torch
registers. An accelerator is a device of a kind other than ``cpu``. A process has accelerators of one kind at most. No other
module names a kind, except ``nemo``, files of kernels, and the data about devices in ``hardware/``.
"""

import ctypes
import os
import platform
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, supported_activities

from meshwright.errors import UnsupportedError

__all__ = [
    "CPU",
    "HIDDEN",
    "Ability",
    "HostCopy",
    "able",
    "accelerator",
    "backend",
    "claim",
    "count",
    "default_kind",
    "device_name",
    "fork_rng",
    "is_accelerator",
    "kind_of_backend",
    "memory_in_use",
    "own_backends",
    "peak_memory",
    "pinned",
    "profiled",
    "release_memory",
    "rng_state",
    "seed_generators",
    "set_rng_state",
    "start_method",
    "starting",
    "synchronize",
    "total_memory",
]

# Whoever asks torch whether there is CUDA would start the driver, which no fork survives; see start_method.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

CPU = "cpu"
HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""Environment variables of a process that is to find no accelerator, so that it takes no memory of one."""
_NOT_INITIALIZED = 3
"""``CUDA_ERROR_NOT_INITIALIZED`` of CUDA's driver."""
HOST_BACKEND = "gloo"
_KNOWN = ("cpu", "cuda")
"""Kinds that have every ability below. Others are asked, by doing it."""


class Ability(StrEnum):
    """What some kinds of accelerators lack."""

    FUSED = "fused"
    """The whole update of AdamW as one kernel, which skips it by itself where a number on the device says so."""
    FLOAT64 = "float64"
    """Products in double precision."""
    COMPILED = "compiled"
    """Kernels that torch.compile makes."""
    PINNED = "pinned"
    """Host memory that copies to and from the device without a host that waits."""


def accelerator() -> str | None:
    """Return the kind of the accelerators of this machine; ``None``: there is none that this process may use."""
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None and count() else None


def count() -> int:
    """Return the number of accelerators that this process may use. A process that asks can still be forked (on NVIDIA's)."""
    return torch.accelerator.device_count()


def default_kind() -> str:
    """Return the kind of the accelerators, or ``cpu``."""
    return accelerator() or CPU


def is_accelerator(device: torch.device) -> bool:
    """Whether a device is one that runs beside the host."""
    return device.type != CPU


def start_method(kind: str) -> str:
    """Return how workers on a kind of device start, in the words of :mod:`multiprocessing`.

    On the CPU they are forked, with all that is imported. But the driver of an accelerator does not survive a fork, and torch
    asks it even about the CPU: an optimizer whether a graph is captured, a tensor whether it is pinned. So beside a driver that
    runs in this process they are new processes, as on an accelerator.
    """
    return "fork" if kind == CPU and not _driver_runs() else "spawn"


def _driver_runs() -> bool:
    """Whether the driver of an accelerator was started in this process. Of others than NVIDIA's it is assumed."""
    if not count():
        return False
    if accelerator() != "cuda" or torch.version.hip is not None:
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:  # it is not loaded
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED


@contextmanager
def starting(kind: str) -> Iterator[None]:
    """Inside, workers on a kind of device are started. Those on the CPU find no CUDA, and load no other kind."""
    more = HIDDEN if kind == CPU else {}
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def claim(kind: str, local_rank: int) -> torch.device:
    """Make a device the current one of this process, and return it.

    Args:
        kind: kind of the device.
        local_rank: number of this process on its machine. Where a process sees fewer devices, as under Slurm, it wraps around.

    Raises:
        UnsupportedError: this process has no accelerator of this kind.
    """
    if kind == CPU:
        return torch.device(CPU)
    if kind != accelerator():
        raise UnsupportedError(
            "worker.device", f"workers on {kind}: there is none on this machine; legal here: {', '.join(_legal())}"
        )
    device = torch.device(kind, local_rank % count())
    torch.accelerator.set_device_index(device.index)
    return device


def _legal() -> list[str]:
    found = accelerator()
    return [CPU] if found is None else [CPU, found]


def backend(kind: str) -> str:
    """Return the backends of a process group: that of a kind of device, and gloo for tensors on the host.

    Raises:
        UnsupportedError: torch has no collectives for this kind.
    """
    if kind == CPU:
        return HOST_BACKEND
    try:
        own = dist.get_default_backend_for_device(kind)
    except (ValueError, RuntimeError):  # it knows none, or not even the kind
        raise UnsupportedError(
            "worker.device", f"workers on {kind}: torch has no backend of collectives for it; legal here: {CPU}"
        ) from None
    return f"{CPU}:{HOST_BACKEND},{kind}:{own}"


def kind_of_backend(name: str | None) -> str | None:
    """Return the kind of device that one backend of a process group is for; ``None``: it is for several, or not known."""
    if name == HOST_BACKEND:
        return CPU
    found = accelerator()
    return found if found is not None and name == dist.get_default_backend_for_device(found) else None


def own_backends() -> tuple[str, ...]:
    """Return the backend of the accelerators, such as NCCL; none where this process has not begun to use one."""
    kind = accelerator()
    if kind is None or not getattr(torch.get_device_module(kind), "is_initialized", lambda: True)():
        return ()
    return (dist.get_default_backend_for_device(kind),)


def able(kind: str, ability: Ability) -> bool:
    """Whether the accelerators of this process, of this kind, have an ability."""
    return kind in _KNOWN or (kind == accelerator() and _tried(kind, ability))


@cache
def _tried(kind: str, ability: Ability) -> bool:
    """Whether it works on the smallest tensors."""
    try:
        match ability:
            case Ability.FUSED:
                parameter = torch.ones(1, device=kind, requires_grad=True)
                parameter.grad = torch.ones_like(parameter)
                optimizer = torch.optim.AdamW([parameter], fused=True)
                optimizer.found_inf = torch.ones((), device=kind)  # type: ignore[attr-defined]
                optimizer.step()
                return parameter.item() == 1.0
            case Ability.FLOAT64:
                ones = torch.ones(2, 2, dtype=torch.float64, device=kind)
                return (ones @ ones).sum().item() == 8.0
            case Ability.COMPILED:
                return torch.compile(torch.neg)(torch.ones(1, device=kind)).item() == -1.0
            case Ability.PINNED:
                return torch.ones(1).pin_memory().to(kind, non_blocking=True).item() == 1.0
    except (RuntimeError, TypeError, NotImplementedError):
        return False


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host in memory from which a device copies by itself; the tensor, where there is no such memory."""
    return tensor.pin_memory() if is_accelerator(device) and able(device.type, Ability.PINNED) else tensor


class HostCopy:
    """A copy of a tensor to the host, which the device makes by itself, once it has done what it was given before.

    Args:
        tensor: its values when the device comes to it are what the host gets.

    Attributes:
        is_later: whether the copy is under way. Otherwise the device cannot make it alone, or the tensor is the host's: then
            :meth:`wait` does all.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.is_later = is_accelerator(tensor.device) and able(tensor.device.type, Ability.PINNED)
        self._copy = tensor
        if self.is_later:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            self._done = torch.Event(tensor.device)
            self._done.record(torch.accelerator.current_stream(tensor.device))

    def wait(self) -> torch.Tensor:
        """Wait for the copy, and return it."""
        if self.is_later:
            self._done.synchronize()
        return self._copy.cpu()

    def arrives_within(self, seconds: float) -> bool:
        """Wait for some time at most, and return whether the copy is there. A device that has failed makes none."""
        end = time.monotonic() + seconds
        try:
            while self.is_later and not self._done.query():
                if time.monotonic() > end:
                    return False
                time.sleep(0.01)
        except RuntimeError:
            return False
        return True


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that it was given."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def peak_memory(device: torch.device) -> int | None:
    """Return the most bytes that tensors had at a time on an accelerator; ``None``: it does not count them."""
    try:
        return torch.accelerator.max_memory_allocated(device) if is_accelerator(device) else None
    except (RuntimeError, AttributeError, NotImplementedError):  # its allocator is not one that torch.accelerator knows
        count_peak = getattr(torch.get_device_module(device), "max_memory_allocated", None)
        return None if count_peak is None else int(count_peak(device))


def memory_in_use(device: torch.device) -> int:
    """Return the peak of an accelerator in bytes, or what this process has of the host's memory; 0: it cannot be told."""
    if is_accelerator(device):
        return peak_memory(device) or 0
    statm = Path("/proc/self/statm")  # not there on systems other than Linux
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def total_memory(kind: str) -> int:
    """Return the bytes of the current accelerator, or of this machine."""
    if kind == CPU:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return torch.accelerator.get_memory_info()[1]


def release_memory(device: torch.device) -> None:
    """Give back to a device the memory that no tensor needs any more."""
    if is_accelerator(device):
        torch.accelerator.empty_cache()


def device_name(kind: str, index: int = 0) -> str:
    """Return the name of a device, as its driver has it and ``torch_name`` of a hardware file."""
    if kind == CPU:
        return f"{platform.machine()} CPU"
    name = getattr(torch.get_device_module(kind), "get_device_name", None)
    return kind if name is None else str(name(index))


def rng_state(device: torch.device) -> torch.Tensor:
    """Return the state of a device's random number generator, on the host."""
    return torch.get_device_module(device).get_rng_state(device) if is_accelerator(device) else torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    """Restore what :func:`rng_state` returned."""
    if is_accelerator(device):
        torch.get_device_module(device).set_rng_state(state.cpu(), device)
    else:
        torch.set_rng_state(state.cpu())


def fork_rng(device: torch.device) -> AbstractContextManager[object]:
    """Inside, random numbers leave no trace in the generators of the host and of a device."""
    if not is_accelerator(device):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators of the host and of a device, as ``torch.manual_seed`` does.

    That one also keeps the seed for each kind of device that has not started, with the caller's stack in words: milliseconds
    for each module of a model.
    """
    torch.default_generator.manual_seed(seed)
    if is_accelerator(device):
        module = torch.get_device_module(device)
        getattr(module, "manual_seed_all", module.manual_seed)(seed)


def profiled(device: torch.device) -> bool:
    """Whether torch's profiler measures how long the operators of a device take."""
    return is_accelerator(device) and getattr(ProfilerActivity, device.type.upper(), None) in supported_activities()

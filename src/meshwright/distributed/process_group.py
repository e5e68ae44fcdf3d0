"""Starting and ending the process group of a worker, under Meshwright's launcher, torchrun or Slurm."""

import ctypes
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from meshwright.device import backend, claim, is_accelerator
from meshwright.distributed import _torch_compat
from meshwright.errors import ConfigError, MeshwrightError, UnsupportedError, described

__all__ = [
    "RECORDED",
    "adopt_slurm",
    "check_collectives",
    "distributed_environment",
    "end_openmp_threads",
    "from_rank_0",
    "is_communication",
    "process_group",
    "whole_number",
]

T = TypeVar("T")

RECORDED = "2000"
"""Collectives that torch's flight recorder keeps, for the report of ranks that hang."""


def distributed_environment() -> bool:
    """Whether something else (torchrun, or Slurm's srun) started this process as one of several.

    A batch script of Slurm that was not started by srun is one process, however many tasks the job has.
    """
    torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    return torchrun or whole_number("SLURM_STEP_NUM_TASKS", 1, least=1) > 1


def whole_number(variable: str, default: int | None = None, *, least: int = 0) -> int:
    """The value of an environment variable that a launcher sets.

    Args:
        variable: its name.
        default: where it is not set, or empty; ``None``: it must be.
        least: smallest legal value.

    Raises:
        ConfigError: it is no whole number, or not set.
    """
    text = os.environ.get(variable) or ("" if default is None else str(default))
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise ConfigError(
            "run.environment",
            f"the environment variable {variable}={text!r}: must be a whole number of at least {least}, and launchers set it; "
            "unset it, or correct the script that sets it",
        )
    return int(text)


def adopt_slurm() -> None:
    """Set torch's variables from those of Slurm's step, where torchrun did not set them.

    Raises:
        ConfigError: if the node list is not there.
    """
    if "RANK" in os.environ or whole_number("SLURM_STEP_NUM_TASKS", 1, least=1) == 1:
        return
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    # Jobs and steps that share a node need ports of their own; all tasks of one step derive the same.
    step = whole_number("SLURM_JOB_ID", 0) + 7919 * whole_number("SLURM_STEP_ID", 0)
    port = 20000 + step % 20000
    variables = {
        "MASTER_ADDR": os.environ.get("MASTER_ADDR") or _first_host(nodes),
        "MASTER_PORT": os.environ.get("MASTER_PORT") or str(port),
        "RANK": str(whole_number("SLURM_PROCID")),
        "WORLD_SIZE": str(whole_number("SLURM_STEP_NUM_TASKS")),
        "LOCAL_RANK": str(whole_number("SLURM_LOCALID", 0)),
    }
    os.environ.update(variables)


def _first_host(node_list: str) -> str:
    """The first name of a Slurm node list such as ``gpu[017-020,031],login1``."""
    if not node_list:
        raise ConfigError("run.environment", "SLURM_STEP_NODELIST is not set; set MASTER_ADDR to the host of rank 0")
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\])?([^,\[]*)", node_list)
    if match is None:
        raise ConfigError(
            "run.environment",
            f"SLURM_STEP_NODELIST={node_list!r}: does not begin with a host name; set MASTER_ADDR to the host of rank 0",
        )
    return "".join(part or "" for part in match.groups())


@contextmanager
def process_group(timeout: timedelta, kind: str) -> Iterator[torch.device]:
    """The default process group of this worker, and its device.

    The backend of the accelerators, such as NCCL, and gloo for tensors on the host. Without torch's variables: a group of one.

    Args:
        timeout: how long a collective waits for other ranks.
        kind: kind of the device, as in :mod:`meshwright.device`.
    """
    adopt_slurm()
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", RECORDED)
    _torch_compat.mend_gloo()
    device, backends = claim(kind, whole_number("LOCAL_RANK", 0)), backend(kind)
    if "RANK" in os.environ:
        _check_torchrun()
        dist.init_process_group(backends, timeout=timeout)
    else:
        dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        yield device
    except BaseException:
        # Ending groups waits for collectives in flight, which a failed rank's peers never finish.
        if dist.get_world_size() == 1 and not is_accelerator(device):
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def is_communication(error: BaseException) -> bool:
    """Whether an error comes from a collective. Another rank may then be the cause, by what it did or did not do."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error))


def from_rank_0(
    work: Callable[[], T], failed: Callable[[Exception], MeshwrightError], group: dist.ProcessGroup | None = None
) -> T:
    """Return on all ranks what a function returns on rank 0, which alone calls it. All ranks make this call.

    Args:
        work: the function; what it returns can be pickled.
        failed: returns the error of an exception that is not Meshwright's own.
        group: all ranks; ``None``: the default group.

    Raises:
        MeshwrightError: on all ranks, what it raised on rank 0. Whatever that was, the others do not wait in vain.
    """
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [work()]
        except MeshwrightError as error:
            outcome = [error]
        except Exception as error:
            outcome = [failed(error)]
    dist.broadcast_object_list(outcome, src=0, group=group)
    if isinstance(outcome[0], MeshwrightError):
        raise outcome[0]
    found: T = outcome[0]
    return found


def check_collectives(kinds: Iterable[str], device: torch.device) -> None:
    """Try collectives of some kinds over all ranks, so that one that a backend lacks is refused before anything is trained.

    Collective over all ranks.

    Args:
        kinds: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all`` or ``send``.
        device: the device of this rank.

    Raises:
        UnsupportedError: the backend does not carry one out; all that it lacks are named.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole, part = torch.zeros(ranks, device=device), torch.zeros(1, device=device)

    def send() -> None:
        ops = [dist.P2POp(dist.isend, part, (rank + 1) % ranks), dist.P2POp(dist.irecv, part.clone(), (rank - 1) % ranks)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    tries: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: (dist.all_reduce(part), dist.all_reduce(part, dist.ReduceOp.MAX)),
        "all_gather": lambda: _torch_compat.all_gather_single(whole, part),
        "reduce_scatter": lambda: _torch_compat.reduce_scatter_single(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "send": send,
    }
    lacking = {}
    for kind in sorted(set(kinds)):
        try:
            tries[kind]()
        except (NotImplementedError, RuntimeError, ValueError) as error:
            if is_communication(error) or isinstance(error, torch.OutOfMemoryError):
                raise
            lacking[kind] = described(error)
    if lacking:
        said = "; ".join(f"{kind} ({why})" for kind, why in lacking.items())
        raise UnsupportedError(
            "worker.collectives",
            f"launch.device={device.type}: its backend {backend(device.type)} does not carry out {said}, which the plan "
            "needs; use another layout, or another backend",
        )


def _check_torchrun() -> None:
    """Torch reads these by itself, and stops at a wrong one without its name.

    Raises:
        ConfigError: names the variable.
    """
    rank, ranks = whole_number("RANK"), whole_number("WORLD_SIZE", least=1)
    if rank >= ranks:
        raise ConfigError(
            "run.environment", f"the environment variables RANK={rank} and WORLD_SIZE={ranks}: RANK must be 0 to {ranks - 1}"
        )
    if not 1 <= whole_number("MASTER_PORT") <= 65535:
        raise ConfigError(
            "run.environment", f"the environment variable MASTER_PORT={os.environ['MASTER_PORT']}: legal are 1 to 65535"
        )
    if not os.environ.get("MASTER_ADDR"):
        raise ConfigError(
            "run.environment", "the environment variable MASTER_ADDR is not set, although RANK is; set it to the host of rank 0"
        )


def end_openmp_threads() -> None:
    """Before a fork: GNU OpenMP's threads do not survive it, and a child that needs them would wait forever.

    They come back when they are needed.
    """
    for path in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        with suppress(AttributeError):  # before OpenMP 5.0
            ctypes.CDLL(str(path)).omp_pause_resource_all(2)  # omp_pause_hard

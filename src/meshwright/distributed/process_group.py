"""Starting and ending the process group of a worker, under Meshwright's launcher, torchrun or Slurm."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from meshwright.errors import ConfigError

__all__ = ["adopt_slurm", "distributed_environment", "process_group"]


def distributed_environment() -> bool:
    """Whether something else (torchrun, or Slurm's srun) started this process as one of several."""
    torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    return torchrun or (int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in os.environ)


def adopt_slurm() -> None:
    """Set torch's variables from Slurm's, where torchrun did not set them.

    Raises:
        ConfigError: if the node list cannot be read.
    """
    if "RANK" in os.environ or "SLURM_PROCID" not in os.environ:
        return
    os.environ["RANK"] = os.environ["SLURM_PROCID"]
    os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
    os.environ["LOCAL_RANK"] = os.environ.get("SLURM_LOCALID", "0")
    os.environ.setdefault("MASTER_ADDR", _first_host(os.environ.get("SLURM_JOB_NODELIST", "")))
    # Jobs that share a node need ports of their own; all tasks of one job derive the same.
    os.environ.setdefault("MASTER_PORT", str(20000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 20000))


def _first_host(node_list: str) -> str:
    """The first name of a Slurm node list such as ``gpu[017-020,031],login1``."""
    if not node_list:
        raise ConfigError("SLURM_JOB_NODELIST is not set; set MASTER_ADDR to the host of rank 0")
    match = re.match(r"([^\[,]+)(?:\[([0-9]+))?([^\[,\]]*)", node_list)
    assert match is not None
    name, number, _ = match.groups()
    return name + (number or "")


@contextmanager
def process_group(timeout: timedelta) -> Iterator[torch.device]:
    """The default process group of this worker, and its device.

    NCCL for tensors on GPUs and gloo for those on the CPU, or gloo alone. Without torch's variables: a group of one.

    Args:
        timeout: how long a collective waits for other ranks.
    """
    adopt_slurm()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        yield device
    finally:
        dist.destroy_process_group()

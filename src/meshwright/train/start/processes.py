"""How many processes a run has here, and on which devices."""

import math
import os
import re

from meshwright.errors import ConfigError, number_of
from meshwright.layout import AXES
from meshwright.train.config import RunConfig

__all__ = ["device_kind", "launched_processes", "local_processes", "planned_processes"]


def planned_processes(config: RunConfig) -> int:
    """Return the number of ranks that a configuration describes.

    That is the product of its layout's sizes, if it gives all of them and they fill one or several machines of ``launch.nproc``
    processes. Otherwise it is the number of workers that ``train`` would start here.
    """
    sizes = [getattr(config.layout, axis) for axis in AXES]
    product = math.prod(size or 0 for size in sizes)
    known = all(size is not None and size > 0 for size in sizes) and product % (config.launch.nproc or 1) == 0
    return product if known else local_processes(config)


def local_processes(config: RunConfig) -> int:
    """Return the number of workers to start on this machine: as configured, otherwise one per GPU, or one on the CPU."""
    return config.launch.nproc or (1 if config.launch.device == "cpu" else max(1, _gpus()))


def device_kind(config: RunConfig, processes: int, *, launched: bool = False) -> str:
    """Return the device of the workers on this machine: ``cuda`` or ``cpu``.

    Args:
        config: configuration of the run.
        processes: number of workers on this machine.
        launched: whether another launcher started them. It may have given each worker one GPU, the only one that it sees.

    Raises:
        ConfigError: there are fewer GPUs than processes, and GPUs are asked for or another launcher started the workers.
    """
    device, gpus = config.launch.device, _gpus()
    if device == "cpu" or (device == "auto" and gpus == 0):
        return "cpu"
    if gpus >= processes or (launched and gpus == 1):
        return "cuda"
    if device == "auto" and not launched:
        return "cpu"
    legal = f"legal launch.nproc: 1 to {gpus}" if gpus else "there is no GPU on this machine"
    raise ConfigError(
        "run.device",
        f"launch.device={device}: {number_of(processes, 'process')} and {number_of(gpus, 'GPU')} here; {legal}, or "
        "launch.device=cpu",
    )


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def launched_processes(config: RunConfig) -> int:
    """Return the number of workers that another launcher started on this machine, from its environment variables.

    ``launch.nproc``, which is for local workers, is used only if the launcher does not give the number.

    Raises:
        ConfigError: a variable of the launcher is not a number.
    """
    from meshwright.distributed.process_group import whole_number

    if os.environ.get("LOCAL_WORLD_SIZE"):
        return whole_number("LOCAL_WORLD_SIZE", least=1)
    slurm = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")  # such as 8(x2),4
    if not slurm:
        return config.launch.nproc or 1
    first = re.match(r"[1-9]\d*(?=$|[(,])", slurm)
    if first is None:
        raise ConfigError(
            "run.environment", f"the environment variable SLURM_STEP_TASKS_PER_NODE={slurm!r}: must be of the form 8(x2),4"
        )
    return int(first.group())

"""How many processes a run has here, and on which devices."""

import math
import os
import re

from meshwright.errors import ConfigError, number_of
from meshwright.layout import AXES
from meshwright.train.config import RunConfig
from meshwright.train.schema.optimizer_kinds import KEYS, QUANTIZED

__all__ = ["adapted", "device_kind", "launched_processes", "local_processes", "planned_processes"]


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
    """Return the number of workers to start on this machine: as configured; otherwise one per accelerator, or one."""
    return config.launch.nproc or (1 if config.launch.device == "cpu" else max(1, _accelerators()))


def device_kind(config: RunConfig, processes: int, *, launched: bool = False) -> str:
    """Return the kind of device of the workers on this machine, as in :mod:`meshwright.device`.

    Args:
        config: configuration of the run.
        processes: number of workers on this machine.
        launched: whether another launcher started them. It may have given each worker one device, the only one that it sees.

    Raises:
        ConfigError: the device that is asked for is not there; or there are fewer than processes, and they are asked for or
            another launcher started the workers.
    """
    from meshwright.device import CPU, accelerator

    wish, there, number = config.launch.device, accelerator(), _accelerators()
    if wish == CPU or (wish == "auto" and there is None):
        return CPU
    if there is None or wish not in ("auto", "accelerator", there):
        here = "there is no accelerator" if there is None else f"its accelerators are {there}"
        legal = ", ".join(("auto", CPU, *(() if there is None else ("accelerator", there))))
        raise ConfigError("run.device", f"launch.device={wish}: {here} on this machine; legal here: {legal}")
    if number >= processes or (launched and number == 1):
        return there
    if wish == "auto" and not launched:
        return CPU
    raise ConfigError(
        "run.device",
        f"launch.device={wish}: {number_of(processes, 'process')} and {number_of(number, 'accelerator')} ({there}) here; "
        f"legal launch.nproc: 1 to {number}, or launch.device=cpu",
    )


def adapted(config: RunConfig, kind: str) -> tuple[RunConfig, list[str]]:
    """Return a configuration without what a kind of device lacks, and a line for each thing that is replaced."""
    from meshwright.device import CPU, Ability, able

    lines = []
    optimizer = config.optimizer
    fusable = any("fused" in KEYS.get(one.kind, ()) for one in optimizer.updaters.values())
    asks = (fusable and optimizer.fused is not False) or any(group.fused for group in optimizer.groups)
    if asks and not able(kind, Ability.FUSED):
        groups = [group.model_copy(update={"fused": False}) if group.fused else group for group in optimizer.groups]
        config = config.model_copy(update={"optimizer": optimizer.model_copy(update={"fused": False, "groups": groups})})
        lines.append(f"{kind} has no fused AdamW: the update is made of several operators (optimizer.fused=false)")
    if (kinds := optimizer.kinds & set(QUANTIZED)) and kind != CPU and not able(kind, Ability.COMPILED):
        lines.append(
            f"torch.compile has no kernels for {kind}: the update is made of several operators (optimizer.kind={min(kinds)})"
        )
    parallel = config.parallel
    if parallel.compile and parallel.compile_backend == "inductor" and not able(kind, Ability.COMPILED):
        config = config.model_copy(update={"parallel": parallel.model_copy(update={"compile": False})})
        lines.append(f"torch.compile has no kernels for {kind}: nothing is compiled (parallel.compile=false)")
    if kind != CPU and not able(kind, Ability.PINNED):
        lines.append(f"torch has no pinned memory for {kind}: the host waits for each copy of a batch")
    return config, lines


def _accelerators() -> int:
    from meshwright.device import count

    return count()


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

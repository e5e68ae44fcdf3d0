"""What a run was expected to take, beside what it takes: model operations a second, MFU, and the parts of one step.

The forecast is that of ``meshwright plan --gpu``, made in a process of its own while the first steps run. Whoever starts the
run passes in the command of that process. When the forecast is there, one step is profiled on rank 0, and both are printed,
part by part.
"""

import json
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch.autograd import DeviceType
from torch.autograd.profiler import profile

from meshwright.device import HIDDEN, device_name, is_accelerator, profiled, synchronize
from meshwright.files import write_whole
from meshwright.plan.cost.hardware import load_hardware, name_of
from meshwright.plan.cost.operations import operations_of_token
from meshwright.plan.given.inspection import inspect_model
from meshwright.train.start.setup import RunSetup

__all__ = ["ALL", "COMPUTED", "Expectation", "Forecast", "compared", "operations_of_step", "paired", "part_of"]

Forecast = Callable[[Path, int, str], list[str]]
"""Returns a command that prints the parts of a step in seconds, as JSON, for a configuration, a number of ranks and the name or
file of a device. The caller passes it in, because `train` does not import `trace`."""

NICENESS = 10
"""How much the process of the forecast lets others go first, on the scale of nice(1): the first steps run beside it."""

WARM = 3
"""Steps after the start that are not profiled: they allocate, compile, and agree on the order of units."""

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "linear", "matmul"}

COMPUTED = ("products", "attention", "elementwise", "update")
"""Parts of a step that operators spend; the rest is waiting: for collectives, for other stages, for the host."""

ALL = "all"
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_", *HIDDEN)


def operations_of_step(setup: RunSetup) -> float | None:
    """Return the operations of the model in a step, over all devices, padding included.

    ``None``: the objective calls the model in ways of its own.

    Args:
        setup: a run, whose model is not parallelized yet.
    """
    if not setup.objective.chunks:
        return None
    plan, training, length = setup.plan, setup.config.training, setup.config.data.sequence_length
    trained = frozenset(row.name for row in plan.parameters if row.trainable)
    model = setup.facts or inspect_model(setup.spec, setup.model)
    operations = operations_of_token(model, setup.spec, length, plan.options.experts_of_token, trained)
    return operations * training.global_batch_size * length


def part_of(name: str) -> str | None:
    """Return the part of a step that an operator belongs to, by the name that the profiler gives it; ``None``: to none."""
    namespace, _, operator = name.partition("::")
    if "attention" in name.lower() or "flash" in name.lower():
        return "attention"
    if namespace in ("aten", "fsdp"):
        if operator in PRODUCTS:
            return "products"
        return "update" if operator.startswith(("_fused_", "_foreach_")) else "elementwise"
    return "elementwise" if "triton" in name else None


class Expectation:
    """Compares a run with its forecast.

    Args:
        setup: the run; its model is not parallelized yet. Nothing is expected of a run that was not prepared, such as an audit.
        device: device of this rank.
        forecast: the command that makes the forecast; ``None``: there is none.
        speaks: whether this is rank 0. Other ranks do nothing.
    """

    def __init__(self, setup: RunSetup, device: torch.device, forecast: Forecast | None, *, speaks: bool) -> None:
        self.device, self._profiled, self._file = device, profiled(device), setup.paths.forecast
        self._process: subprocess.Popen[bytes] | None = None
        speaks = speaks and setup.paths.config.is_file()
        gpu = _gpu(setup, device) if speaks else None
        self.operations = operations_of_step(setup) if speaks else None
        self._ranks, self._left = setup.layout.world_size, WARM
        dtype = setup.plan.options.param_dtype or setup.config.model.dtype
        self.peak = 0.0 if gpu is None else 1e12 * load_hardware(gpu).peak(dtype)
        self._measured: Mapping[str, float] | None = None
        if gpu is not None and forecast is not None:
            command = forecast(setup.paths.config, self._ranks, gpu)
            kept = {key: value for key, value in os.environ.items() if not key.startswith(_OF_LAUNCHERS)}
            self._output = tempfile.TemporaryFile()  # noqa: SIM115  # read in another method
            alone = {**HIDDEN, "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(command, stdout=self._output, stderr=subprocess.DEVNULL, env={**kept, **alone})
            with suppress(OSError):  # it may have ended already
                os.setpriority(os.PRIO_PROCESS, self._process.pid, NICENESS)

    def metrics(self, step_seconds: float) -> dict[str, float]:
        """Return the metrics that follow from the time of a step: ``model_tflops`` of a device, and ``mfu``."""
        if self.operations is None:
            return {}
        speed = self.operations / self._ranks / step_seconds
        return {"model_tflops": speed / 1e12, **({"mfu": speed / self.peak} if self.peak else {})}

    @property
    def measured(self) -> bool:
        """Whether the measured step is over."""
        return self._measured is not None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a step inside. One of them is profiled: the first one after the forecast is there."""
        self._left -= 1
        if self._left >= 0 or self._process is None or self._measured is not None or self._process.poll() is None:
            yield
            return
        synchronize(self.device)
        begun = time.perf_counter()
        with profile(use_device=self.device.type if self._profiled else None, use_kineto=self._profiled) as found:
            yield
            synchronize(self.device)
        whole, parts = time.perf_counter() - begun, Counter[str]()
        for event in found.key_averages():
            part = part_of(event.key)
            if part is not None and event.device_type == DeviceType.CPU:  # rows of kernels repeat those of their operators
                parts[part] += (event.self_device_time_total if self._profiled else event.self_cpu_time_total) / 1e6
        if is_accelerator(self.device) and not self._profiled:
            self._measured = {ALL: whole}  # the host's time for an operator is not the device's
        else:
            self._measured = {**parts, "waiting": max(0.0, whole - sum(parts.values()))}

    def tell(self, say: Callable[[Any], None]) -> None:
        """Say, once, what the forecast was and what was measured, and write it beside the metrics."""
        if self._measured is None or self._process is None:
            return
        process, self._process = self._process, None
        self._output.seek(0)
        text = self._output.read()
        self._output.close()
        if process.returncode:
            say("no forecast: `meshwright plan --gpu` of this run says why")
            return
        expected = json.loads(text)
        say(compared(expected, self._measured))
        write_whole(self._file, json.dumps({"forecast": expected, "measured": dict(self._measured)}).encode())

    def close(self) -> None:
        """End the process that makes the forecast."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._output.close()


def paired(forecast: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Return the seconds of each part of a step, forecast and measured, and of all together; the arguments are those of
    :func:`compared`.
    """
    whole = {ALL: (sum(forecast.values()), sum(measured.values()))}
    if ALL in measured:
        return whole
    waiting = sum(seconds for part, seconds in forecast.items() if part not in COMPUTED)
    expected = {part: forecast.get(part, 0.0) for part in COMPUTED} | {"waiting": waiting}
    return {part: (seconds, measured.get(part, 0.0)) for part, seconds in expected.items()} | whole


def compared(forecast: Mapping[str, float], measured: Mapping[str, float]) -> Table:
    """Return a table of the parts of a step in milliseconds, and which of them is off most.

    Args:
        forecast: part to seconds; what is none of :data:`COMPUTED` is waiting.
        measured: the same of a step that was profiled; or only the whole of one, as :data:`ALL`.
    """
    pairs = paired(forecast, measured)
    off = max(pairs, key=lambda part: 0.0 if part == ALL else abs(pairs[part][0] - pairs[part][1]))
    caption = f"off most: {off}" if len(pairs) > 1 else None
    table = Table(title="A step, in ms", title_justify="left", box=None, caption=caption, caption_justify="left")
    for column in ("", "forecast", "measured"):
        table.add_column(column, justify="right" if column else "left")
    for part, times in pairs.items():
        table.add_row(part, *(f"{1000 * seconds:,.3g}" for seconds in times))
    return table


def _gpu(setup: RunSetup, device: torch.device) -> str | None:
    """Return the device of a run as a name or a file of ``--gpu``; ``None``: unknown."""
    if setup.config.metrics.gpu is not None:
        return setup.config.metrics.gpu
    return name_of(device_name(device.type, device.index)) if is_accelerator(device) else None

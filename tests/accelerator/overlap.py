"""The timeline of a step of training on the simulated accelerator, with the durations that the forecast gives everything.

Operators take what the roofline of :mod:`meshwright.trace.time` gives them, collectives what
:func:`~meshwright.plan.cost.links.collective_seconds` does, and the host starts them at once. So what differs from the forecast
is what overlaps.

``python -m tests.accelerator.overlap`` prints the table of docs/measurements.md.
"""

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from meshwright.layout import Layout
from meshwright.plan.cost.hardware import Hardware
from meshwright.plan.cost.links import collective_seconds
from meshwright.ranks.pool import Pool
from meshwright.trace.time import MEMORY_REACHED, SHAPES
from meshwright.train.config import RunConfig
from meshwright.train.trainer import Trainer
from tests.accelerator.runs import train_with

HARDWARE = Hardware(
    name="simulated", memory_gib=1.0, reserved_gib=0.1, bf16_tflops=0.02, fp32_tflops=0.008, achievable=0.8, attention=0.5,
    hbm_tb_s=0.05, gpus_per_node=8, link_gb_s=0.15, link_us=10.0, nic_gb_s=0.05, nic_us=20.0, host_gb_s=0.1, launch_us=0.0,
    overlap=1.0,
)  # fmt: skip
"""A slow device, on which the collectives of a tiny model take about as long as its compute."""

KINDS = {
    "allgather": "all_gather", "allreduce": "all_reduce", "reduce_scatter": "reduce_scatter", "alltoall": "all_to_all",
    "send": "send", "recv": "send",
}  # fmt: skip
"""Names of collectives on the accelerator to those of the plan."""

DATA, STEP = "data ranks", "step"
"""What FSDP2 communicates; and scalars of a step (tokens, gradient norm, metrics), which no forecast has."""


class Watched(NamedTuple):
    """What a rank's step did, in seconds.

    Attributes:
        length: of the step.
        parts: ``compute``, what each axis exposes, and ``idle``, when nothing runs.
    """

    length: float
    parts: dict[str, float]


_FOUND: list[Any] = []


def watch(trainer: Trainer, step: int = 1) -> None:
    """A plant: the timeline of a step is kept for :func:`watched`."""
    module, before = torch.get_device_module(trainer.device), trainer.train_step
    layout = trainer.setup.layout
    axis = next((name for name in ("pp", "tp", "cp", "ep") if (layout.ep if name == "ep" else layout.size(name)) > 1), DATA)

    def train_step() -> None:
        if trainer.step != step:
            return before()
        with module.timeline(
            partial(seconds_of_operator, HARDWARE), seconds_of_collective, axis=partial(axis_here, axis)
        ) as spans:
            before()
        _FOUND[:] = spans

    trainer.train_step = train_step  # type: ignore[method-assign]


def seconds_of_operator(hardware: Hardware, name: str, flops: float, size: float) -> float:
    """Return the seconds of an operator in fp32, as the forecast counts them."""
    if "attention" in name:
        return flops / (hardware.fp32_tflops * hardware.attention * 1e12)
    if flops:
        return flops / (hardware.fp32_tflops * hardware.achievable * SHAPES * 1e12)
    return size / (hardware.hbm_tb_s * MEMORY_REACHED * 1e12)


def seconds_of_collective(name: str, ranks: int, size: float) -> float:
    """Return the seconds of a collective among ranks of a node."""
    return collective_seconds(Layout(dp_shard=ranks).resolve(ranks), HARDWARE, "dp_shard_cp", KINDS[name], 1, size)


def axis_here(axis: str) -> str:
    """Return for which axis the host asks for a collective, by its stack."""
    frame, names, files = sys._getframe(), set(), set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        files.add(frame.f_code.co_filename)
        frame = frame.f_back  # type: ignore[assignment]
    if any("_fully_shard" in file for file in files):
        return DATA
    return STEP if "train_step" in names and "forward_backward" not in names else axis


def watched(device: torch.device) -> list[Any]:
    """Return the spans of the step that was watched last, as tuples."""
    return [tuple(span) for span in _FOUND]

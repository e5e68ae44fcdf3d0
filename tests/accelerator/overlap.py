"""The timeline of a step of training on the simulated accelerator, with the durations that the forecast gives everything.

Operators take what the roofline of :mod:`meshwright.trace.time` gives them, collectives what
:func:`~meshwright.plan.cost.links.collective_seconds` does, and the host starts them at once. So what differs from the forecast
is what overlaps.

``python -m tests.accelerator.overlap`` prints the table of docs/measurements.md.
"""

import sys
from collections import Counter
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from meshwright.layout import Layout
from meshwright.plan.cost.hardware import Hardware
from meshwright.plan.cost.links import collective_seconds
from meshwright.ranks.pool import Pool
from meshwright.trace.layer_work import MEMORY_REACHED, SHAPES
from meshwright.trace.time import forecast_time
from meshwright.train.config import RunConfig
from meshwright.train.start.setup import make_setup
from meshwright.train.trainer import Trainer
from tests.accelerator.build import build
from tests.accelerator.module import Span, exposed
from tests.accelerator.runs import train_with
from tests.accelerator.workers import Workers
from tests.train.runs import tiny_run, write_corpus

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


_FOUND: list[Any] = []


def watch(trainer: Trainer, step: int = 1) -> None:
    """A plant: the timeline of a step is kept for :func:`spans_watched`."""
    module, before = torch.get_device_module(trainer.device), trainer.train_step
    layout = trainer.setup.layout
    axis = next((name for name in ("pp", "tp", "cp", "ep") if (layout.ep if name == "ep" else layout.size(name)) > 1), DATA)

    def train_step() -> None:
        if trainer.step != step:
            return before()
        with module.timeline(seconds_of_operator, seconds_of_collective, axis=partial(axis_here, axis)) as spans:
            before()
        _FOUND[:] = spans

    trainer.train_step = train_step  # type: ignore[method-assign]


def seconds_of_operator(name: str, flops: float, size: float) -> float:
    """Return the seconds of an operator in fp32, as the forecast counts them."""
    if flops:
        reached = HARDWARE.attention if "attention" in name else HARDWARE.achievable * SHAPES
        return flops / (HARDWARE.fp32_tflops * reached * 1e12)
    return size / (HARDWARE.hbm_tb_s * MEMORY_REACHED * 1e12)


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


def spans_watched(device: torch.device) -> list[tuple[Any, ...]]:
    """Return the spans of the step that was watched last."""
    return [tuple(span) for span in _FOUND]


def parts_of(spans: list[Span]) -> dict[str, float]:
    """Return the seconds of a rank's step by part, which add up to its length.

    The parts are ``compute`` (an operator runs), each axis (its collectives run, and no operator), ``data ranks`` and ``step``
    (the same, and no collective of an axis, which a layer waits for anyway) and ``bubble`` (nothing runs).
    """
    length = max(span.end for span in spans)
    everything = [Span(0, "", 0.0, length, True), *(span for span in spans if not span.collective)]
    compute = length - exposed(everything)
    parts, waits = {"compute": compute}, exposed(spans)
    for axis in sorted({span.axis for span in spans if span.collective} - {DATA, STEP}):
        parts[axis] = exposed(spans, axis=axis)
    parts[STEP] = exposed(spans, axis=STEP)
    parts[DATA] = waits - sum(parts[axis] for axis in parts if axis != "compute")
    return {**parts, "bubble": length - compute - waits}


def measured(workers: Pool, config: RunConfig) -> dict[str, float]:
    """Train a run for two steps, and return the parts of the second on the rank that computes the most."""
    train_with(workers, config, watch)
    ranks = [parts_of([Span(*span) for span in spans]) for spans in workers.run(spans_watched)]
    return max(ranks, key=lambda parts: parts["compute"])


def forecast(config: RunConfig) -> dict[str, float]:
    """Return the same parts as ``meshwright plan --gpu`` forecasts them."""
    parts = Counter(dict(forecast_time(make_setup(config, 2), HARDWARE).parts))
    compute = sum(parts.pop(name) for name in ("products", "attention", "elementwise", "launches", "update", "beyond"))
    return {"compute": compute, **parts}


LLAMA = (
    "model.config={model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 4, num_attention_heads: 4, "
)
LLAMA += "num_key_value_heads: 2, max_position_embeddings: 64}"
MIXTRAL = LLAMA.replace("llama", "mixtral").replace("128", "64").replace("}", ", num_local_experts: 4, num_experts_per_tok: 4}")
"""Each token is sent to all experts, so that the load is even, as the forecast assumes."""

ONE, EACH = "layout.dp_shard=1", ("parallel.sync=reduce_each", "training.microbatch_size=1")
PIPELINE = (ONE, "layout.pp=2", "training.microbatch_size=1")
CASES = {
    "dp_shard=2": (LLAMA,),
    "dp_shard=2, reduce each": (LLAMA, *EACH),
    "dp_shard=2, reduce each, reshard": (LLAMA, *EACH, "parallel.reshard_after_forward=true"),
    "dp_replicate=2": (LLAMA, "layout.dp_replicate=2"),
    "tp=2": (LLAMA, ONE, "layout.tp=2"),
    "tp=2, sequence parallel": (LLAMA, ONE, "layout.tp=2", "parallel.sequence_parallel=true"),
    "cp=2, gather": (LLAMA, ONE, "layout.cp=2"),
    "cp=2, ring": (LLAMA, ONE, "layout.cp=2", "parallel.context_parallel=ring"),
    "ep=2": (MIXTRAL, "layout.ep=2"),
    "pp=2, 1f1b": (LLAMA, *PIPELINE),
    "pp=2, gpipe": (LLAMA, *PIPELINE, "parallel.pipeline.schedule=gpipe"),
    "pp=2, interleaved 1f1b": (LLAMA, *PIPELINE, "parallel.pipeline.schedule=interleaved_1f1b"),
    "pp=2, zbv": (LLAMA, *PIPELINE, "parallel.pipeline.schedule=zbv"),
}
"""Overrides of a tiny run, by name."""

COMMON = ("training.steps=2", "data.eval_fraction=0", "data.packing=pad", "checkpoint.every=0")


def main() -> None:
    """Print a row for each part of each case, in milliseconds."""
    rows = ["| layout | part | on the timeline | forecast | ratio |", "|---|---|---|---|---|"]
    with TemporaryDirectory() as folder, Workers(2, build()) as workers:
        corpus = write_corpus(Path(folder, "words.jsonl"))
        for number, (name, overrides) in enumerate(CASES.items()):
            place = Path(folder, str(number))
            place.mkdir()
            config = tiny_run(place, corpus, *COMMON, *overrides)
            found, said = measured(workers, config), forecast(config)
            found, said = ({**parts, "whole step": sum(parts.values())} for parts in (found, said))
            for part in (part for part in found if said.get(part, 0.0) > 0):
                ratio = said[part] / found[part]
                rows.append(f"| {name} | {part} | {1e3 * found[part]:.2f} | {1e3 * said[part]:.2f} | {ratio:.2f} |")
    print("\n".join(rows))


if __name__ == "__main__":
    main()

"""How each rank of each contender is measured. The same code for all, so that none is measured more kindly.

A rank runs warm-up steps, timed steps, and at last one counted step, in which collectives and what autograd saves are
counted and nothing is timed. What it found goes to ``rank-N.json`` in the output directory of its job.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

LAUNCHED = "BENCHMARK_LAUNCHED"
"""Environment variable: when the driver started the job, in seconds since the epoch."""


@dataclass(frozen=True)
class Job:
    """What the driver asks of a rank.

    Attributes:
        directory: what ``workload.write`` filled.
        output: where ``rank-N.json`` goes.
        microbatches: in an optimizer step.
        steps: optimizer steps, without the counted one.
        variant: a variant of the contender, if it has some.
        profile: where rank 0 leaves a profile of its timed steps; such a job's times are worthless.
    """

    directory: Path
    output: Path
    microbatches: int
    steps: int
    variant: str
    profile: Path | None


def job(variants: tuple[str, ...]) -> Job:
    """Read the command line of a rank; the first variant is the default."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--variant", choices=variants, default=variants[0])
    parser.add_argument("--profile", type=Path)
    return Job(**vars(parser.parse_args()))


def measure(job: Job, model: torch.nn.Module, train_step: Callable[[int], float], *, sharded: bool = True) -> None:
    """Run a contender's steps and write down what they cost.

    Args:
        job: what the driver asks.
        model: sharded.
        train_step: runs the optimizer step of a number, counted from 0; returns its loss, of this rank or of all.
        sharded: whether the contender is refused unless it is sharded by FSDP2.
    """
    whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if sharded and whole:
        raise SystemExit(f"not sharded, so this would not be FSDP2: {', '.join(whole)}")

    cpu, wall, losses = [], [], []
    profiler = _profiler(job)
    first_step_seconds = 0.0
    for step in range(job.steps):
        cpu_begun, wall_begun = time.process_time(), time.perf_counter()
        if profiler and step:
            profiler.enable()
        losses.append(train_step(step))
        if profiler:
            profiler.disable()
        cpu.append(time.process_time() - cpu_begun)
        wall.append(time.perf_counter() - wall_begun)
        if step == 0:
            first_step_seconds = time.time() - float(os.environ.get(LAUNCHED, "nan"))
    if profiler:
        profiler.dump_stats(job.profile)
    peak = peak_rss()

    from saved import SavedBytes

    from meshwright.distributed.comm_counter import CommCounter
    from meshwright.trace.live import LiveBytes  # after all that is timed: importing these costs something

    with LiveBytes(model, settle=True) as live, CommCounter() as counter, SavedBytes() as saved:
        train_step(job.steps)
    if sharded and not (counter.counts["all_gather"] and counter.counts["reduce_scatter"]):
        raise SystemExit(f"no gathers or no reductions, so this would not be FSDP2: {dict(counter.counts)}")

    found = {
        "cpu": cpu,
        "wall": wall,
        "losses": losses,
        "first_step_seconds": first_step_seconds,
        "peak_rss": peak,
        "counts": dict(counter.counts),
        "bytes": dict(counter.bytes),
        "counts_of": {_named(ranks): dict(counts) for ranks, counts in counter.counts_of.items()},
        "bytes_of": {_named(ranks): dict(sizes) for ranks, sizes in counter.bytes_of.items()},
        "saved_bytes": saved.peak,
        "live_bytes": live.peak,
    }
    job.output.mkdir(parents=True, exist_ok=True)
    (job.output / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))


def _named(ranks: tuple[int, ...]) -> str:
    """A group as a key of JSON: its ranks."""
    return " ".join(map(str, ranks))


def peak_rss() -> int:
    """Peak resident bytes of this process since its exec (``ru_maxrss`` would include the launcher it came from)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _profiler(job: Job):
    if job.profile is None or dist.get_rank() != 0:
        return None
    import cProfile

    return cProfile.Profile(time.process_time)  # CPU time: what this process waits for is none of it

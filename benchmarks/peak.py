"""Bytes that a rank holds at the worst moment of a step: forecast by a trace, against real steps on two processes.

    python -m benchmarks.peak [FAMILY ...]

Every family of the support matrix on six layouts; the lowest of five real steps, by the same tracker. A cell is by how much the
trace is above (+) or below (-) the real peak; ``-``: the layout is refused for the family.
"""

import logging
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from maintain.cells import LAYOUTS, Place, Variant, family_case
from maintain.tiny import TINY_MODELS
from meshwright.distributed.experts.dispatch import static_splits
from meshwright.errors import MeshwrightError
from meshwright.plan.given.closed_choices import SyncPolicy
from meshwright.ranks.pool import Pool
from meshwright.trace.step import run_step, trace_step
from meshwright.train.config import RunConfig
from meshwright.train.start.setup import make_setup

SIX = ("shard 2", "replicate 2", "tp 2", "tp 2 seq", "cp 2", "ep 2")
OPTIONS = Variant(SyncPolicy.RESHARD_EACH, "float32", 2, checkpointing=False, offload=False, loss_parallel=True)
RUNS = 5


def traced(config: RunConfig) -> int:
    """Return the peak by a trace, in a process without a group."""
    warnings.simplefilter("ignore")
    return trace_step(make_setup(config, 2)).peak


def ran(device: torch.device, config: RunConfig) -> int:
    """Return the peak of a real step on this rank. Its values mean nothing, so tokens are routed as in the trace: evenly."""
    with static_splits():
        return run_step(make_setup(config, 2), None).peak


def cell(config: RunConfig, alone: ProcessPoolExecutor, ranks: Pool) -> str:
    """Return the difference of a cell, or why there is none."""
    try:
        make_setup(config, 2)
    except MeshwrightError:
        return "-"
    try:
        fake = alone.submit(traced, config).result()
    except MeshwrightError as error:
        return f"no trace: {error.problems[0][:60]}"
    real = min(ranks.run(ran, config)[0] for _ in range(RUNS))
    return f"{fake / real - 1:+.1%}"


def main() -> None:
    """Print a line for each family."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    places: list[Place] = [place for label in SIX for place in LAYOUTS if place.label == label]
    print(f"| family | {' | '.join(SIX)} |\n|---{'|---' * len(SIX)}|")
    forked = get_context("fork")
    with (
        tempfile.TemporaryDirectory() as folder,
        Pool(2) as ranks,
        ProcessPoolExecutor(1, mp_context=forked) as alone,
    ):
        for family in sys.argv[1:] or TINY_MODELS:
            cells = []
            for place in places:
                try:
                    config = family_case(family, place, OPTIONS, Path(folder), packing="pad").config
                    cells.append(cell(config, alone, ranks))
                except MeshwrightError:
                    cells.append("-")
            print(f"| {family} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

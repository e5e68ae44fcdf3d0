"""The peak of memory of training on the simulated accelerator, beside the forecast.

``python -m tests.accelerator.peaks`` prints the table of docs/measurements.md.
"""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from meshwright.distributed.experts.dispatch import static_splits
from meshwright.models.objective import Batch
from meshwright.ranks.pool import Pool
from meshwright.trace.held.memory import forecast_memory
from meshwright.train.config import RunConfig
from meshwright.train.start.setup import make_setup
from meshwright.train.trainer import Trainer
from tests.accelerator.build import build
from tests.accelerator.runs import train_with
from tests.accelerator.workers import Workers
from tests.train.runs import tiny_run, write_corpus

__all__ = ["CASES_OF_MEMORY", "EVERY", "peak_and_forecast"]

CASES_OF_MEMORY = (
    "defer", "reduce each", "recomputed", "tied", "lora", "muon", "replicas", "tp", "ep", "cp gather", "cp ring", "cp ulysses",
    "chunks of the loss", "pp gpipe", "pp 1f1b", "pp interleaved", "pp zero bubble", "pp zbv", "pp dualpipe_v",
)  # fmt: skip
"""Names of cases of ``tests/accelerator/test_training.py``."""

EVERY = ("data.sequence_length=40", "training.steps=3", "data.eval_fraction=0", "checkpoint.every=0")
"""Overrides of all of them: a peak is that of steps alone."""


def as_forecast(trainer: Trainer) -> None:
    """A plant: each sequence has two documents of equal length, and routers give all experts equally many tokens."""
    share, run = trainer.batches.training, trainer.run

    def training(batches: list[Batch], numbers: Sequence[Sequence[int]]) -> list[Batch]:
        for batch in batches:
            length = batch["input_ids"].shape[1]
            batch["position_ids"] = (torch.arange(length) % (length // 2)).expand_as(batch["input_ids"]).contiguous()
        return share(batches, numbers)

    def run_evenly() -> None:
        with static_splits(1.0):
            run()

    vars(trainer.batches)["training"], vars(trainer)["run"] = training, run_evenly


def peak_and_forecast(config: RunConfig, workers: Pool) -> tuple[int, int]:
    """Return the most bytes that a rank held in training, and those that are forecast. The data are :func:`as_forecast`."""
    peak = max(rank.peak or 0 for rank in train_with(workers, config, as_forecast))
    return peak, forecast_memory(make_setup(config, workers.world_size)).peak


def table(names: Sequence[str]) -> str:
    """Return the table as Markdown."""
    from tests.accelerator.test_training import CASES, overrides_of, write_weights

    lines = ["| case | forecast, bytes | peak | over the forecast |", "|---|---|---|---|"]
    with TemporaryDirectory() as folder, Workers(2, build()) as workers:
        corpus = write_corpus(Path(folder) / "words.jsonl")
        for number, name in enumerate(names):
            directory = Path(folder) / str(number)
            directory.mkdir()
            weights = write_weights(Path(folder), CASES[name].model)
            peak, forecast = peak_and_forecast(
                tiny_run(directory, corpus, *EVERY, *overrides_of(CASES[name], weights)), workers
            )
            lines.append(f"| {name} | {forecast:,} | {peak:,} | {peak / forecast - 1:+.1%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(CASES_OF_MEMORY))

"""The forecast of a pipeline is composed of parts; here it is held against steps of real ranks."""

from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.distributed.pipeline.stage_parts import models_of
from meshwright.trace.few_layers import Traces
from meshwright.trace.held.memory import MemoryForecast, forecast_memory
from meshwright.trace.live import LiveBytes
from meshwright.train.config import RunConfig
from meshwright.train.start.prepare import prepare_run
from meshwright.train.start.setup import make_setup
from tests.harness import run_ranks
from tests.train.runs import LLAMA, tiny_run, trainer_on_rank, write_corpus


def peak_of_rank(rank: int, config: RunConfig, store: Path) -> int:
    """The lowest peak of a few steps of a trainer; the first one agrees on the order of units."""
    trainer = trainer_on_rank(config, store)
    trainer.train_step()
    trainer.step += 1
    held = [item for state in trainer.optimizer.state.values() for item in state.values() if isinstance(item, torch.Tensor)]
    peaks = []
    for _ in range(3):
        with LiveBytes(nn.ModuleList(models_of(trainer.model)), held, settle=True) as live:
            trainer.train_step()
        trainer.step += 1
        peaks.append(live.peak)
    return min(peaks)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dp_shard", [1, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved_1f1b"])
def test_the_fullest_rank_of_a_pipeline(schedule: str, dp_shard: int, tmp_path: Path) -> None:
    """It is never much below, and up to a quarter above: the largest parts need not coincide."""
    model = {**LLAMA, "num_hidden_layers": 8}
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    config = tiny_run(
        tmp_path, corpus, f"model.config={model}", "layout.pp=2", f"layout.dp_shard={dp_shard}",
        f"parallel.pipeline.schedule={schedule}", "training.global_batch_size=16", "data.packing=pad",
    )  # fmt: skip
    _, _, store = prepare_run(config, 2 * dp_shard)
    real = run_ranks(peak_of_rank, 2 * dp_shard, config, store.directory)

    def expected(_: int) -> MemoryForecast:
        setup = make_setup(config, 2 * dp_shard)
        return forecast_memory(setup, Traces(setup, device=False))

    (found,) = run_ranks(expected, 1, group=False)
    assert 0.96 * max(real) <= found.peak <= 1.25 * max(real)

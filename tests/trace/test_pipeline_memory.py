"""The forecast of a pipeline is composed of parts; here it is held against steps of real ranks."""

from pathlib import Path

import pytest
import torch
from torch import nn

from maintain.tiny import TINY_MODELS
from meshwright.distributed.pipeline.stage_parts import models_of
from meshwright.trace.few_layers import Traces
from meshwright.trace.held.memory import MemoryForecast, memory_moments
from meshwright.trace.live import LiveBytes
from meshwright.train.config import RunConfig
from meshwright.train.start.prepare import prepare_run
from meshwright.train.start.setup import make_setup
from tests.diffusion_gemma import RUN as DIFFUSION
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


def forecasts(config: RunConfig, world: int) -> list[MemoryForecast]:
    """In a process of its own: a forecast makes process groups of a world that is not there."""

    def expected(_: int) -> list[MemoryForecast]:
        setup = make_setup(config, world)
        return memory_moments(setup, Traces(setup, device=False))

    return run_ranks(expected, 1, group=False)[0]


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
    fullest = max(found.peak for found in forecasts(config, 2 * dp_shard))
    assert 0.96 * max(real) <= fullest <= 1.25 * max(real)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("family", "schedule"), [("nemotron_h", "1f1b"), ("nemotron_h", "zbv"), ("deepseek_v3", "1f1b")])
def test_each_rank_of_a_pipeline_whose_layers_keep_different_things(family: str, schedule: str, tmp_path: Path) -> None:
    """Each kind of layer counts with what it keeps, also where so few layers are there that a trace has all of them."""
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    model = {"model_type": family, **TINY_MODELS[family].config}
    del model["vocab_size"]  # that of the corpus
    config = tiny_run(
        tmp_path, corpus, f"model.config={model}", "layout.pp=2", "layout.dp_shard=1",
        f"parallel.pipeline.schedule={schedule}", "training.global_batch_size=16", "data.packing=pad",
    )  # fmt: skip
    _, _, store = prepare_run(config, 2)
    real, found = run_ranks(peak_of_rank, 2, config, store.directory), forecasts(config, 2)
    for rank in (0, 1):
        peak = max(one.peak for one in found if one.rank == rank)
        assert 0.96 * real[rank] <= peak <= 1.25 * real[rank]


@pytest.mark.thorough
@pytest.mark.parametrize("batch", [8, 16])
def test_each_rank_of_a_pipeline_that_a_microbatch_passes_several_times(batch: int, tmp_path: Path) -> None:
    """Its stages share their layers, each pass keeps what its layers keep, and a layer that does not run keeps nothing."""
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    staged = ("layout.pp=2", "layout.dp_shard=1", "parallel.pipeline.schedule=interleaved_1f1b")
    config = tiny_run(tmp_path, corpus, *DIFFUSION, *staged, f"training.global_batch_size={batch}")
    _, _, store = prepare_run(config, 2)
    real, found = run_ranks(peak_of_rank, 2, config, store.directory), forecasts(config, 2)
    for rank in (0, 1):
        peak = max(one.peak for one in found if one.rank == rank)
        assert 0.95 * real[rank] <= peak <= 1.15 * real[rank]

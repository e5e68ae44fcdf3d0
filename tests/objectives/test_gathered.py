"""Bytes that an objective gathers over data ranks: learned as it is tried, and what a real step sends."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.distributed.comm_counter import CommCounter
from meshwright.models.objective import Batch, Objective
from meshwright.objectives import given
from meshwright.objectives.running import Seen
from meshwright.objectives.trying.gathered import Sizes, gathered_by
from meshwright.plan.cost.activation_traffic import activation_traffic
from meshwright.plan.cost.hardware import load_hardware
from meshwright.trace.time import forecast_time
from meshwright.train.config import RunConfig
from meshwright.train.start.prepare import prepare_run
from meshwright.train.start.setup import make_setup
from tests.harness import run_ranks
from tests.train.runs import tiny_run, trainer_on_rank, write_corpus


class OfAllKinds(Objective):
    """Gathers vectors of documents, values of tokens, what a head says of them, and numbers without a gradient."""

    def counts(self, batches: list[Batch]) -> list[int]:
        return [given.document_count(batches)]

    def modules(self, model: Any) -> dict[str, nn.Module]:
        return {"head": nn.Linear(model.config.get_text_config().hidden_size, 3)}

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        vectors = given.pooled(given.hidden(model, batch), batch)
        log_probs = given.log_probs(model, batch)
        says = given.gather(given.module(model, "head")(vectors)).float().logsumexp(-1).sum()
        near = (given.gather(vectors).float().tanh().sum() + given.gather(log_probs).tanh().sum() + says).tanh()
        seen = given.gather(batch["document_exists"].long()).sum()
        return (given.document_sum(given.per_document(log_probs, batch) * (near + seen.clamp(max=1)), batch),)


LAYOUTS = {
    "replicate 2": ("layout.dp_replicate=2", "layout.dp_shard=1"),
    "shard 2, packed": ("data.packing=pack",),
    "shard 2, bf16": ("parallel.param_dtype=bfloat16",),
}


def config(folder: Path, *overrides: str) -> RunConfig:
    return tiny_run(
        folder,
        write_corpus(folder / "words.jsonl"),
        f"training.objective={__name__}:OfAllKinds",
        "data.packing=pad",
        "training.eval_every=0",
        "checkpoint.every=0",
        *overrides,
    )


def counted(rank: int, run: RunConfig, store: Path) -> tuple[dict[str, list[int]], dict[str, list[int | None]]]:
    """What the objective gathers and reduces in a step, told from other collectives by its own calls; and what is planned."""
    trainer = trainer_on_rank(run, store)
    counter, gather = CommCounter(), given._Gather
    forward, backward = gather.forward, gather.backward

    def counting(function: Any) -> Any:
        def inside(*args: Any) -> Any:
            with counter:
                return function(*args)

        return staticmethod(inside)

    gather.forward, gather.backward = counting(forward), counting(backward)
    try:
        trainer.train_step()
    finally:
        gather.forward, gather.backward = staticmethod(forward), staticmethod(backward)
        trainer.recorder.close()
    planned = {item.kind: [item.calls, item.size] for item in activation_traffic(trainer.setup.plan) if item.axis == "dp"}
    return {kind: [counter.counts[kind], counter.bytes[kind]] for kind in counter.counts}, planned


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_planned_bytes_are_those_of_a_step(tmp_path: Path, layout: str) -> None:
    run = config(tmp_path, *LAYOUTS[layout])
    _, _, store = prepare_run(run, 2)
    for found, planned in run_ranks(counted, 2, run, store.directory):
        assert found == planned
        assert found["all_gather"][0] == 4 * 2  # four in each of two microbatches
        assert found["all_reduce"][0] == 3 * 2  # numbers have no gradient


def test_the_forecast_has_their_seconds(tmp_path: Path) -> None:
    run, hardware = config(tmp_path, "layout.dp_shard=2"), load_hardware("h100")
    alone = make_setup(config(tmp_path, "training.objective=null"), 2)
    with_gathers = forecast_time(make_setup(run, 2), hardware).parts
    assert with_gathers["dp"] > 0
    assert "dp" not in forecast_time(alone, hardware).parts


def test_what_is_no_product_of_sizes_is_unknown() -> None:
    def tried(sizes: Sizes, dtype: torch.dtype) -> list[Seen]:
        return [Seen(sizes.rows * (sizes.documents + 1), dtype.itemsize)]

    assert gathered_by(tried) is None

    def square(sizes: Sizes, dtype: torch.dtype) -> list[Seen]:
        return [Seen(5 * sizes.rows**2 * sizes.length // 2, max(4, dtype.itemsize), reduced=True)]

    [one] = gathered_by(square) or ()
    assert one.size(3, 32, 7, 2) == 5 * 9 * 16 * 4
    assert one.reduced

"""Runs whose parameters are stored in bf16, with AdamW of torchao: copies of a parameter stay equal, and runs go on."""

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.distributed.update.flagged import local
from meshwright.distributed.update.quantized import is_quantized
from meshwright.plan.cost.price import totals
from meshwright.train.config import RunConfig
from meshwright.train.start.prepare import prepare_run
from tests.harness import run_ranks
from tests.train.runs import tiny_run, trainer_on_rank, write_corpus

pytest.importorskip("torchao", reason="pip install 'meshwright[torchao]'")

MODEL = (
    "model.config={model_type: llama, hidden_size: 64, intermediate_size: 127, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 2, max_position_embeddings: 64}"
)
"""Shards of some matrices are no whole number of blocks, and on two ranks some have blocks on one of them only."""

Found = tuple[dict[str, torch.Tensor], int, int]


def config(folder: Path, *overrides: str) -> RunConfig:
    corpus = folder / "words.jsonl"
    if not corpus.exists():
        write_corpus(corpus)
    kept = ("training.steps=20", "training.eval_every=0", "checkpoint.every=0", "model.dtype=bfloat16", MODEL)
    chance = "optimizer.with={block_size: 64, bf16_stochastic_round: true}"
    return tiny_run(folder, corpus, *kept, "optimizer.kind=adamw8bit", chance, *overrides)


def steps(rank: int, run: RunConfig, store: Path, until: int) -> Found:
    """Parameters after some steps; the number of moments in blocks; bytes of all moments."""
    trainer = trainer_on_rank(run, store)
    begun = torch.get_rng_state()
    trainer.optimizer.step()  # without gradients: what is drawn for nothing leaves no trace
    assert torch.equal(torch.get_rng_state(), begun)
    while trainer.step < until:
        trainer.train_step()
        trainer.step += 1
    trainer.save()
    trainer.checkpoints.finish()
    trainer.recorder.close()
    moments = [own for state in trainer.optimizer.state.values() for key, own in state.items() if key != "step"]
    blocks = [own for own in moments if is_quantized(own)]
    size = sum(_bytes(local(own)) for own in moments)
    found = {name: local(own.data).clone() for name, own in trainer.model.named_parameters()}
    return found, len(blocks), size


def _bytes(moment: Any) -> int:
    parts = [getattr(moment, name) for name in moment.tensor_attrs] if is_quantized(moment) else [moment]
    return sum(part.nbytes for part in parts)


def ran(run: RunConfig, ranks: int, until: int) -> list[Found]:
    setup, _, store = prepare_run(run, ranks)
    found: list[Found] = run_ranks(steps, ranks, run, store.directory, until)
    most, planned = max(size for *_, size in found), totals(setup.plan).optimizer_bytes
    assert most <= planned <= 1.1 * most  # of each parameter, the plan has the rank with the most
    return found


@pytest.mark.thorough
def test_copies_stay_equal_and_a_run_goes_on_on_another_layout(tmp_path: Path) -> None:
    """Parameters are rounded by chance: from the generators of the ranks, copies would drift apart."""
    (first, blocks, _), (second, *_) = ran(config(tmp_path, "layout.dp_replicate=2", "layout.dp_shard=1"), 2, 3)
    assert blocks
    for name, own in first.items():
        assert own.dtype is torch.bfloat16
        assert torch.equal(own, second[name]), name
    here, there = ran(config(tmp_path, "layout.dp_shard=2"), 2, 5)
    assert here[1] != there[1]
    for tensors, *_ in (here, there):
        assert all(bool(own.isfinite().all()) for own in tensors.values())


@pytest.mark.thorough
def test_norms_stay_equal_on_ranks_that_slice_the_rest(tmp_path: Path) -> None:
    (first, *_), (second, *_) = ran(config(tmp_path, "layout.dp_shard=1", "layout.tp=2"), 2, 3)
    norms = [name for name in first if "norm" in name]
    assert norms
    assert all(torch.equal(first[name], second[name]) for name in norms)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["adamw4bit", "adamwfp8"])
def test_other_kinds_take_bf16(tmp_path: Path, kind: str) -> None:
    found = ran(config(tmp_path, f"optimizer.kind={kind}"), 2, 2)
    assert all(blocks for _, blocks, _ in found)

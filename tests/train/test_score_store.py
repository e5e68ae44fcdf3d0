"""The pass over all tokens of a store: on every axis what the model says of each document alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from meshwright.data.scores import Scores, Split, part_file
from meshwright.data.store import TokenStore
from meshwright.errors import DataError
from meshwright.train.config import RunConfig
from meshwright.train.engine.score_store import score_store
from meshwright.train.schema.parallel_config import LayoutConfig, ParallelConfig
from meshwright.train.start.prepare import prepare_run
from tests.harness import RankError, refuses, run_ranks
from tests.train.runs import tiny_run, trainer_on_rank, write_corpus

TOP = 3
FP64 = (
    "parallel.param_dtype=float64",
    "parallel.reduce_dtype=float64",
    "model.dtype=float64",
    "model.experts_implementation=eager",
)
MIXTRAL = (
    "model.config={model_type: mixtral, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 2, num_local_experts: 4, num_experts_per_tok: 2, max_position_embeddings: 64}"
)

CELLS = {
    "tp 2, pad, chunks": (2, ("layout.tp=2", "data.packing=pad", "parallel.loss_parallel=true", "parallel.loss_chunks=3")),
    "shard 2, one a batch": (2, ("training.microbatch_size=1",)),
    "cp 2, chunks": (2, ("layout.cp=2", "parallel.loss_chunks=3")),
    "pp 2": (2, ("layout.pp=2",)),
}
PRODUCTS = {
    "one": (1, ()),
    "one, chunks": (1, ("parallel.loss_chunks=3",)),
    "tp 2": (2, ("layout.tp=2", "parallel.loss_parallel=true")),
    "cp 2 contiguous, pad": (2, ("layout.cp=2", "parallel.context_balance=contiguous", "data.packing=pad")),
    "tp 2 seq": (2, ("layout.tp=2", "parallel.sequence_parallel=true")),
    "ep 2": (2, ("layout.ep=2", MIXTRAL)),
    "cp 2 x tp 2": (4, ("layout.cp=2", "layout.tp=2")),
    "pp 2 x cp 2": (4, ("layout.pp=2", "layout.cp=2")),
    "2 x shard 2": (4, ("layout.dp_replicate=2", "training.microbatch_size=1")),
    "pp 2 x shard 2, a V": (
        4,
        ("layout.pp=2", "parallel.pipeline.schedule=zbv", "training.microbatch_size=1", "model.config.num_hidden_layers=4"),
    ),
}


def run(folder: Path, *overrides: str, sequence_length: int = 64) -> RunConfig:
    folder.mkdir(exist_ok=True)
    corpus = write_corpus(folder / "words.jsonl", documents=30)
    sets = (f"data.sequence_length={sequence_length}", "data.long_documents=truncate", "tokenizer.vocab_size=301", *FP64)
    return tiny_run(folder, corpus, *sets, *overrides)


def score_on_rank(rank: int, config: RunConfig, store: Path, out: Path) -> None:
    seen: list[tuple[int, int]] = []
    trainer = trainer_on_rank(config, store)
    score_store(trainer, TokenStore.open(store), out, {"seed": 0}, top_k=TOP, progress=lambda *numbers: seen.append(numbers))
    assert trainer.model.training
    assert seen[-1][0] == seen[-1][1]


def alone_on_rank(rank: int, config: RunConfig, store: Path) -> dict[str, npt.NDArray[Any]]:
    """The same by the formula, with the plain model of transformers, a document after another."""
    trainer, tokens = trainer_on_rank(config, store), TokenStore.open(store)
    found: dict[str, list[Any]] = {"log_probs": [], "top_ids": [], "top_log_probs": []}
    for begin, end in zip(tokens.offsets[:-1], tokens.offsets[1:], strict=True):
        ids = torch.from_numpy(tokens.tokens[begin:end].astype(np.int64))[None]
        with torch.no_grad():
            logs = trainer.model.eval()(input_ids=ids).logits[0, :-1].double().softmax(-1).log()
        top = logs.sort(-1, descending=True)
        for name, values in (
            ("log_probs", logs[torch.arange(len(logs)), ids[0, 1:]]),
            ("top_ids", top.indices[:, :TOP]),
            ("top_log_probs", top.values[:, :TOP]),
        ):
            found[name] += [torch.zeros_like(values[:1]), values]  # nothing is said of the first token
    return {name: torch.cat(values).numpy() for name, values in found.items()}


def compare(folder: Path, ranks: int, overrides: tuple[str, ...]) -> None:
    config = run(folder, *overrides)
    store = prepare_run(config, ranks)[2].directory
    run_ranks(score_on_rank, ranks, config, store, folder / "scores")
    dtypes = {name: getattr(config.parallel, name) for name in ("param_dtype", "reduce_dtype")}
    alone = config.model_copy(update={"layout": LayoutConfig(dp_shard=1), "parallel": ParallelConfig(**dtypes)})
    expected = run_ranks(alone_on_rank, 1, alone, store)[0]
    tokens = TokenStore.open(store)
    scores = Scores.open(folder / "scores", tokens)
    assert scores.damage() == []
    found = scores.beside(tokens).values
    assert {path.name for path in (folder / "scores").iterdir()} == {*scores.files, "index.json"}
    assert (tokens.held_out.sum(), len(tokens.lengths)) == (3, 30)
    np.testing.assert_array_equal(found["top_ids"], expected["top_ids"])
    for name in ("log_probs", "top_log_probs"):
        np.testing.assert_allclose(found[name], expected[name].astype(np.float32), rtol=2e-7, atol=1e-30)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("label", CELLS)
def test_every_axis_is_the_plain_model(tmp_path: Path, label: str) -> None:
    compare(tmp_path, *CELLS[label])


@pytest.mark.thorough
@pytest.mark.parametrize("label", PRODUCTS)
def test_products(tmp_path: Path, label: str) -> None:
    compare(tmp_path, *PRODUCTS[label])


def test_what_is_not_learned_is_scored_too_and_long_texts_to_their_end(tmp_path: Path) -> None:
    chats = [{"prompt": f"what is {n} and {n}", "completion": f"it is {2 * n}"} for n in range(12)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    template = "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}"
    chat = (
        f"data.files=['{tmp_path}/chats.jsonl']",
        f"tokenizer.chat_template={json.dumps(template)}",
        "tokenizer.vocab_size=270",
    )
    for name, overrides, length in (("chat", chat, 64), ("split", ("data.long_documents=split",), 16)):
        config = run(tmp_path / name, *overrides, sequence_length=length)
        store = prepare_run(config, 1)[2]
        run_ranks(score_on_rank, 1, config, store.directory, tmp_path / name / "scores")
        found = Scores.open(tmp_path / name / "scores", store).beside(store).values["log_probs"]
        assert (found < 0).sum() == len(found) - len(store.lengths)
        assert not found[store.offsets[:-1]].any()
        assert store.index.split > 0 or not store.loss_mask[1:].all()  # type: ignore[index]


def test_scores_are_whole_and_of_their_tokens(tmp_path: Path) -> None:
    config, other = run(tmp_path / "one"), run(tmp_path / "other", "training.seed=1")
    store = prepare_run(config, 1)[2]
    out = tmp_path / "scores"
    run_ranks(score_on_rank, 1, config, store.directory, out)
    with refuses(DataError, "data.store.damaged") as caught:
        Scores.open(out, prepare_run(other, 1)[2])
    assert "other tokens" in str(caught.value)
    column = out / "column-log_probs.bin"
    content = bytearray(column.read_bytes())
    content[5] ^= 1
    column.write_bytes(content)
    assert "column-log_probs.bin is not what was written" in Scores.open(out, store).damage()[0]
    column.write_bytes(content[:-4])
    with refuses(DataError, "data.store.damaged"):
        Scores.open(out, store)
    with refuses(DataError, "data.store.missing"):
        Scores.open(tmp_path, store)


def test_a_disk_that_is_full_ends_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run(tmp_path, "training.microbatch_size=1")
    store = prepare_run(config, 2)[2].directory
    monkeypatch.setattr("meshwright.train.engine.score_store.part_file", full_on_rank_1)
    with pytest.raises(RankError) as caught:
        run_ranks(score_on_rank, 2, config, store, tmp_path / "scores")
    assert str(caught.value).count("the values of tokens cannot be written: OSError: No space left on device") >= 2
    assert [path.name for path in tmp_path.glob("*scores*")] == []


def full_on_rank_1(directory: Path, name: str, split: Split, data_rank: int) -> Path:
    return Path("/dev/full") if data_rank == 1 else part_file(directory, name, split, data_rank)

"""`meshwright score`: rows that a run reads, of the weights of a run on any layout; and a student that learns from them."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.data.scores import Scores
from meshwright.data.store import TokenStore
from meshwright.errors import CheckpointError, ConfigError, DataError
from meshwright.train.config import RunConfig, load_config
from meshwright.train.start.prepare import prepare_run
from meshwright.train.start.run_files import Paths
from meshwright.train.start.scoring import ScoreJob, config_to_score, run_to_score
from meshwright.train.start.setup import make_setup
from tests.harness import refuses, run_ranks
from tests.train.runs import CPU, checkpoints, eval_losses, losses, rows, tiny_run, train, write_corpus

TOP = 8
OTHERS = ("layout.cp=2", "layout.pp=2", "data.packing=pad")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("teacher")
    corpus = write_corpus(folder / "words.jsonl", documents=60)
    config = tiny_run(folder, corpus, "training.steps=60", "data.long_documents=truncate", "checkpoint.every=30")
    train(config, 2)
    return config


def score(run: Path, out: Path, *overrides: str, ranks: int = 2, top_k: int = TOP) -> TokenStore:
    """What the command does, on forked ranks; returns the tokens with their scores."""
    found, checkpoint = run_to_score(run, overrides)
    work = out.with_name(f".{out.name}-work")
    job, config = ScoreJob(out, work, checkpoint, top_k), config_to_score(found, work, checkpoint)
    setup, _, store = prepare_run(config, ranks, noted=job.noted())
    job.check(setup)
    run_ranks(_score, ranks, job, config, store.directory)
    return Scores.open(work / "scores", store).beside(store)


def _score(rank: int, job: ScoreJob, config: RunConfig, store: Path) -> None:
    import torch.distributed as dist

    from meshwright.train.start.prepare import load_run_tokenizer

    setup = make_setup(config, dist.get_world_size(), load_run_tokenizer(config))
    job.run(setup, TokenStore.open(store), CPU, None)


def test_rows_are_what_was_scored(teacher: RunConfig, scored: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import pyarrow.parquet

    capfd.readouterr()
    store = score(Path(teacher.output), tmp_path / "a.jsonl", "layout.tp=2", "layout.dp_shard=1")
    said = capfd.readouterr().out
    found = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    corpus = teacher.data.files[0]
    assert [row["source"] for row in found] == [f"{corpus}:{line}" for line in range(1, 61)]
    for number, row in enumerate(found):
        own = slice(store.offsets[number], store.offsets[number + 1])
        assert row["input_ids"] == store.tokens[own].tolist()
        for name in ("log_probs", "top_ids", "top_log_probs"):
            np.testing.assert_array_equal(np.asarray(row[name], store.values[name].dtype), store.values[name][own])
        assert row["tokens"] == len(row["input_ids"]) - 1
        assert row["perplexity"] == pytest.approx(math.exp(-sum(row["log_probs"][1:]) / row["tokens"]), rel=1e-6)
    every = np.concatenate([row["log_probs"][1:] for row in found])
    assert f"perplexity {math.exp(-every.mean()):.4f} of {len(every):,} tokens to be learned, 60 documents" in said
    # The weights are those of the last checkpoint, of a run on another layout, and written to another kind of file.
    table = pyarrow.parquet.read_table(scored).to_pylist()
    assert [row["input_ids"] for row in table] == [row["input_ids"] for row in found]
    again = np.concatenate([row["log_probs"][1:] for row in table])
    np.testing.assert_allclose(again, every, atol=2e-5)


@pytest.mark.thorough
def test_an_earlier_checkpoint_and_no_other_words(teacher: RunConfig, tmp_path: Path) -> None:
    store = score(Path(teacher.output), tmp_path / "a.jsonl", ranks=1)
    first = score(Paths(Path(teacher.output)).checkpoints / "step-00000030", tmp_path / "c.jsonl", ranks=1, top_k=0)
    assert first.values["log_probs"].mean() < store.values["log_probs"].mean()  # it had learned less
    assert "top_ids" not in json.loads((tmp_path / "c.jsonl").read_text().splitlines()[0])


@pytest.fixture(scope="module")
def scored(teacher: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the teacher says of its own documents."""
    out = tmp_path_factory.mktemp("scored") / "scored.parquet"
    score(Path(teacher.output), out)
    return out


def student(folder: Path, teacher: RunConfig, scored: Path, *overrides: str) -> RunConfig:
    folder.mkdir(exist_ok=True)
    columns = {
        "teacher_ids": {"per": "token", "width": TOP, "dtype": "int64", "column": "top_ids"},
        "teacher_log_probs": {"per": "token", "width": TOP, "column": "top_log_probs"},
    }
    sets = (
        f"data.files=['{scored}']",
        f"data.tensors={json.dumps(columns)}",
        "data.long_documents=truncate",
        f"tokenizer={{path: {Path(teacher.output) / 'tokenizer'}}}",
        "training.objective={use: distillation, with: {divergence: js, next_token_weight: 0.1}}",
        "training.steps=12",
        "checkpoint.every=6",
        "optimizer.lr=0.02",
        "checkpoint.keep=null",
    )
    return tiny_run(folder, scored, *sets, *overrides)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["layout.tp=2", *(pytest.param(one, marks=pytest.mark.thorough) for one in OTHERS)])
def test_a_student_learns(teacher: RunConfig, scored: Path, tmp_path: Path, layout: str) -> None:
    config = student(tmp_path / "student", teacher, scored, layout)
    train(config, 2)
    agreement = [row["eval/agreement"] for row in rows(config) if "eval/agreement" in row]
    assert eval_losses(config)[-1] < 0.8 * eval_losses(config)[0]
    assert agreement[-1] > agreement[0] + 0.1


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["layout.tp=2", *OTHERS])
def test_a_student_goes_on(teacher: RunConfig, scored: Path, tmp_path: Path, layout: str) -> None:
    fp64 = ("parallel.param_dtype=float64", "parallel.reduce_dtype=float64", "model.dtype=float64")
    config = student(tmp_path / "student", teacher, scored, layout, *fp64)
    at_once = train(config, 2)
    shutil.rmtree(Paths(config.directory).checkpoints / checkpoints(config)[-1])
    Paths(config.directory).metrics.rename(tmp_path / "metrics.jsonl")
    assert train(config, 2) == pytest.approx(at_once[6:], rel=1e-9)
    assert losses(config)[-1] == pytest.approx(at_once[-1], rel=1e-9)


def pairs(folder: Path, *overrides: str) -> RunConfig:
    folder.mkdir(exist_ok=True)
    said = [
        {"prompt": f"count to {n}", "chosen": "one two " * (n % 3 + 1), "rejected": "no " * (n % 5 + 1)} for n in range(1, 31)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, said)))
    template = "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}"
    sets = (
        f"tokenizer.chat_template={json.dumps(template)}", "tokenizer.vocab_size=270", "data.sequence_length=128",
        "model.config.max_position_embeddings=128", "training.objective=preference", "training.steps=3",
        "data.long_documents=truncate",
    )  # fmt: skip
    return tiny_run(folder, folder / "pairs.jsonl", *sets, *overrides)


def scores_of_pairs(tmp_path: Path, out: Path, layout: str) -> tuple[RunConfig, TokenStore]:
    """A run on pairs, of which some are cut, and what the model that it begins with says of them."""
    config = pairs(tmp_path / "first", "data.sequence_length=56", "data.packing=pad")
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    scores = score(tmp_path / "run.yaml", out, layout, top_k=2)
    assert scores.seconds is not None
    assert 0 < scores.index.truncated < scores.index.documents
    return config, scores


def reading(tmp_path: Path, config: RunConfig, out: Path) -> RunConfig:
    """The same run on rows that are these scores, with them as its reference."""
    prepare_run(config, 2)  # its tokenizer
    same = ("data.sequence_length=56", "data.packing=pad", f"tokenizer={{path: {config.output}/tokenizer}}")
    columns = "data.tensors={reference_log_probs: {per: token, column: log_probs}}"
    return pairs(tmp_path / "second", *same, f"data.files=['{out}']", columns)


def test_scores_of_pairs_are_rows_that_a_run_reads(tmp_path: Path) -> None:
    out = tmp_path / "scored.jsonl"
    config, scores = scores_of_pairs(tmp_path, out, "layout.tp=2")
    assert scores.seconds is not None
    row = json.loads(out.read_text().splitlines()[3])
    begin, end = scores.offsets[3], scores.offsets[4]
    assert row["chosen_ids"] + row["rejected_ids"] == scores.tokens[begin:end].tolist()
    assert row["log_probs"][len(row["chosen_ids"])] == row["log_probs"][0] == 0
    assert row["tokens"] == sum(row["chosen_mask"]) + sum(row["rejected_mask"])
    assert len(row["top_ids"]) == len(row["log_probs"]) == end - begin
    found = prepare_run(reading(tmp_path, config, out), 2)[2]
    np.testing.assert_array_equal(found.tokens, scores.tokens)
    np.testing.assert_array_equal(np.asarray(found.seconds), np.asarray(scores.seconds))
    np.testing.assert_array_equal(found.values["reference_log_probs"], scores.values["log_probs"])
    assert found.index.truncated == 0


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["layout.cp=2", "layout.pp=2"])
def test_a_run_against_scores_is_that_against_a_reference_of_its_own(tmp_path: Path, layout: str) -> None:
    config, _ = scores_of_pairs(tmp_path, tmp_path / "scored.parquet", layout)
    expected = train(config, 2)
    assert expected[-1] < expected[0] == pytest.approx(math.log(2), abs=1e-6)
    assert train(reading(tmp_path, config, tmp_path / "scored.parquet"), 2) == pytest.approx(expected, rel=1e-5)


def test_what_else_reads_pairs_is_told_how_to_score(tmp_path: Path) -> None:
    kto = pairs(tmp_path, "training.objective={use: preference, with: {loss_type: kto}}")
    with refuses(ConfigError, "config.objective") as caught:
        config_to_score(kto, tmp_path / "work", None)
    assert "score pairs with training.objective=preference, and single answers with" in str(caught.value)
    reward = pairs(tmp_path, "training.objective=reward", "model.head={kind: sequence_classification, num_labels: 1}")
    with refuses(ConfigError, "config.objective") as caught:
        config_to_score(reward, tmp_path / "work", None)
    assert "the model says labels, not the next token; set model.head=null" in str(caught.value)


def test_another_tokenizer_is_noticed(teacher: RunConfig, scored: Path, tmp_path: Path) -> None:
    other = tiny_run(tmp_path, write_corpus(tmp_path / "other.jsonl", seed=3), "tokenizer.vocab_size=280", "training.steps=1")
    prepare_run(other, 1)
    config = student(tmp_path / "student", teacher, scored, f"tokenizer.path={other.output}/tokenizer")
    with refuses(DataError, "data.bad_rows") as caught:
        prepare_run(config, 1)
    assert "its tokens are those of another tokenizer" in str(caught.value)


def test_what_cannot_be_scored_is_refused(teacher: RunConfig, tmp_path: Path) -> None:
    with refuses(CheckpointError, "checkpoint.incomplete"):
        run_to_score(tmp_path, ())
    with refuses(ConfigError, "config.value") as caught:
        ScoreJob(tmp_path / "a.jsonl", tmp_path / "work", None, 1000).check(make_setup(teacher, 2))
    assert "--top-k=1000: the model has 300 words" in str(caught.value)
    gemma = load_config(Path("examples/diffusion_gemma_quickstart.yaml"))
    with refuses(ConfigError, "config.objective"):
        ScoreJob(tmp_path / "a.jsonl", tmp_path / "work", None).check(make_setup(gemma, 2))
    found, checkpoint = run_to_score(Path(teacher.output), ())
    wider = found.model_copy(update={"model": found.model.model_copy(update={"config": {**wide(found)}})})
    job = ScoreJob(tmp_path / "a.jsonl", tmp_path / "work", checkpoint)
    config = config_to_score(wider, tmp_path / "work", checkpoint)
    store = prepare_run(config, 1, noted=job.noted())[2]
    with pytest.raises(AssertionError, match="is of another model: it lacks"):
        run_ranks(_score, 1, job, config, store.directory)


def wide(config: RunConfig) -> dict[str, Any]:
    return {**(config.model.config or {}), "intermediate_size": 64}


def test_numbers_of_json_are_those_of_float32() -> None:
    from meshwright.train.start.scoring import _plain

    values = torch.randn(1000).numpy() * np.float32(1e-3)
    assert np.array_equal(np.asarray(json.loads(json.dumps(_plain(values))), np.float32), values)
    assert max(len(str(one)) for one in _plain(values)) < 16

"""What a reference says of all tokens: computed once, kept beside them, the same after resuming on another layout."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import meshwright as mw
from meshwright.audit.conduct import audit
from meshwright.errors import CheckpointError, ConfigError
from meshwright.models.weights.source import PLACES, fingerprint
from meshwright.objectives.preference import Preference
from meshwright.train.config import RunConfig
from meshwright.train.evaluation import evaluate
from meshwright.train.start.prepare import introduce, prepare_run
from meshwright.train.start.reference_values import reference_values
from meshwright.train.start.run_files import Paths
from meshwright.train.start.setup import make_setup
from tests.harness import refuses, run_ranks
from tests.objectives.parts import Compared
from tests.train.runs import LLAMA, losses, rows, tiny_run, train, train_on_rank, write_corpus

FP64 = ("parallel.param_dtype=float64", "parallel.reduce_dtype=float64", "model.dtype=float64")


def run(folder: Path, *overrides: str) -> RunConfig:
    folder.mkdir(exist_ok=True)
    corpus = write_corpus(folder.parent / "words.jsonl")
    sets = ("data.long_documents=truncate", "training.objective=tests.objectives.parts:Compared", "training.steps=4")
    return tiny_run(folder, corpus, *sets, *overrides)


def values_of(config: RunConfig) -> list[Path]:
    return sorted(Paths(config.directory).tokens.glob("*-reference-*/column-*"))


def ratios(config: RunConfig) -> list[float]:
    return [row["eval/ratio"] for row in rows(config) if "eval/ratio" in row]


def test_a_run_goes_on_against_what_it_began_with(tmp_path: Path) -> None:
    config = run(tmp_path / "run", "checkpoint.every=2", "checkpoint.keep=null", "layout.cp=2", *FP64)
    at_once = train(config, 2)
    (column,) = values_of(config)
    content, first = column.read_bytes(), ratios(config)
    assert column.name == "column-reference_log_probs.bin"
    assert first[0] < 1e-6 < 1e-3 < first[-1]
    for later in (Path(config.output) / "checkpoints").glob("*4"):
        later.rename(tmp_path / "gone")
    shutil.rmtree(column.parent)  # what the model of the checkpoint would say is something else
    metrics = Paths(config.directory).metrics
    resumed = config.model_copy(update={"layout": config.layout.model_copy(update={"cp": 1, "dp_shard": 2})})
    assert train(resumed, 2) == pytest.approx(at_once, rel=1e-9)
    assert values_of(config) == [column]
    found, before = (torch.frombuffer(bytearray(one), dtype=torch.float32) for one in (column.read_bytes(), content))
    torch.testing.assert_close(found, before, rtol=2e-7, atol=0)
    assert ratios(config) == pytest.approx([first[0], *ratios(config)[1:]], abs=1e-6)
    assert metrics.is_file()


def test_both_answers_of_pairs(tmp_path: Path) -> None:
    chats = [{"prompt": f"count to {n}", "chosen": f"one two {n}", "rejected": "no " * (n % 5 + 1)} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, chats)))
    template = "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}"
    sets = (
        f"data.files=['{tmp_path}/pairs.jsonl']",
        f"tokenizer.chat_template={json.dumps(template)}",
        "tokenizer.vocab_size=270",
        "data.sequence_length=128",
        "model.config.max_position_embeddings=128",
        "training.objective=preference",
        "data.format=preference",
    )
    config = run(tmp_path / "run", *sets)
    train(config, 2)
    first, *_, last = (row["eval/loss"] for row in rows(config) if "eval/loss" in row)
    assert first == pytest.approx(math.log(2), abs=1e-5)  # both ratios are 0
    assert last < first - 0.01
    store = prepare_run(config, 2)[2]
    found = np.fromfile(values_of(config)[0], np.float32)
    assert store.seconds is not None
    assert (found == 0).sum() == 2 * len(store.lengths)
    assert not found[store.offsets[:-1] + store.seconds].any()


def test_what_is_there_is_read_unless_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = run(tmp_path / "run", "training.steps=2")
    setup, _, store = prepare_run(config, 1)
    introduce(setup, config, store)
    run_ranks(train_on_rank, 1, config, store.directory)
    said = capfd.readouterr().out
    tokens = f"{store.index.tokens:,}"
    assert f"reference: log-probabilities of {tokens} tokens are computed before the first step, for " in said
    assert f"reference: log-probabilities of {tokens} tokens in " in said
    assert "reference: before the first step of the run, one forward of all sequences" in " ".join(said.split())
    monkeypatch.setattr("meshwright.train.trainer.score_store", None)  # forked ranks have it so
    again = run(tmp_path / "run", "training.steps=3")
    setup, _, store = prepare_run(again, 1)
    introduce(setup, again, store)
    run_ranks(train_on_rank, 1, again, store.directory)
    assert f"reference: log-probabilities of {tokens} tokens are read from" in capfd.readouterr().out
    assert len(losses(again)) == 3
    monkeypatch.undo()  # and what is damaged is computed again
    (column,) = values_of(config)
    content = column.read_bytes()
    column.write_bytes(b"\1" + content[1:])
    train(run(tmp_path / "run", "training.steps=4"))
    assert "the reference's log-probabilities are computed again" in capfd.readouterr().out
    assert column.read_bytes() == content


def test_another_model_is_noticed(tmp_path: Path) -> None:
    config, source = (
        run(tmp_path / "run", "training.steps=1", "model.config=null", f"model.path={tmp_path}/base"),
        tmp_path / "base",
    )
    save(source, seed=0)
    train(config)
    save(source, seed=1)
    with refuses(CheckpointError, "checkpoint.reference") as caught:
        prepare_run(run(tmp_path / "run", "training.steps=2", "model.config=null", f"model.path={source}"), 1)
    assert "the weights of the model (model.path, or training.seed of a new one): other than when the run began" in str(
        caught.value
    )
    shutil.rmtree(Path(config.output) / "checkpoints")  # a new run with the same tokens
    train(config)
    assert len(values_of(config)) == 2
    assert ratios(config)[-2] < 1e-6  # before its only step


def test_weights_that_differ_between_the_ends_of_a_file_are_others(tmp_path: Path) -> None:
    file, found = tmp_path / "model.safetensors", []
    for inside in (b"a", b"b"):
        file.write_bytes(bytes(2**21) + inside * 2**16 + bytes(2**21))
        found.append((fingerprint([file]), fingerprint([file], within=PLACES)))
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]


def save(folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA, vocab_size=300)).save_pretrained(folder)


def test_what_cannot_be_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with refuses(ConfigError, "objective.reference") as caught:
        prepare_run(run(tmp_path / "cut", "data.long_documents=split"), 1)
    assert "data.packing=pack: texts are cut at other places in each epoch" in str(caught.value)
    setup, _, store = prepare_run(run(tmp_path / "padded", "data.long_documents=split", "data.packing=pad"), 1)
    assert reference_values(setup, store) is not None
    with refuses(ConfigError, "objective.reference") as caught:
        make_setup(run(tmp_path / "both", "data.tensors={reference_log_probs: {per: token}}"), 1)
    assert "leave one of them out" in str(caught.value)


def test_an_adapter_that_is_not_all_that_changes(tmp_path: Path) -> None:
    sets = ("training.objective=preference", "data.format=preference")
    for adapter, reference in (("{}", True), ("{save_modules: [lm_head]}", "precomputed"), ("{path: none}", "precomputed")):
        assert make_setup(run(tmp_path / "x", *sets, f"adapter={adapter}"), 1).objective.reference == reference
    with refuses(ConfigError, "objective.reference") as caught:
        make_setup(
            run(
                tmp_path / "x",
                "training.objective={use: preference, with: {reference: adapter_off}}",
                *sets[1:],
                "adapter={save_modules: [lm_head]}",
            ),
            1,
        )
    assert "adapter.save_modules=['lm_head']: are trained" in str(caught.value)


@pytest.mark.parametrize(("staged", "most"), [(False, 1), (True, 8)])
def test_an_evaluation_holds_few_microbatches(staged: bool, most: int) -> None:
    """What a pass finds of tokens is on the device with them, so not all that is held out is there at once."""
    there, peaks = [0], list[int]()

    def to_device(batch: Any) -> Any:
        there[0] += 1
        return batch

    def evaluate_group(batches: Any) -> torch.Tensor:
        peaks.append(len(list(batches)))
        assert there[0] == peaks[-1]
        there[0] = 0
        return torch.full((1,), 2.0 * peaks[-1], dtype=torch.float64)

    objective = Preference("dpo", reference="adapter_off")
    objective.reference = True
    objective.counts = lambda batches: [len(batches)]  # type: ignore[method-assign]
    objective.summary = lambda sums: {}  # type: ignore[method-assign]
    runner = SimpleNamespace(teach=None, plan=SimpleNamespace(stages=("one", "two") if staged else ()), evaluate=evaluate_group)
    batches = SimpleNamespace(
        objective=objective, mesh=SimpleNamespace(sum=lambda one: one), to_device=to_device, device=torch.device("cpu")
    )
    found = evaluate(runner, batches, [{}] * 11)  # type: ignore[arg-type, list-item]
    assert found["eval/loss"] == 2.0
    assert sum(peaks) == 11
    assert max(peaks) == most


def test_a_loop_of_ones_own_has_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(_loop, 1)


def _loop(rank: int) -> None:
    def model() -> Any:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA, vocab_size=300))

    with refuses(ConfigError, "engine.loss") as caught:
        mw.Engine(model(), objective=Compared, device="cpu")
    assert "a loop of one's own does not have" in str(caught.value)
    engine = mw.Engine(model(), device="cpu")
    ids = torch.arange(16).view(1, 16)
    with refuses(ConfigError, "engine.loss"):
        engine.step([{"input_ids": ids}], Compared)
    with refuses(ConfigError, "objective.reference"):  # it would be computed, and is given
        engine.step([{"input_ids": ids, "reference_log_probs": torch.zeros(1, 16)}], Compared)


@pytest.mark.thorough
def test_an_audit_makes_up_what_it_says(tmp_path: Path) -> None:
    report = audit(run(tmp_path / "run"), nproc=2, steps=2)  # with its evaluation, and resuming
    assert report.passed, report.verdict

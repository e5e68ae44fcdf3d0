"""Classes of words: against transformers' own forward, on every axis, from rows to a run that learns; what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForTokenClassification

from meshwright.audit.conduct import Auditor
from meshwright.checkpoint.directory import latest
from meshwright.checkpoint.export import export_checkpoint
from meshwright.data.data_config import DataConfig
from meshwright.data.packing import SequenceDataset
from meshwright.data.preparation import prepare
from meshwright.data.rows.wanted import Labels, Wanted
from meshwright.errors import DataError
from meshwright.models.weights.build import materialize
from meshwright.objectives.running import Running, running
from meshwright.train.config import RunConfig
from meshwright.train.start.setup import make_setup
from tests.audit.conftest import auditor, folder
from tests.data.conftest import jsonl, tokenizer
from tests.objectives.shipped import PLACES, compare
from tests.train.runs import losses, rows, train

__all__ = ["auditor", "folder", "jsonl", "tokenizer"]

Jsonl = Callable[..., str]
HEAD = {"kind": "token_classification", "num_labels": 3}
USE = {"use": "token_classification"}
ROW = {"words": ["quick", "brown", "fox"], "labels": ["O", "NAME", 0]}


def config(path: str, **changes: Any) -> DataConfig:
    given = {"files": [path], "sequence_length": 32, "eval_fraction": 0.0, "shuffle": False, **changes}
    made = DataConfig.model_validate(given)
    labels = Labels("single_label_classification", 2, ("O", "NAME"))
    assert not made.read_as(Wanted("token_classification", ("labeled_words",), whole=True, labels=labels))
    return made


@pytest.mark.parametrize("packing", ["pack", "pad"])
def test_a_label_stands_at_the_first_token_of_its_word(jsonl: Jsonl, tokenizer: Any, tmp_path: Path, packing: Any) -> None:
    store = prepare(config(jsonl([ROW, ROW])), tokenizer, tmp_path / "store", 0)
    dataset = SequenceDataset(store, "train", 32, packing, shuffle=False)
    found = []
    for number in range(len(dataset)):
        sequence = dataset[number]
        places = sequence["word_labels"].nonzero()[0]
        found += list(zip(sequence["word_labels"][places].tolist(), sequence["input_ids"][places].tolist(), strict=True))
    assert [label for label, _ in found] == [1, 2, 1] * 2
    alone = tokenizer(ROW["words"], is_split_into_words=True)
    expected = [alone["input_ids"][alone.word_to_tokens(word).start] for word in range(3)]

    assert [token for _, token in found] == expected * 2


def test_the_loss_is_that_of_transformers(jsonl: Jsonl, tokenizer: Any, tmp_path: Path) -> None:
    lines = [{"words": ["quick", "brown", "fox"][: 1 + n % 3], "labels": [n % 2, 1, 0][: 1 + n % 3]} for n in range(5)]
    run = run_of(jsonl(lines), len(tokenizer), 0.0, eval_every=0)
    setup = make_setup(run, 1)
    materialize(setup.model, run.model, torch.device("cpu"), 0)
    model = setup.model.double().eval()
    store = prepare(run.data, tokenizer, tmp_path / "store", 0)
    dataset = SequenceDataset(store, "train", 32, "pack", shuffle=False)
    batch = {name: torch.stack([torch.from_numpy(dataset[n][name]) for n in range(len(dataset))]) for name in dataset[0]}
    with running(Running()):
        (total,) = setup.objective.sums(model, batch)
    (total / setup.objective.counts([batch])[0]).backward()
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    theirs = AutoModelForTokenClassification.from_config(model.config, attn_implementation="sdpa").double().eval()
    theirs.load_state_dict(model.state_dict())
    losses_, words = [], 0
    for line in lines:
        encoded = tokenizer(line["words"], is_split_into_words=True, return_tensors="pt")
        labels = torch.full_like(encoded["input_ids"], -100)
        for number, label in enumerate(line["labels"]):
            labels[0, encoded.word_to_tokens(number).start] = label
        said = theirs(input_ids=encoded["input_ids"], labels=labels)
        alone = torch.nn.functional.cross_entropy(said.logits[0], labels[0], reduction="sum")
        assert float(said.loss) * len(line["labels"]) == pytest.approx(float(alone), rel=1e-6)  # theirs is in fp32
        losses_.append(alone)
        words += len(line["labels"])
    truth = torch.stack(losses_).sum() / words
    truth.backward()
    assert float(total / setup.objective.counts([batch])[0] - truth) == pytest.approx(0, abs=1e-11)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=0, atol=1e-11)


def run_of(path: str, words: int, held_out: float = 0.2, *, output: str = "nowhere", **training: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "output": output,
            "model": {
                "config": {"model_type": "llama", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
                           "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": words},
                "head": {"kind": "token_classification", "labels": ["O", "NAME"]},
            },
            "data": {"files": [path], "sequence_length": 32, "eval_fraction": held_out},
            "tokenizer": {"vocab_size": words},
            "optimizer": {"lr": 0.01},
            "parallel": {"param_dtype": "float32"},
            "training": {"steps": 12, "global_batch_size": 4, "objective": USE, "eval_every": 12, **training},
            "checkpoint": {"every": 12},
        }
    )  # fmt: skip


@pytest.mark.thorough
def test_a_run_learns_and_is_exported(jsonl: Jsonl, tmp_path: Path) -> None:
    names = ["fox", "dog", "wizard", "box"]
    texts = [["the", "quick", names[n % 4]] if n % 2 else [names[n % 4], "jumps"] for n in range(60)]
    lines = [{"words": text, "labels": [int(word in names) for word in text]} for text in texts]
    run = run_of(jsonl(lines), 270, output=str(tmp_path / "out"))
    train(run, 2)
    found = losses(run)
    assert found[-1] < found[0] / 2
    assert [row["eval/accuracy"] for row in rows(run) if "eval/accuracy" in row][-1] > 0.9
    newest = latest(run.directory / "checkpoints")
    assert newest is not None
    export_checkpoint(newest, tmp_path / "export")
    assert AutoModelForTokenClassification.from_pretrained(tmp_path / "export").config.id2label == {0: "O", 1: "NAME"}


def test_an_axis(auditor: Auditor, folder: Path) -> None:
    compare(auditor, folder, PLACES["cp 2"], USE, head=HEAD)


@pytest.mark.thorough
@pytest.mark.parametrize("packing", ["pack", "pad"])
@pytest.mark.parametrize("label", ["shard 2", "2 x shard 2", "tp 2", "tp 2 seq", "cp 2", "pp 2", "ep 2", "cp 2 x tp 2"])
def test_every_axis(auditor: Auditor, folder: Path, label: str, packing: str) -> None:
    family = "mixtral" if "ep" in label else "llama"
    compare(auditor, folder, PLACES[label], USE, family, packing=packing, microbatches=3, head=HEAD)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"labels": [0, 1]}, "field 'labels' has 2 labels for 3 words"),
        ({"labels": [0, 1, 2]}, "word 3: field 'labels' holds 2; legal is a whole number of 0 to 1, or one of 'O', 'NAME'"),
        ({"labels": [0, 1, "PLACE"]}, "word 3: field 'labels' holds 'PLACE'"),
        ({"words": "quick brown fox"}, "field 'words' is str; legal is a list of words"),
        ({"words": ["quick", "", "fox"]}, "legal is a list of words, none of them empty"),
        ({"words": []}, "legal is a list of words"),
    ],
)
def test_what_is_refused(jsonl: Jsonl, tokenizer: Any, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = jsonl([ROW, ROW | changes])
    with pytest.raises(DataError, match=words) as caught:
        prepare(config(path), tokenizer, tmp_path / "store", 0)
    assert f"{path}:2" in str(caught.value)

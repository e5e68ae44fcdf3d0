"""What a run that resumes may change of its data, and what is named where it may not."""

import copy
from dataclasses import replace

import pytest

from meshwright.data.data_config import DataConfig
from meshwright.data.identity import TRAINED
from meshwright.data.loader import TrainLoader
from meshwright.data.preparation import prepare
from meshwright.data.store import TokenStore
from meshwright.errors import CheckpointError

from .conftest import sentences

ROWS = [{"text": text} for text in sentences(30)]
OTHERS = [{"text": text} for text in sentences(40)[30:]]


@pytest.fixture
def run(tmp_path, tokenizer, jsonl):
    """The loader of a run, with some changes of its data."""

    def make(rows=ROWS, tokenizer=tokenizer, seed=0, **changes):
        data = DataConfig(**({"files": [jsonl(rows, "train.jsonl")], "sequence_length": 16} | changes))
        store = prepare(data, tokenizer, tmp_path / "store", seed)
        return TrainLoader(store, sequence_length=data.sequence_length, global_batch_size=2, microbatch_size=1, seed=seed)

    return make


def refused(before, now):
    with pytest.raises(CheckpointError) as caught:
        now.check_state(before.state_dict(1))
    return caught.value.problems


def test_documents_to_evaluate_on_may_be_others(run, jsonl):
    first, second = jsonl(OTHERS, "eval.jsonl"), jsonl(OTHERS[:3], "other.jsonl")
    begun = run()
    for changes in ({}, {"eval_files": [first]}, {"eval_files": [second]}):
        now = run(eval_fraction=0.05, **changes)
        assert now.check_state(begun.state_dict(1)) == 1
        assert now.store.index.eval_documents == 2 + len(changes and (OTHERS if first in changes["eval_files"] else OTHERS[:3]))
        assert now.store.index.train_tokens == begun.store.index.train_tokens
    begun = run(eval_files=[first])
    for changes in ({"eval_files": [second]}, {"eval_fraction": 0}):
        assert run(**changes).check_state(begun.state_dict(1)) == 1
        assert run(**changes).store.fingerprint != begun.store.fingerprint


def test_the_share_that_eval_files_bring_back_is_named_with_what_keeps_it_out(run, jsonl):
    (line,) = refused(run(), run(eval_files=[jsonl(OTHERS, "eval.jsonl")]))
    assert line == (
        "data loader: data.eval_fraction: 0.05 in the checkpoint, 0.0 now; set it to 0.05, which is possible beside "
        "data.eval_files"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": [*ROWS[:-1], {"text": "other"}]}, ["data.files, data.hub or data.corpus: its content is another than that"]),
        ({"max_documents": 9}, ["data.max_documents: None in the checkpoint, 9 now"]),
        ({"eval_fraction": 0.5}, ["data.eval_fraction: 0.05 in the checkpoint, 0.5 now"]),
        ({"long_documents": "drop"}, ["data.long_documents: 'auto' in the checkpoint, 'drop' now"]),
        ({"long_documents": "drop", "max_documents": 9}, ["data.long_documents: 'auto'", "data.max_documents: None"]),
        ({"seed": 1}, ["has training.seed=0, this run has training.seed=1"]),
    ],
)
def test_what_decides_training_is_named_by_its_key(run, changes, words):
    problems = refused(run(), run(**changes))
    assert len(problems) == len(words)
    for problem, part in zip(sorted(problems), sorted(words), strict=True):
        assert problem.startswith("data loader: ")
        assert part in problem


def test_another_tokenizer_or_template_is_named(run, tokenizer):
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["dog wizards"])
    assert refused(run(), run(tokenizer=other)) == (
        "data loader: tokenizer: its content is another than that of the checkpoint",
    )
    other = copy.deepcopy(tokenizer)
    other.chat_template += "{# of texts nothing is written by it #}"
    assert run(tokenizer=other).check_state(run().state_dict(1)) == 1  # the tokens are the same


def test_a_key_that_changes_no_token_may_change(run):
    for changes in ({"format": "text"}, {"max_documents": 30}, {"kind": "text"}):
        assert run(**changes).check_state(run().state_dict(1)) == 1


def test_other_tokens_of_the_same_source_are_refused(run):
    now = run()
    state = now.state_dict(1)
    state["data"] = {**state["data"], TRAINED: "0"}
    with pytest.raises(CheckpointError, match="with the same source and configuration: another version wrote them"):
        now.check_state(state)


def test_a_checkpoint_from_before_parts_is_resumed(run, jsonl):
    begun = run()
    state = begun.state_dict(3)
    del state["data"]
    assert begun.check_state(state) == 3
    with pytest.raises(CheckpointError, match=r"fingerprint=.*the checkpoint does not say which"):
        run(max_documents=9).check_state(state)
    index = replace(begun.store.index, given={"tools": 2, "documents": 1}, unwritten={"documents": 1}, unlearned=1)
    begun.store = TokenStore(begun.store.directory, index)
    with pytest.raises(CheckpointError, match="loader: tools, weight of chats: the run of the checkpoint did not read them"):
        begun.check_state(state)

"""Rows with labels and scores: what they become, and what is refused with file and line, before anything is trained."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.data.data_config import DataConfig
from meshwright.data.preparation import prepare
from meshwright.data.rows.corpora import documents
from meshwright.data.rows.document import Document
from meshwright.data.rows.wanted import Labels, Wanted
from meshwright.errors import DataError

Jsonl = Callable[..., str]

SINGLE = Labels("single_label_classification", 3, ("bad", "fair", "good"))
MULTI = Labels("multi_label_classification", 3, ("a", "b", "c"))
TWO = Labels("multi_label_classification", 2, ("a", "b"))
NUMBER, NUMBERS = Labels("regression", 1), Labels("regression", 2)


def config(path: str, labels: Labels | None = SINGLE, format: str = "labeled", **changes: Any) -> DataConfig:
    made = DataConfig.model_validate({"files": [path], "sequence_length": 24, "eval_fraction": 0.0, **changes})
    assert not made.read_as(Wanted("mine", (format,), whole=True, labels=labels))
    return made


def read(path: str, labels: Labels, **changes: Any) -> list[Document]:
    return list(documents(config(path, labels, **changes)))


@pytest.mark.parametrize(
    ("labels", "given", "kept"),
    [
        (SINGLE, 2, 2),
        (SINGLE, "fair", 1),
        (SINGLE, False, 0),
        (MULTI, [0, 1, 0.5], [0, 1, 0.5]),
        (MULTI, ["c", "a"], [1, 0, 1]),
        (MULTI, [], [0, 0, 0]),
        (MULTI, [2, 0], [1, 0, 1]),  # numbers of classes
        (MULTI, [1], [0, 1, 0]),
        (MULTI, [0, 1, 2], [1, 1, 1]),
        (MULTI, [0, 1, 0], [0, 1, 0]),
        (TWO, [0, 1], [0, 1]),  # of two labels, a number for each
        (NUMBER, -1.5, -1.5),
        (NUMBERS, [1, -2.5], [1, -2.5]),
    ],
    ids=str,
)
def test_labels(jsonl: Jsonl, labels: Labels, given: Any, kept: Any) -> None:
    (document,) = read(jsonl([{"text": "some words", "label": given}]), labels)
    value = document.values["label"]
    assert (value.tolist(), str(value.dtype)) == (kept, labels.column.dtype)
    assert value.shape == (() if labels.column.width is None else (labels.column.width,))


@pytest.mark.parametrize(
    ("labels", "given", "words"),
    [
        (SINGLE, 3, "holds 3; legal is a whole number of 0 to 2, or one of 'bad', 'fair', 'good'"),
        (SINGLE, -1, "holds -1"),
        (SINGLE, 1.0, "holds 1.0"),
        (SINGLE, "great", "holds 'great'"),
        (SINGLE, None, "holds null"),
        (SINGLE, [1], "holds [1]"),
        (
            MULTI,
            [1, 1],
            "holds [1, 1]; legal is a list of 3 numbers from 0 to 1, or of different whole numbers of 0 to 2, ",
        ),
        (MULTI, [0, 3], "or of some of 'a', 'b', 'c'"),
        (MULTI, [0, 0.5], "holds [0, 0.5]"),
        (MULTI, [True, False], "holds [True, False]"),
        (TWO, [1], "holds [1]; legal is a list of 2 numbers from 0 to 1, or of some of 'a', 'b'"),
        (MULTI, ["a", "d"], "holds ['a', 'd']"),
        (MULTI, 1, "holds 1"),
        (NUMBER, "high", "holds 'high'; legal is a finite number"),
        (NUMBER, float("nan"), "holds nan"),
        (NUMBER, 1e60, "holds 1e+60"),
        (NUMBERS, [1.0], "legal is a list of 2 finite numbers"),
    ],
    ids=str,
)
def test_labels_that_are_wrong(jsonl: Jsonl, labels: Labels, given: Any, words: str) -> None:
    right: dict[Labels, Any] = {SINGLE: 0, MULTI: [1, 1, 1], TWO: [1, 1], NUMBER: 0.5, NUMBERS: [0.5, 0.5]}
    rows = [{"text": "some words", "label": right[labels]}] * 2
    path = jsonl([*rows, {"text": "more words", "label": given}])
    with pytest.raises(DataError) as caught:
        read(path, labels)
    assert "data.jsonl:3: field 'label'" in str(caught.value)
    assert words in str(caught.value)


def test_rows_without_a_label_or_a_text(jsonl: Jsonl) -> None:
    for row, words in (
        ({"text": "some words"}, "no field 'label'"),
        ({"label": 1}, "has none of the fields 'messages' and 'text'"),
        ({"label": 1, "text": "words", "messages": []}, "has several of the fields"),
    ):
        with pytest.raises(DataError) as caught:
            read(jsonl([row]), SINGLE)
        assert words in str(caught.value)


def test_tokens_are_those_of_the_text_or_chat_alone(jsonl: Jsonl, tmp_path: Path, tokenizer: Any) -> None:
    """As a pipeline of transformers makes them: no token ends a text, and all tokens of a chat count."""
    chat = [{"role": "user", "content": "is this good"}]
    texts = jsonl([{"text": "some words", "label": 2}, {"text": "other words here", "label": "bad"}], "texts.jsonl")
    store = prepare(config(texts), tokenizer, tmp_path / "texts", 0)
    assert store.tokens[: store.offsets[1]].tolist() == tokenizer("some words")["input_ids"]
    assert (store.values["label"].tolist(), store.loss_mask) == ([2, 0], None)
    chats = jsonl([{"messages": chat, "label": 1}], "chats.jsonl")
    store = prepare(config(chats), tokenizer, tmp_path / "chats", 0)
    assert store.tokens.tolist() == tokenizer.apply_chat_template(chat, return_dict=False)
    assert store.loss_mask is not None
    assert store.loss_mask.all()


def test_scores(jsonl: Jsonl, tmp_path: Path, tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]
    path = jsonl([{"messages": chat, "score": 0.5}, {"prompt": "hi", "completion": "hello there", "score": 2}])
    store = prepare(config(path, None, "scored", sequence_length=40), tokenizer, tmp_path / "store", 0)
    assert store.values["score"].tolist() == [0.5, 2.0]
    first, second = (store.tokens[begin:end] for begin, end in zip(store.offsets, store.offsets[1:], strict=False))
    assert np.array_equal(first, second)
    with pytest.raises(DataError, match="field 'score' holds str, no number"):
        list(documents(config(jsonl([{"messages": chat, "score": "high"}], "bad.jsonl"), None, "scored")))
    with pytest.raises(DataError, match=r"no field 'score'; its fields are messages, rating; set data\.columns"):
        list(documents(config(jsonl([{"messages": chat, "rating": 1}], "none.jsonl"), None, "scored")))


def test_long_rows_are_not_split(jsonl: Jsonl, tmp_path: Path, tokenizer: Any) -> None:
    path = jsonl([{"text": "word " * 80, "label": 1}, {"text": "short words", "label": 0}])
    with pytest.raises(DataError, match=r"data\.long_documents"):
        prepare(config(path), tokenizer, tmp_path / "store", 0)
    cut = prepare(config(path, long_documents="truncate"), tokenizer, tmp_path / "store", 0)
    assert (cut.lengths.tolist()[0], cut.index.truncated) == (24, 1)
    split = DataConfig.model_validate({"files": [path], "sequence_length": 24, "long_documents": "split"})
    (problem,) = split.read_as(Wanted("mine", ("labeled",), whole=True, labels=SINGLE))
    assert problem.code == "data.long_documents"


def test_other_labels_are_another_store(jsonl: Jsonl, tmp_path: Path, tokenizer: Any) -> None:
    path = jsonl([{"text": "some words", "label": "bad"}])
    first = prepare(config(path), tokenizer, tmp_path / "store", 0)
    turned = Labels(SINGLE.kind, 3, SINGLE.names[::-1])
    second = prepare(config(path, turned), tokenizer, tmp_path / "store", 0)
    assert (first.values["label"].tolist(), second.values["label"].tolist()) == ([0], [2])


def test_other_labels_of_words_are_another_store(jsonl: Jsonl, tmp_path: Path, tokenizer: Any) -> None:
    path, found = jsonl([{"words": ["quick", "fox"], "labels": ["bad", "good"]}]), list[list[int]]()
    for names in (SINGLE.names, SINGLE.names[::-1]):
        made = config(path, Labels(SINGLE.kind, 3, names), "labeled_words")
        labels = prepare(made, tokenizer, tmp_path / "store", 0).values["word_labels"]
        found.append(labels[labels > 0].tolist())
    assert found == [[1, 3], [3, 1]]


def test_what_labels_are_must_be_known() -> None:
    made = DataConfig.model_validate({"files": ["none.jsonl"], "sequence_length": 24, "format": "labeled"})
    (problem,) = made.read_as(Wanted("mine", ("labeled",)))
    assert problem.code == "model.head"
    taken = DataConfig.model_validate({"files": ["x"], "sequence_length": 24, "tensors": {"label": {"per": "document"}}})
    (problem,) = taken.read_as(Wanted("mine", ("labeled",), labels=SINGLE))
    assert "leave it out" in problem

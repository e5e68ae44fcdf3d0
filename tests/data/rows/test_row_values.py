"""Columns of rows that reach the batch: read and refused, stored beside the tokens, cut and padded as these are."""

import json

import numpy as np
import pytest
import torch

from meshwright.data.data_config import DataConfig
from meshwright.data.identity import TRAINED
from meshwright.data.loader import EvalLoader, TrainLoader
from meshwright.data.packing import IGNORE, SequenceDataset
from meshwright.data.preparation import prepare
from meshwright.data.store import TokenStore
from meshwright.errors import CheckpointError, DataError
from tests.data.conftest import sentences
from tests.harness import refuses

TENSORS = {
    "weight": {"per": "token"},
    "expert": {"per": "token", "width": 2, "dtype": "int64"},
    "score": {"per": "document", "column": "reward"},
    "label": {"per": "document", "width": 3, "dtype": "int64"},
}


def rows_of(texts, tokenizer):
    """Rows whose values say the document and the token that they belong to."""
    rows = []
    for number, text in enumerate(texts, start=1):
        count = len(tokenizer(text)["input_ids"]) + 1  # and the token that ends a text
        weight = [number + token / 1000 for token in range(count)]
        expert = [[number, token] for token in range(count)]
        rows.append({"text": text, "weight": weight, "expert": expert, "reward": number / 8, "label": [number, 0, 1]})
    return rows


def config(path, **changes):
    return DataConfig.model_validate(
        {"files": [path], "sequence_length": 16, "eval_fraction": 0.0, "tensors": TENSORS} | changes
    )


@pytest.fixture
def made(jsonl, tokenizer, tmp_path):
    def make(texts=None, **changes):
        rows = rows_of(texts or sentences(20), tokenizer)
        return prepare(config(jsonl(rows), **changes), tokenizer, tmp_path / "store", 0)

    return make


@pytest.mark.parametrize("packing", ["pack", "pad"])
@pytest.mark.parametrize("policy", ["split", "truncate"])
@pytest.mark.parametrize("multiple", [1, 6])
def test_values_lie_beside_their_labels(made, packing, policy, multiple):
    store = made(long_documents=policy)
    assert store.index.truncated + store.index.split > 0
    options = {"sequence_length": 16, "packing": packing}
    loader = TrainLoader(store, global_batch_size=4, microbatch_size=2, seed=3, multiple=multiple, **options)
    dataset = SequenceDataset(store, "train", 16, packing, 3, 0)
    seen = 0
    for step in range(len(dataset) // 4):
        for batch, numbers in zip(loader.microbatches(step), loader.numbers(step), strict=True):
            assert batch["weight"].dtype == torch.float32
            assert batch["weight"].shape == batch["labels"].shape == (2, -(-16 // multiple) * multiple)
            assert batch["expert"].shape == (*batch["labels"].shape, 2)
            for row, number in enumerate(numbers):
                at = 0
                expected = {name: torch.zeros_like(batch[name][row]) for name in TENSORS}
                for document, start, length in dataset.pieces(number):
                    for place in range(length):
                        expected["score"][at + place] = (document + 1) / 8
                        expected["label"][at + place] = torch.tensor([document + 1, 0, 1])
                        if place < length - 1:
                            token = start + place + 1
                            assert batch["labels"][row, at + place] == store.tokens[store.offsets[document] + token]
                            expected["weight"][at + place] = document + 1 + token / 1000
                            expected["expert"][at + place] = torch.tensor([document + 1, token])
                            seen += 1
                    at += length
                for name in TENSORS:
                    assert torch.equal(batch[name][row], expected[name]), name
    assert seen > 50


def test_answers_alone_have_values_of_tokens(tokenizer, jsonl, tmp_path):
    chat = {"messages": [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "the quick fox"}]}
    count = len(tokenizer.apply_chat_template(chat["messages"])["input_ids"])
    row = {**chat, "weight": list(range(1, count + 1))}
    data = config(jsonl([row] * 2), tensors={"weight": TENSORS["weight"]}, sequence_length=64, eval_fraction=0.5)
    store = prepare(data, tokenizer, tmp_path, 0)
    for split in ("train", "eval"):
        sequence = SequenceDataset(store, split, 64)[0]
        learned = sequence["labels"] != IGNORE
        assert 0 < learned.sum() < count - 1
        assert (sequence["weight"] == np.where(learned, np.arange(2, 66), 0)).all()
    filler = next(iter(EvalLoader(SequenceDataset(store, "eval", 64), 3)))
    assert filler["weight"][0].sum() > 0
    assert filler["weight"][1:].sum() == 0


BAD = [
    ({"weight": 3}, "field 'weight' has the shape []; legal is a list with a number for each token"),
    ({"weight": [1.0, 2.0]}, "field 'weight' has 2 values, and the row has "),
    ({"weight": ["a", "b"]}, "field 'weight' holds a list of something other than numbers"),
    ({"weight": None}, "field 'weight' holds null"),
    ({"weight": "much"}, "field 'weight' holds str, no number"),
    ({"reward": float("nan")}, "field 'reward' holds nan; legal is a number, finite in float32"),
    ({"reward": 1e39}, "field 'reward' holds 1e+39"),
    ({"label": [1, 2]}, "field 'label' has the shape [2]; legal is a list of 3 numbers"),
    ({"label": [1, 2, 0.5]}, "which is no int64"),
    ({"label": [1, 2, 2**63]}, "which is no int64"),
    ({"expert": [[1, 2], [3]]}, "field 'expert' holds lists of different lengths"),
]


@pytest.mark.parametrize(("change", "words"), BAD, ids=[words for _, words in BAD])
def test_values_that_do_not_fit_are_bad_rows(jsonl, tokenizer, tmp_path, change, words):
    rows = rows_of(sentences(4), tokenizer)
    rows[2] |= change
    with refuses(DataError, "data.bad_rows") as caught:
        prepare(config(jsonl(rows)), tokenizer, tmp_path, 0)
    assert f"data.jsonl:3: {words}" in str(caught.value) or (words in str(caught.value) and "data.jsonl:3" in str(caught.value))
    assert prepare(config(jsonl(rows), bad_rows="skip", bad_rows_limit=0.5), tokenizer, tmp_path, 0).index.documents == 3


def test_a_row_without_a_column_names_those_that_it_has(jsonl, tokenizer, tmp_path):
    with refuses(DataError, "data.bad_rows") as caught:
        prepare(config(jsonl([{"text": "fox", "weigth": []}])), tokenizer, tmp_path, 0)
    assert "no field 'weight', which data.tensors.weight needs; its fields are text, weigth" in str(caught.value)


def test_not_finite_values_name_their_place(jsonl, tokenizer, tmp_path):
    rows = rows_of(sentences(1), tokenizer)
    rows[0]["weight"][2] = float("inf")
    with refuses(DataError, "data.bad_rows") as caught:
        prepare(config(jsonl(rows)), tokenizer, tmp_path, 0)
    assert "jsonl:1: field 'weight' holds inf at place 2" in str(caught.value)


def test_columns_belong_to_the_store(made, jsonl, tokenizer, tmp_path):
    store = made(eval_fraction=0.2)
    assert {"column-weight.bin", "column-expert.bin", "column-score.bin", "column-label.bin"} <= store.index.files.keys()
    assert store.values["weight"].shape == (store.index.tokens,)
    assert store.values["label"].shape == (store.index.documents, 3)
    assert isinstance(store.values["expert"].base.base, np.memmap) or isinstance(store.values["expert"], np.memmap)
    assert not store.index.unread_columns
    rows = rows_of(sentences(20), tokenizer)
    rows[3]["reward"] = 100
    other = prepare(config(jsonl(rows), eval_fraction=0.2), tokenizer, tmp_path / "store", 0)
    assert other.index.parts[TRAINED] != store.index.parts[TRAINED]
    fewer = made(eval_fraction=0.2, tensors={"score": TENSORS["score"]})
    assert fewer.index.unread_columns == ["weight", "expert", "label"]
    loaders = [TrainLoader(one, sequence_length=16, global_batch_size=2, microbatch_size=1) for one in (store, fewer)]
    with pytest.raises(CheckpointError, match=r"data\.tensors: .*'weight'.* in the checkpoint, \{'score'"):
        loaders[1].check_state(loaders[0].state_dict(1))
    with pytest.raises(CheckpointError, match=r"data\.tensors: None in the checkpoint, \{'score'"):
        loaders[1].check_state(
            TrainLoader(
                made(eval_fraction=0.2, tensors={}), sequence_length=16, global_batch_size=2, microbatch_size=1
            ).state_dict(1)
        )


def test_a_damaged_column_is_made_again(made):
    store = made()
    path = store.directory / "column-weight.bin"
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    assert "column-weight.bin is not what was written" in store.damage()[0][0]
    assert made().damage() == ([], "")
    path.write_bytes(content[:-4])
    with refuses(DataError, "data.store.damaged"):
        TokenStore.open(store.directory)


def test_where_columns_cannot_be(tmp_path):
    (tmp_path / "a.txt").write_text("fox")
    (problem,) = config(str(tmp_path / "a.txt")).problems()
    assert "a.txt' is one text, and has no columns" in problem
    wrong = (
        ({"files": [], "corpus": "python-stdlib"}, "corpus 'python-stdlib' has no columns"),
        ({"tensors": {"labels": {"per": "token"}}}, "data.tensors.labels: legal is a name as in code, and none of"),
        ({"tensors": {"reference_log_probs": {"per": "document"}}}, "legal is per: token, float32, without width"),
        ({"tensors": {"weight": {"per": "row"}}}, "'token', 'input' or 'document'"),
    )
    for changes, words in wrong:
        with pytest.raises(ValueError, match=words):
            config("a.jsonl", **changes)


def test_columns_by_a_map_and_of_parquet(tokenizer, tmp_path):
    from datasets import Dataset

    rows = rows_of(sentences(5), tokenizer)
    Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stores = [prepare(config(str(tmp_path / name)), tokenizer, tmp_path / name[2:], 0) for name in ("a.parquet", "a.jsonl")]
    assert stores[0].index.parts[TRAINED] == stores[1].index.parts[TRAINED]
    of_map = config(
        str(tmp_path / "a.jsonl"), map="tests.data.parts:length", tensors={"length": {"per": "document", "dtype": "int64"}}
    )
    store = prepare(of_map, tokenizer, tmp_path / "map", 0)
    assert store.values["length"].tolist() == [len(text) for text in sentences(5)]

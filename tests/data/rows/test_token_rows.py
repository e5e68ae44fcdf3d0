"""Rows that are tokens already: stored as they are, with columns; and what is wrong with one is said with file and line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.data.data_config import DataConfig
from meshwright.data.preparation import prepare
from meshwright.data.rows.columns import TensorColumn
from meshwright.data.store import TokenStore
from meshwright.data.tokenizer import train_tokenizer, vocabulary_digest
from meshwright.errors import DataError
from tests.harness import refuses

TOKENIZER = train_tokenizer(iter(["a few words"] * 3), 261)


def stored(folder: Path, *rows: Any, **options: Any) -> TokenStore:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return prepare(DataConfig(files=[str(file)], sequence_length=8, eval_fraction=0.0, **options), TOKENIZER, folder / "out", 0)


def test_tokens_are_stored_as_they_are(tmp_path: Path) -> None:
    top = {"per": "token", "width": 2, "dtype": "int64"}
    rows = [
        {"input_ids": [5, 6, 7], "top": [[0, 1], [2, 3], [4, 5]], "tokenizer": vocabulary_digest(TOKENIZER)},
        {"input_ids": list(range(20)), "top": [[n, n] for n in range(20)]},
    ]
    store = stored(tmp_path, *rows, tensors={"top": TensorColumn.model_validate(top)})
    assert store.index.kind == "text"
    assert store.tokens.tolist() == [5, 6, 7, *range(20)]
    assert store.values["top"].tolist() == rows[0]["top"] + rows[1]["top"]
    assert store.index.unread_columns == []


def test_a_mask_says_what_is_learned(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0]}, {"input_ids": [8, 9], "loss_mask": [False, False]}]
    store = stored(tmp_path, *rows, format="tokens")
    assert (store.index.kind, store.index.empty) == ("chat", 1)
    assert store.loss_mask is not None
    assert store.loss_mask.tolist() == [False, True, False]
    with refuses(DataError, "data.kind"):
        stored(tmp_path, rows[0], {"input_ids": [5, 6, 7]}, format="tokens")
    np.testing.assert_array_equal(stored(tmp_path, *rows, format="tokens", columns={"loss_mask": None}).lengths, [3, 2])


def test_a_text_with_its_tokens_is_a_text(tmp_path: Path) -> None:
    assert stored(tmp_path, {"text": "a", "input_ids": [5, 6, 7]}).index.documents == 1
    assert len(stored(tmp_path, {"text": "a", "input_ids": [5, 6, 7]}).tokens) == 2  # and its end


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"input_ids": [5, 261]}, "token 1 is 261; legal are the ids of the tokenizer, 0 to 260"),
        ({"input_ids": [5, -1]}, "token 1 is -1"),
        ({"input_ids": "5 6"}, "field 'input_ids' is str; legal is a list of ids"),
        ({"input_ids": [5, 6.5]}, "holds something else than a list of ids"),
        ({"input_ids": [[5], [6, 7]]}, "holds something else than a list of ids"),
        ({"ids": [5, 6]}, "field 'input_ids' is null"),
        ({"input_ids": [5, 6], "loss_mask": [1]}, "field 'loss_mask' has 1 value for 2 tokens"),
        ({"input_ids": [5, 6], "loss_mask": [1, 2]}, "field 'loss_mask' holds 2; legal are 0 and 1"),
        ({"input_ids": [5, 6], "tokenizer": "0123"}, "those of another tokenizer: the digest of its vocabulary is 0123"),
        ({"input_ids": [5, 6], "tokenizer": 7}, "field 'tokenizer' is int"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    with refuses(DataError, "data.bad_rows") as caught:
        stored(tmp_path, {"input_ids": [5, 6]}, row, format="tokens")
    assert words in str(caught.value)
    assert "rows.jsonl:2" in str(caught.value)

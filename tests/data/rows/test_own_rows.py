"""Rows by code of the user: read once into the token store, changed one by one, and named where they fail."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from meshwright.data.data_config import DataConfig
from meshwright.data.identity import TRAINED
from meshwright.data.preparation import prepare
from meshwright.data.rows.corpora import documents, first_rows
from meshwright.data.rows.own_rows import part_problems
from meshwright.data.store import TokenStore
from meshwright.errors import ConfigError, DataError
from tests.data.conftest import sentences
from tests.harness import refuses

HERE = "tests.data.parts:"
PAGE = Path(__file__).parents[3] / "docs" / "data.md"


def config(source: str | dict[str, Any] | None = None, **changes: Any) -> DataConfig:
    if isinstance(source, str):
        source = f"{HERE}{source}"
    return DataConfig.model_validate({"source": source, "sequence_length": 64, "eval_fraction": 0.0} | changes)


def texts(store: TokenStore, tokenizer: Any) -> list[str]:
    pieces = np.split(store.tokens, store.offsets[1:-1])
    return [tokenizer.decode(piece, skip_special_tokens=True) for piece in pieces]


def test_a_source_is_read_into_the_store(tmp_path, tokenizer, jsonl):
    store = prepare(config("rows", eval_fraction=0.2), tokenizer, tmp_path / "a", 0)
    assert texts(store, tokenizer) == sentences(12)
    of_files = prepare(
        DataConfig(files=[jsonl([{"text": text} for text in sentences(12)])], sequence_length=64, eval_fraction=0.2),
        tokenizer,
        tmp_path / "b",
        0,
    )
    assert store.index.parts[TRAINED] == of_files.index.parts[TRAINED]
    assert prepare(config("rows", eval_fraction=0.2), tokenizer, tmp_path / "a", 0).directory == store.directory


def test_sequences_and_endless_sources(tmp_path, tokenizer):
    found = list(documents(config({"use": f"{HERE}Sequence", "with": {"words": "2"}})))
    assert [document.messages[1]["content"] for document in found] == ["fox fox"] * 6
    assert [document.text for document in documents(config("endless", max_documents=14))] == [*sentences(12), *sentences(2)]


def test_rows_of_datasets_have_no_nulls_that_arrow_adds(tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [{"name": "f"}]}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    with_ = {"path": "json", "data_files": str(tmp_path / "chats.jsonl"), "split": "train", "cache_dir": str(tmp_path)}
    (found,) = documents(config({"use": "datasets:load_dataset", "with": with_}))
    assert found.messages == turns


def test_another_argument_or_code_is_another_store(tmp_path, tokenizer, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    part = tmp_path / "changing_source.py"
    code = "def rows(revision=0):\n    return ['the quick fox', 'the lazy dog']\n"
    part.write_text(code)
    first = prepare(config({"use": "changing_source:rows"}), tokenizer, tmp_path / "s", 0)
    other = prepare(config({"use": "changing_source:rows", "with": {"revision": 1}}), tokenizer, tmp_path / "s", 0)
    part.write_text(code.replace("lazy", "brown"))
    changed = prepare(config({"use": "changing_source:rows"}), tokenizer, tmp_path / "s", 0)
    assert len({first.fingerprint, other.fingerprint, changed.fingerprint}) == 3
    assert first.index.parts["data.source"]["use"] == "changing_source:rows"
    assert first.index.parts[TRAINED] == other.index.parts[TRAINED]


def test_a_source_that_fails_leaves_nothing(tmp_path, tokenizer):
    with refuses(DataError, "part.raised") as caught:
        prepare(config({"use": f"{HERE}rows", "with": {"fails_at": 9}}), tokenizer, tmp_path, 0)
    said = str(caught.value)
    assert f"data.source={HERE}rows, after row 9: ValueError: the server is gone\n  " in said
    assert 'in rows: raise ValueError("the server is gone")' in said
    assert [path.name for path in tmp_path.iterdir() if path.name != "datasets-cache"] == []


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ("fails_at_once", "part.raised", "OSError: no such server"),
        ("a_number", "part.returned", "returned int; legal is an iterable or a sequence of rows"),
        ("nothing", "data.empty", "holds no row"),
        ("wrong", "data.bad_rows", "3 of the first 3 rows cannot be used"),
    ],
)
def test_first_rows_are_tried(source, code, words):
    problems = first_rows(config(source))
    assert code in {problem.code for problem in problems}
    assert words in "\n".join(problems)


def test_bad_rows_of_a_source(tmp_path, tokenizer):
    assert not first_rows(config("mixed"))
    with refuses(DataError, "data.bad_rows") as caught:
        prepare(config("mixed"), tokenizer, tmp_path, 0)
    for words in ("row 9: holds int, not an object", "row 10: no field", "row 11: holds an object whose keys are not all text"):
        assert words in str(caught.value)
    store = prepare(config("mixed", bad_rows="skip", bad_rows_limit=0.5), tokenizer, tmp_path, 0)
    assert (store.index.documents, store.index.rows, store.index.bad) == (10, 13, 3)


def test_all_that_is_wrong_with_parts_is_said_together():
    problems = part_problems(config("row", map={"use": f"{HERE}asked", "with": {"questoin": "?"}}))
    assert [problem.code for problem in problems] == ["config.part", "config.part.arguments"]
    assert "did you mean 'rows'?" in problems[0]
    assert "did you mean 'question'?" in problems[1]
    for name, words in (("NoCall", "lacks `def __call__"), ("no_row", "takes no row"), ("HERE", "no 'HERE'")):
        (problem,) = part_problems(config("rows", map=f"{HERE}{name}"))
        assert words in problem


def test_a_source_stands_alone(jsonl):
    for changes, words in (({"files": ["a.jsonl"]}, "files and source"), ({"hub_split": "test"}, "needs data.hub")):
        with pytest.raises(ValueError, match=words):
            config("rows", **changes)


# ---- map -------------------------------------------------------------------------------------------------------------


def test_a_map_makes_chats_of_texts_of_every_source(tmp_path, jsonl):
    asked = {"use": f"{HERE}asked", "with": {"question": "and?"}}
    (tmp_path / "a.txt").write_text("the lazy dog")
    lines, one = jsonl([{"text": text} for text in sentences(3)]), str(tmp_path / "a.txt")
    sources = [{"files": [lines, one]}, {"source": "rows"}, {"corpus": "python-stdlib", "max_documents": 3}]
    for source in sources:
        data = config(**({"map": asked, "kind": "chat", "eval_files": [one]} | source))
        assert not data.problems()
        found = list(documents(data))
        assert all(document.messages[0]["content"] == "and?" for document in found)
        assert len(found) >= 3
    assert found[0].source.startswith("python-stdlib/")


def test_a_map_may_return_several_rows_and_none(tmp_path, tokenizer):
    found = [document.text for document in documents(config("rows", map=f"{HERE}twice"))]
    assert found[:4] == [sentences(2)[0], sentences(2)[0].upper(), sentences(2)[1], sentences(2)[1].upper()]
    long = {"use": f"{HERE}Long", "with": {"least": 8}}
    with refuses(DataError, "data.bad_rows") as caught:
        prepare(config("rows", map=long), tokenizer, tmp_path, 0)
    assert f"row 8: data.map={HERE}Long raised KeyError: 'wizards'" in str(caught.value)
    assert 'raise KeyError("wizards")' in str(caught.value)
    store = prepare(config("rows", map=long, bad_rows="skip"), tokenizer, tmp_path, 0)
    kept = [text for text in sentences(12) if len(text.split()) >= 8 and not text.startswith("wizards")]
    assert texts(store, tokenizer) == kept
    assert (store.index.mapped_away, store.index.bad, store.index.rows) == (12 - 1 - len(kept), 1, 12)
    assert store.index.parts["data.map"]["with"] == {"least": 8}


def test_what_a_map_returns_is_a_row(jsonl):
    with refuses(DataError, "data.bad_rows") as caught:
        list(documents(config(files=[jsonl([{"text": "fox"}])], map=f"{HERE}three")))
    assert f"jsonl:1: data.map={HERE}three returned int, not an object" in str(caught.value)


def test_stores_without_parts_stay_what_they_are(tmp_path, tokenizer, jsonl):
    store = prepare(DataConfig(files=[jsonl([{"text": "the fox"}])], sequence_length=16), tokenizer, tmp_path, 0)
    values = json.loads((store.directory / "index.json").read_text())
    assert not values.keys() & {"mapped_away", "tensors"}
    assert not values["parts"].keys() & {"data.source", "data.map", "data.tensors"}
    names = {path.name for path in Path(store.directory).iterdir()}
    assert names == {"tokens.bin", "offsets.npy", "held_out.npy", "index.json"}


def test_a_class_that_cannot_be_made():
    with refuses(ConfigError, "config.part.arguments"):
        list(documents(config("rows", map=f"{HERE}Long")))


def test_the_page(tmp_path, tokenizer, monkeypatch):
    code = re.search(r"^```python\n(# my_rows.py\n.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert code is not None
    block = re.search(r"^```yaml\n(data:\n  source:.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    (tmp_path / "my_rows.py").write_text(code.group(1))
    lines = [{"q": "who?", "a": "the fox " * count} for count in (1, 2, 200)]
    (tmp_path / "answers.log").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    data = DataConfig.model_validate(yaml.safe_load(block.group(1))["data"])
    assert not first_rows(data)
    store = prepare(data, tokenizer, tmp_path / "store", 0)
    assert (store.index.documents, store.index.mapped_away) == (2, 1)

"""What a configuration refuses, with the knob, the value and what is legal."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from meshwright.data.data_config import DataConfig
from meshwright.data.rows.source_files import expand_files
from meshwright.data.tokenizer_config import TokenizerConfig


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, ["exactly one of corpus, files, hub and source", "none"]),
        ({"files": []}, ["files is an empty list"]),
        ({"files": ["a.txt"], "hub": "x/y"}, ["set here: files and hub"]),
        ({"corpus": "wikipedia"}, ["python-stdlib"]),
        ({"files": ["a.txt"], "hub_split": "test"}, ["data.hub_split='test' needs data.hub"]),
        ({"corpus": "python-stdlib", "kind": "chat"}, ["data.kind='chat'", "legal"]),
        (
            {"files": ["a.jsonl"], "kind": "chat", "long_documents": "split"},
            ["data.long_documents='split'", "truncate"],
        ),
        ({"files": ["a.txt"], "eval_fraction": 1.0}, ["eval_fraction", "less than 1"]),
        ({"files": ["a.txt"], "sequence_length": 1}, ["sequence_length", "greater than or equal to 2"]),
        ({"files": ["a.txt"], "max_documents": 0}, ["max_documents"]),
        ({"files": ["a.txt"], "shufle": True}, ["shufle", "Extra inputs"]),
        (
            {"files": ["a.jsonl"], "format": "alpaca", "columns": {"output": None, "input": None}},
            ["data.columns.output=null: rows need it; legal to leave out: input, system, tools"],
        ),
        ({"files": ["a.jsonl"], "columns": {"weight": None}}, ["data.columns.weight=null", "legal to leave out"]),
        ({"files": ["a.txt"], "packing": "tight"}, ["packing", "'pack' or 'pad'"]),
    ],
)
def test_bad_data_configs(values, words):
    with pytest.raises(ValidationError) as caught:
        DataConfig(**({"sequence_length": 8} | values))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_bad_tokenizer_configs():
    with pytest.raises(ValidationError, match="exclude each other"):
        TokenizerConfig(path="x", vocab_size=512)
    with pytest.raises(ValidationError, match="vocab_size"):
        TokenizerConfig(vocab_size=100)


def test_held_out_share():
    assert DataConfig(corpus="python-stdlib", sequence_length=8).held_out == 0.05
    assert DataConfig(files=["a.txt"], eval_files=["b.txt"], sequence_length=8).held_out == 0
    assert DataConfig(files=["a.txt"], eval_files=["b.txt"], eval_fraction=0.1, sequence_length=8).held_out == 0.1
    assert DataConfig(files=["a.txt"], eval_fraction=0, sequence_length=8).held_out == 0


def test_configs_survive_a_round_trip():
    config = DataConfig(files=["a.txt"], eval_files=["b.txt"], sequence_length=8)
    assert DataConfig.model_validate_json(config.model_dump_json()) == config


def test_every_field_has_help():
    for model in (DataConfig, TokenizerConfig):
        assert all(field.description for field in model.model_fields.values())


def test_problems_on_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {"good.txt": "x", "data.csv": "x", "empty.jsonl": ""}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder").mkdir()
    config = DataConfig(
        files=["good.txt", "data.csv", "empty.jsonl", "folder", "none.txt", "*.parquet"],
        eval_files=["gone.txt"],
        sequence_length=8,
    )
    problems = config.problems()
    for words in (
        ("data.csv", "readable extensions"),
        ("empty.jsonl", "is empty"),
        ("folder", "is a directory"),
        ("none.txt", "no such file"),
        ("*.parquet", "glob matches no file"),
        ("data.eval_files", "gone.txt"),
    ):
        assert any(all(word in problem for word in words) for problem in problems), (words, problems)
    assert len(problems) == 6
    assert DataConfig(files=["good.txt"], sequence_length=8).problems() == []
    assert "is text" in DataConfig(files=["good.txt"], kind="chat", sequence_length=8).problems()[0]


def test_a_local_folder_of_a_data_set_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "rows.jsonl").write_text("{}")

    def problems(hub):
        return DataConfig(hub=hub, sequence_length=8).problems()

    for hub in ("/nowhere/nope", "./foldr", "~/nope", "../a/b", "a/b/c", "rows.jsonl"):
        (line,) = problems(hub)
        assert line.startswith(f"data.hub={hub!r}: ")
        assert ("is a file, not a directory" if hub == "rows.jsonl" else "no such directory") in line
    assert "did you mean 'folder'?" in problems("./foldr")[0]
    for hub in ("folder", str(tmp_path), "owner/name", "name", "hf://datasets/a/b", "buckets/a/b/c"):  # the hub is not asked
        assert problems(hub) == []


def test_files_are_sorted_and_read_once(tmp_path):
    for name in ("b.txt", "a.txt", "c[1].txt"):
        (tmp_path / name).write_text("x")
    found = expand_files([str(tmp_path / "c[1].txt"), str(tmp_path / "*.txt")])
    assert [path.name for path in found] == ["c[1].txt", "a.txt", "b.txt"]


def test_importing_the_schema_is_light():
    code = (
        "import sys, meshwright.data, meshwright.data.data_config\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import meshwright.data as data\n"
        "assert all(getattr(data, name) is not None for name in data.__all__)\n"
        "heavy = {'torch', 'transformers', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_an_unknown_name_is_an_attribute_error():
    import meshwright.data

    with pytest.raises(AttributeError, match="nothing_like_this"):
        meshwright.data.nothing_like_this  # noqa: B018

"""Sources, tokenized once, and every way in which they can be wrong."""

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest

from meshwright.data import sums
from meshwright.data.data_config import DataConfig
from meshwright.data.index import FORMAT_VERSION, write_index
from meshwright.data.preparation import prepare
from meshwright.data.rows.corpora import documents, eval_documents, training_texts
from meshwright.data.store import TokenStore
from meshwright.errors import ConfigError, DataError
from tests.harness import refuses

from .conftest import sentences

ROWS = [{"text": text} for text in sentences(30)]
CHATS = [
    {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
    for a, b in zip(sentences(12), sentences(24)[12:], strict=True)
]


def config(*files, **changes):
    return DataConfig(**({"files": list(files), "sequence_length": 16} | changes))


def texts_of(store, tokenizer):
    pieces = np.split(store.tokens, store.offsets[1:-1])
    return [tokenizer.decode(piece) for piece in pieces]


# ---- sources ---------------------------------------------------------------------------------------------------------


def test_files_of_each_format(tmp_path, jsonl):
    from datasets import Dataset

    for name in ("a.txt", "b.md", "c.py"):
        (tmp_path / name).write_text(f"text of {name}\n")
    (tmp_path / "d.json").write_text(json.dumps([{"text": "json one"}, {"text": "json two"}]))
    jsonl(ROWS[:3], "e.jsonl")
    Dataset.from_list(ROWS[3:5]).to_parquet(str(tmp_path / "f.parquet"))
    found = list(documents(config(str(tmp_path / "*")), tmp_path / "cache"))
    expected = ["text of a.txt\n", "text of b.md\n", "text of c.py\n", "json one", "json two"]
    assert [document.text for document in found] == expected + [row["text"] for row in ROWS[:5]]
    assert found[-1].source == f"{tmp_path / 'f.parquet'}, row 2"
    assert list(training_texts(config(str(tmp_path / "*")))) == [document.text for document in found]


def test_chats_of_jsonl_and_parquet(tmp_path, jsonl):
    from datasets import Dataset

    Dataset.from_list(CHATS).to_parquet(str(tmp_path / "chats.parquet"))
    for path in (jsonl(CHATS), str(tmp_path / "chats.parquet")):
        found = list(documents(config(path)))
        assert [document.messages for document in found] == [row["messages"] for row in CHATS]
    assert sentences(1)[0] in list(training_texts(config(path)))


def test_keys_that_datasets_adds_are_taken_away(jsonl):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [{"name": "f"}]}]
    assert next(documents(config(jsonl([{"messages": turns}])))).messages == turns


def test_a_hub_data_set_by_directory(tmp_path, tokenizer):
    from datasets import Dataset

    (tmp_path / "set").mkdir()
    Dataset.from_list(ROWS).to_parquet(str(tmp_path / "set" / "train.parquet"))
    data = DataConfig(hub=str(tmp_path / "set"), sequence_length=16)
    store = prepare(data, tokenizer, tmp_path / "store", 0)
    assert store.index.documents == 30
    assert prepare(data, tokenizer, tmp_path / "store", 0).directory == store.directory
    with pytest.raises(DataError, match=r"hub_split='test'.*Unknown split"):
        next(documents(data.model_copy(update={"hub_split": "test"}), tmp_path / "cache"))
    with pytest.raises(DataError, match=r"data.hub='nobody/nothing'"):
        next(documents(DataConfig(hub="nobody/nothing", sequence_length=8), tmp_path / "cache"))


def test_a_typo_of_a_local_data_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    with pytest.raises(DataError, match=r"data.hub='rosw': no such directory; did you mean 'rows'\? .*; as a name of the hub "):
        next(documents(DataConfig(hub="rosw", sequence_length=8), tmp_path / "cache"))


def test_the_home_of_a_local_data_set(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text('{"text": "fox"}\n')
    assert next(documents(DataConfig(hub="~/rows", sequence_length=8), tmp_path / "cache")).text == "fox"


def test_python_stdlib(tokenizer, tmp_path):
    data = DataConfig(corpus="python-stdlib", sequence_length=64, max_documents=12)
    found = list(documents(data))
    assert len(found) == 12
    names = [document.source.removeprefix("python-stdlib/") for document in found]
    assert names == sorted(names, key=lambda name: name.split("/"))
    assert all(document.text is not None for document in found)
    store = prepare(data, tokenizer, tmp_path, 0)
    assert store.index.documents + store.index.empty == 12
    assert store.index.split > 0
    whole = [document.source for document in documents(data.model_copy(update={"max_documents": None}))]
    assert not any("/test" in name or "site-packages" in name or "_sysconfigdata" in name for name in whole)
    assert "python-stdlib/asyncio/events.py" in whole


def test_max_documents(jsonl):
    assert len(list(documents(config(jsonl(ROWS), max_documents=4)))) == 4


@pytest.mark.parametrize(
    ("rows", "changes", "words"),
    [
        ([{"body": "x", "n": 1}], {}, ":1: no fields of a format: neither 'text' .*'messages'.*body, n; set data.format"),
        ([{"text": "x", "messages": []}], {}, "several formats, 'text' .text., 'messages' .*set data.format, data.kind or"),
        ([{"body": "x"}], {"kind": "text"}, "no field 'text'; its fields are body; set data.text_field"),
        ([{"text": "x"}], {"kind": "chat"}, ":1: no fields of a format: neither 'messages'"),
        ([{"text": "x"}], {"format": "messages"}, "no field 'messages'; its fields are text; set data.messages_field or"),
        ([{"text": "x"}, {"text": None}], {}, ":2: field 'text' holds null, not text"),
        ([{"text": 3}], {}, ":1: field 'text' holds int"),
        ([{"messages": "hello"}], {}, "not a list of messages"),
        ([{"messages": [{"from": "human", "value": "x"}]}], {}, "message 1 has no role; its keys are from, value"),
        ([], {}, "is empty"),
    ],
)
def test_bad_rows(jsonl, rows, changes, words):
    with pytest.raises(DataError, match=words):
        list(documents(config(jsonl(rows), **changes)))


def test_bad_files(tmp_path, jsonl):
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n\n{"text": b}\n')
    with pytest.raises(DataError, match=r"bad.jsonl:3: cannot be read as json"):
        list(documents(config(str(tmp_path / "bad.jsonl"))))
    (tmp_path / "bad.parquet").write_text("no parquet")
    with pytest.raises(DataError, match=r"bad.parquet: cannot be read as parquet"):
        list(documents(config(str(tmp_path / "bad.parquet"))))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match="not UTF-8 text"):
        list(documents(config(str(tmp_path / "latin.txt"))))
    with pytest.raises(DataError, match=r"gone.txt' matches no file"):
        list(documents(config("gone.txt")))
    (tmp_path / "data.csv").write_text("x")
    with pytest.raises(DataError, match="the extension of a file of rows"):
        list(documents(config(str(tmp_path / "data.csv"))))
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"is chat.*is text|is text.*is chat"):
        list(documents(config(jsonl(CHATS), str(tmp_path / "a.txt"))))
    with pytest.raises(DataError, match="is text"):
        list(documents(config(str(tmp_path / "a.txt"), kind="chat")))


def test_nothing_is_cached_elsewhere(tmp_path, jsonl, tokenizer, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "polluted")
    prepare(config(jsonl(ROWS)), tokenizer, tmp_path / "store", 0)
    assert not (tmp_path / "polluted").exists()


# ---- stores ----------------------------------------------------------------------------------------------------------


def test_a_store_holds_the_documents(tmp_path, jsonl, tokenizer):
    store = prepare(config(jsonl(ROWS)), tokenizer, tmp_path / "store", 0)
    assert texts_of(store, tokenizer) == [row["text"] + "<|eos|>" for row in ROWS]
    index = store.index
    assert (index.kind, index.long_documents, index.token_dtype) == ("text", "split", "uint16")
    assert index.documents == 30
    assert index.train_documents + index.eval_documents == 30
    assert index.eval_documents == 2  # 5 % of 30, rounded
    assert index.train_tokens + index.eval_tokens == index.tokens == len(store.tokens)
    assert index.split == (store.lengths > 16).sum()
    assert store.loss_mask is None


def test_bos_comes_first_if_the_tokenizer_adds_one(tmp_path, jsonl):
    from tokenizers.processors import TemplateProcessing

    from meshwright.data.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(sentences(200), 300)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A <|eos|>", special_tokens=[("<|bos|>", 1), ("<|eos|>", 2)]
    )
    store = prepare(config(jsonl(ROWS)), tokenizer, tmp_path / "store", 0)
    assert texts_of(store, tokenizer) == ["<|bos|>" + row["text"] + "<|eos|>" for row in ROWS]


def test_chats_are_stored_with_their_loss_mask(tmp_path, jsonl, tokenizer):
    store = prepare(config(jsonl(CHATS), sequence_length=128), tokenizer, tmp_path / "store", 0)
    assert (store.index.kind, store.index.long_documents) == ("chat", "error")
    assert len(store.loss_mask) == store.index.tokens
    learned = tokenizer.decode(store.tokens[store.loss_mask])
    assert learned == "".join(row["messages"][1]["content"] + "<|im_end|>" for row in CHATS)


def test_prepare_is_idempotent_and_keyed(tmp_path, jsonl, tokenizer):
    path = jsonl(ROWS)
    first = prepare(config(path), tokenizer, tmp_path / "store", 0)
    stamp = os.stat(first.directory / "tokens.bin").st_mtime_ns
    same = [config(path), config(path, packing="pad"), config(path, shuffle=False), config(jsonl(ROWS, "moved.jsonl"))]
    for data in same:
        assert prepare(data, tokenizer, tmp_path / "store", 0).directory == first.directory
    assert os.stat(first.directory / "tokens.bin").st_mtime_ns == stamp
    others = [(config(path, eval_fraction=0.5), 0), (config(path, max_documents=9), 0), (config(path), 1)]
    others.append((config(jsonl([*ROWS[:-1], {"text": "other"}], "other.jsonl")), 0))
    found = {prepare(data, tokenizer, tmp_path / "store", seed).fingerprint for data, seed in others}
    assert len(found | {first.fingerprint}) == 5
    assert not [path for path in (tmp_path / "store").iterdir() if path.name.startswith(".")]


def test_a_failed_prepare_leaves_nothing(tmp_path, jsonl, tokenizer):
    with pytest.raises(DataError):
        prepare(config(jsonl([*ROWS, {"text": None}])), tokenizer, tmp_path / "store", 0)
    assert not [path for path in (tmp_path / "store").iterdir() if path.name != "datasets-cache"]


def test_a_store_written_meanwhile_wins(tmp_path, jsonl, tokenizer, monkeypatch):
    from meshwright.data import preparation as module

    data, write = config(jsonl(ROWS)), module._write

    def slow(*args):
        monkeypatch.setattr(module, "_write", write)
        prepare(data, tokenizer, tmp_path / "store", 0)  # another process finishes first
        write(*args)

    monkeypatch.setattr(module, "_write", slow)
    assert prepare(data, tokenizer, tmp_path / "store", 0).index.documents == 30
    assert not [path for path in (tmp_path / "store").iterdir() if path.name.startswith(".")]


def test_broken_stores_are_refused(tmp_path, jsonl, tokenizer):
    with refuses(DataError, "data.store.missing"):
        TokenStore.open(tmp_path / "nowhere")
    store = prepare(config(jsonl(ROWS)), tokenizer, tmp_path / "store", 0)
    index = (store.directory / "index.json").read_text()
    write_index(store.directory, replace(store.index, format_version=99))
    with pytest.raises(DataError, match="format 99"):
        TokenStore.open(store.directory)
    (store.directory / "index.json").write_text("{")
    with pytest.raises(DataError, match="not the index"):
        TokenStore.open(store.directory)
    (store.directory / "index.json").write_text(index)
    (store.directory / "tokens.bin").write_bytes(b"short")
    with pytest.raises(DataError, match="has 5 bytes instead of"):
        TokenStore.open(store.directory)


NAMES = ("tokens.bin", "loss_mask.bin", "offsets.npy", "held_out.npy", "index.json")


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def flip(place):
    """Change one bit, at this share of a file."""

    def change(path):
        content = bytearray(path.read_bytes())
        content[int(place * (len(content) - 1))] ^= 4
        path.write_bytes(content)

    return change


@pytest.fixture(scope="module")
def chats(tmp_path_factory, tokenizer):
    """A source, and the files of its store."""
    folder = tmp_path_factory.mktemp("chats")
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    data = config(str(folder / "chats.jsonl"), sequence_length=128)
    return data, prepare(data, tokenizer, folder / "store", 0)


@pytest.fixture
def stored(chats, tmp_path):
    """The configuration, and a copy of its store to damage."""
    data, store = chats
    shutil.copytree(store.directory, tmp_path / "store" / store.directory.name)
    return data, tmp_path / "store" / store.directory.name


@pytest.mark.parametrize("damage", [cut, os.unlink, *map(flip, (0, 0.2, 0.5, 0.8, 1))])
@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_file_is_named_and_made_again(chats, stored, tokenizer, name, damage):
    data, directory = stored
    damage(directory / name)
    lines = []
    store = prepare(data, tokenizer, directory.parent, 0, say=lines.append)
    assert store.directory == directory
    (line,) = lines
    assert line.startswith(f"{directory / name} ") or line.startswith(f"{directory / name}: not the index")
    assert line.endswith("; the tokens are made again")
    for other in NAMES:
        assert (directory / other).read_bytes() == (chats[1].directory / other).read_bytes()
    assert [path.name for path in directory.parent.iterdir() if path.name != "datasets-cache"] == [directory.name]
    prepare(data, tokenizer, directory.parent, 0, say=lines.append)
    assert len(lines) == 1  # it is sound


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_that_opens_damaged_files_names_them(stored, name):
    _, directory = stored
    cut(directory / name)
    with pytest.raises(DataError, match=f"{name}.*start the run again"):
        TokenStore.open(directory)
    (directory / name).unlink()
    with pytest.raises(DataError, match=name):
        TokenStore.open(directory)


def test_offsets_that_do_not_rise_and_flags_of_others_are_refused_without_reading_tokens(stored):
    """A rank reads no digests, and a loop over such offsets would not end."""
    _, directory = stored
    for change in ({3: 2}, {-1: 10**12}, {0: 1}):
        offsets = np.load(directory / "offsets.npy")
        for place, value in change.items():
            offsets[place] = value
        np.save(directory / "offsets.npy", offsets)
        with pytest.raises(DataError, match=r"offsets.npy is damaged: it does not rise from 0 to the number of tokens"):
            TokenStore.open(directory)
    np.save(directory / "offsets.npy", np.concatenate([[0], np.full(11, 1)]).cumsum())
    with pytest.raises(DataError, match=r"offsets.npy"):
        TokenStore.open(directory)


def test_a_damaged_store_stays_until_the_new_one_is_complete(stored, tokenizer, tmp_path):
    data, directory = stored
    flip(0.5)(directory / "tokens.bin")
    damaged = (directory / "tokens.bin").read_bytes()
    (tmp_path / "bad.jsonl").write_text('{"messages": 3}\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.data.preparation.documents", lambda *args: documents(config(str(tmp_path / "bad.jsonl"))))
        with pytest.raises(DataError) as caught:
            prepare(data, tokenizer, directory.parent, 0)
    assert caught.value.problems[0].startswith(f"{directory / 'tokens.bin'} is not what was written")
    assert caught.value.problems[0].endswith("and cannot be made again")
    assert "1 of 1 rows" in caught.value.problems[1]
    assert (directory / "tokens.bin").read_bytes() == damaged


def test_a_file_that_cannot_be_read_is_not_called_damaged(stored, tokenizer, monkeypatch):
    from pathlib import Path

    data, directory = stored
    opened = Path.open

    def refuse(path, *args, **kwargs):
        if path.name == "tokens.bin" and args[:1] == ("rb",):
            raise OSError(5, "Input/output error", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"tokens.bin: cannot be read: Input/output error; whether it is damaged is not known"):
        prepare(data, tokenizer, directory.parent, 0)


def test_a_store_of_an_earlier_format_is_made_again(stored, tokenizer):
    data, directory = stored
    index = json.loads((directory / "index.json").read_text())
    del index["digest"], index["files"]
    (directory / "index.json").write_text(json.dumps(index | {"format_version": 2}))
    lines = []
    prepare(data, tokenizer, directory.parent, 0, say=lines.append)
    assert lines == [f"{directory}: token store of format 2, this version reads {FORMAT_VERSION}; the tokens are made again"]


def test_a_sample_reads_both_ends_and_says_so(stored, tokenizer, monkeypatch):
    data, directory = stored
    monkeypatch.setattr(sums, "BLOCK", 16)
    store = TokenStore.open(directory)
    files = {name: sums.sums_of(directory / name) for name in NAMES[:4]}
    write_index(directory, replace(store.index, files=files))
    count = len(files["tokens.bin"]["sha256"])
    total = sum(len(file["sha256"]) for file in files.values())
    assert count > sums.SAMPLED
    for place, found in ((0, True), (1, True), (20 / (16 * count), False)):
        flip(place)(directory / "tokens.bin")
        lines = []
        store = TokenStore.open(directory)
        assert bool(store.damage(fast=True)[0]) == found
        assert store.damage()[0]
        flip(place)(directory / "tokens.bin")
    prepare(data, tokenizer, directory.parent, 0, fast=True, say=lines.append)
    (line,) = lines
    read = sum(min(sums.SAMPLED, len(file["sha256"])) for file in files.values())
    assert line == f"--fast: {read} of {total} blocks of the tokens in {directory} checked"


def test_digests_are_those_of_the_bytes_whatever_the_writes(tmp_path, monkeypatch):
    import hashlib

    monkeypatch.setattr(sums, "BLOCK", 16)
    content = bytes(range(100))
    for size in (1, 7, 16, 33, 100):
        with sums.SummedFile(tmp_path / "file") as file:
            for begin in range(0, 100, size):
                file.write(content[begin : begin + size])
        expected = [hashlib.sha256(content[begin : begin + 16]).hexdigest() for begin in range(0, 100, 16)]
        assert file.sums == sums.sums_of(tmp_path / "file") == {"bytes": 100, "sha256": expected}


# ---- long, empty and held out ----------------------------------------------------------------------------------------

LONG = [{"text": "fox"}, {"text": " ".join(["quick brown"] * 30)}, {"text": "dog"}]


def test_long_documents(tmp_path, jsonl, tokenizer):
    path = jsonl(LONG)

    def index(policy):
        return prepare(config(path, long_documents=policy), tokenizer, tmp_path / "store", 0)

    with pytest.raises(DataError, match=r"1 of 3 rows is longer.*sequence_length=16 .*:2, has \d+ tokens.*'drop', or 'split'"):
        index("error")
    assert index("auto").index.split == 1
    truncated = index("truncate")
    assert truncated.index.truncated == 1
    assert truncated.lengths.max() == 16
    dropped = index("drop")
    assert (dropped.index.dropped, dropped.index.documents) == (1, 2)


def test_long_chats(tmp_path, jsonl, tokenizer):
    long = [CHATS[0], {"messages": [{"role": "user", "content": "fox " * 50}, {"role": "assistant", "content": "dog"}]}]
    path = jsonl(long)
    with pytest.raises(DataError, match=r"1 of 2 rows .*:2, has \d+ tokens.*long_documents to 'truncate' or 'drop'$"):
        prepare(config(path, sequence_length=64), tokenizer, tmp_path / "store", 0)
    with pytest.raises(ConfigError, match="cannot be split; legal for chat"):
        prepare(config(path, long_documents="split"), tokenizer, tmp_path / "store", 0)
    store = prepare(config(path, sequence_length=64, long_documents="truncate"), tokenizer, tmp_path / "store", 0)
    index = store.index
    assert (index.truncated, index.dropped, index.empty, index.bad, index.documents) == (0, 1, 0, 0, 1)  # the reply was cut off


def test_nothing_left_to_train_on(tmp_path, jsonl, tokenizer):
    with pytest.raises(DataError, match=r"no document is left to train on: 0 dropped .*, 2 with nothing"):
        prepare(config(jsonl([{"text": ""}, {"text": ""}])), tokenizer, tmp_path / "store", 0)


def test_held_out_documents(tmp_path, jsonl, tokenizer):
    path = jsonl(ROWS)

    def held(seed, **changes):
        return prepare(config(path, **changes), tokenizer, tmp_path / "store", seed).documents("eval").tolist()

    assert held(0, eval_fraction=0) == []
    assert len(held(0, eval_fraction=0.3)) == 9
    assert len(held(0, eval_fraction=0.001)) == 1
    assert len(held(0, eval_fraction=0.999)) == 29
    assert held(0, eval_fraction=0.3) != held(1, eval_fraction=0.3)
    one = prepare(config(jsonl(ROWS[:1], "one.jsonl")), tokenizer, tmp_path / "store", 0)
    assert (one.index.train_documents, one.index.eval_documents) == (1, 0)


def test_eval_files(tmp_path, jsonl, tokenizer):
    data = config(jsonl(ROWS[:20]), eval_files=[jsonl(ROWS[20:], "eval.jsonl")], max_documents=15)
    store = prepare(data, tokenizer, tmp_path / "store", 0)
    assert store.documents("train").tolist() == list(range(15))
    assert store.documents("eval").tolist() == list(range(15, 25))
    assert len(list(eval_documents(data))) == 10
    mixed = config(jsonl(ROWS), eval_files=[jsonl(CHATS, "chats.jsonl")])
    with pytest.raises(DataError, match=r"data.eval_files: .*not both texts or both chats"):
        prepare(mixed, tokenizer, tmp_path / "store", 0)


def test_a_tokenizer_without_end(tmp_path, jsonl, tokenizer):
    import copy

    endless = copy.deepcopy(tokenizer)
    endless.eos_token = None
    with refuses(ConfigError, "tokenizer.eos_token"):
        prepare(config(jsonl(ROWS)), endless, tmp_path / "store", 0)

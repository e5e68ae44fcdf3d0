"""Data files as they come: whatever is in them, a run prepares its tokens or ends with a typed error that names the file."""

import gzip
import json
import random
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.data.data_config import DataConfig
from meshwright.data.preparation import prepare
from meshwright.data.rows.corpora import documents
from meshwright.data.store import StoreIndex
from meshwright.data.tokenizer import build_tokenizer
from meshwright.data.tokenizer_config import TokenizerConfig
from meshwright.errors import DataError, MeshwrightError
from tests.data.conftest import sentences

CHAT = {"messages": [{"role": "user", "content": "quick fox?"}, {"role": "assistant", "content": "brown"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "quick"}, {"from": "gpt", "value": "fox"}]}
SOUND = [
    *({"text": "lazy dog"}, CHAT, SHAREGPT),
    *({"instruction": "say", "input": "box", "output": "fox"}, {"prompt": "a", "completion": "b"}),
]
ODD = [
    *(None, True, 0, -1.5, float("nan"), 10**30, "", " ", "\x00", "\ud800", "é\u2028\ufeff", "{{ 1 / 0 }}", "<|im_end|>"),
    *([], {}, [[]], [None], [{}], {"role": None}, {"function": {}}),
    *([{"type": "text"}], [{"type": "text", "text": "fox"}], [{"type": "image", "url": "x"}]),
]
FILES = 200


def deep(levels: int) -> str:
    return '{"text": ' + "[" * levels + "]" * levels + "}"


LINES = [
    *(b"", b"\r", b"null", b"[]", b"3", b"{", b"}", b'{"text": "x"', b'{"text": x}', b"{'text': 'x'}", b"\x00\x01\x02"),
    *(b'{"text": "x"} {"text": "y"}', b'{"text": "\xff\xfe"}', b'{"text": "a\tb"}', b'{"text": "\\ud83d"}', b'{"text": NaN}'),
    *(b'{"text": Infinity}', b'{"text": "x", "text": "y"}', b'{"text": ' + b"9" * 5000 + b"}", b'{"\\ud800": 1}', b'{"": ""}'),
    *(deep(500).encode(), deep(100_000).encode(), b"\xef\xbb\xbf" + b'{"text": "bom"}', b'{"messages": {"role": "user"}}'),
    *(b'{"messages": [{"role": "user"}]}', b'{"messages": []}', b'{"messages": [{"role": "assistant", "role": "user"}]}'),
    b'{"messages": [{"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f"}}]}]}',
]


def spoiled(value: object, draw: random.Random) -> object:
    """The same value with something odd in it, somewhere."""
    if draw.random() < 0.25 or not isinstance(value, (dict, list)) or not value:
        return draw.choice(ODD)
    if isinstance(value, list):
        at = draw.randrange(len(value))
        return [*value[:at], spoiled(value[at], draw), *value[at + 1 :]]
    key = draw.choice(list(value))
    if draw.random() < 0.3:
        return {(draw.choice(["", "extra", "\udfff"]) if name == key else name): part for name, part in value.items()}
    return {name: spoiled(part, draw) if name == key else part for name, part in value.items()}


def malformed(draw: random.Random) -> tuple[str, bytes]:
    """The ending and the bytes of a file that is wrong, in one of the ways in which files are."""
    sound = draw.choice(SOUND)
    rows = [json.dumps(draw.choice([sound, spoiled(sound, draw)])).encode() for _ in range(draw.randint(1, 6))]
    if draw.random() < 0.5:
        rows.insert(draw.randrange(len(rows) + 1), draw.choice(LINES))
    ending = draw.choice([".jsonl", ".jsonl", ".json"])
    array = ending == ".json" and draw.random() < 0.7
    content = b"[" + b",\n".join(rows) + b"]" if array else draw.choice([b"\n", b"\r\n", b"\n\n"]).join(rows)
    match draw.randrange(12):
        case 0:
            content = content[: draw.randrange(len(content) + 1)]  # cut off
        case 1:
            at = draw.randrange(len(content) + 1)
            content = content[:at] + draw.randbytes(3) + content[at:]
        case 2:
            content = draw.randbytes(50)
        case 3:
            content = gzip.compress(content)
        case 4:
            content = content.decode("utf-8", "replace").encode("utf-16")
        case 5:
            return draw.choice([".parquet", ".txt"]), content
    return ending, content


def outcome(config: DataConfig, tokenizer, folder: Path) -> tuple[tuple[str, ...], StoreIndex | None]:
    """The problems of a typed error, or what was prepared."""
    try:
        return (), prepare(config, tokenizer, folder / "stores", 0).index
    except MeshwrightError as error:
        return error.problems, None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("bad_rows", ["stop", "skip"])
def test_two_hundred_malformed_files_give_no_untyped_error(tmp_path: Path, tokenizer, bad_rows: str) -> None:
    draw = random.Random(13)
    ended = {"prepared": 0, "refused": 0}
    for number in range(FILES):
        ending, content = malformed(draw)
        path = tmp_path / f"{number}{ending}"
        path.write_bytes(content)
        limit = {"bad_rows_limit": 0.5} if bad_rows == "skip" else {}
        config = DataConfig(files=[str(path)], sequence_length=64, bad_rows=bad_rows, **limit)
        problems, index = outcome(config, tokenizer, tmp_path)
        if index is None:
            ended["refused"] += 1
            assert path.name in problems[0] + problems[-1] or "no document is left" in problems[0], problems
            assert len(problems) <= 22
            "".join(problems).encode()  # can be printed
        else:
            ended["prepared"] += 1
            assert index.rows == index.documents + index.dropped + index.empty + index.bad
            assert index.bad == 0 or bad_rows == "skip"
            assert index.bad <= 0.5 * index.rows
    assert min(ended.values()) > FILES / 20, ended  # both happen, so that neither is all there is


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=[]), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "type", "text", "tool_calls", "name"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)
COLUMNS = st.sampled_from(
    ["text", "messages", "conversations", "system", "instruction", "input", "output", "prompt", "completion"]
)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(rows=st.lists(st.dictionaries(COLUMNS, JSON, min_size=1, max_size=3), min_size=1, max_size=4))
def test_any_rows_of_json_give_no_untyped_error(tmp_path_factory: pytest.TempPathFactory, tokenizer, rows: list[dict]) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(files=[str(folder / "rows.jsonl")], sequence_length=32, bad_rows="skip", bad_rows_limit=1.0)
    problems, index = outcome(config, tokenizer, folder)
    assert problems or index.rows == len(rows) == index.documents + index.empty + index.bad


def test_a_tokenizer_is_trained_on_what_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_bytes(b"\n".join([b"{", *(json.dumps(CHAT).encode() for _ in range(3)), b"\xff"]))
    config = DataConfig(files=[str(path)], sequence_length=64)
    tokenizer = build_tokenizer(TokenizerConfig(), config, default_vocab_size=300)
    assert tokenizer.encode("fox")
    with pytest.raises(DataError) as caught:
        prepare(config, tokenizer, tmp_path / "stores", 0)
    assert [problem.partition(" ")[0] for problem in caught.value.problems] == ["data:", f"{path}:1:", f"{path}:5:"]


def test_texts_too_few_because_of_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": null}\n{"text": ""}\n')
    with pytest.raises(DataError, match=r"1 of 2 rows cannot be used.*\n.*:1: field 'text' holds null"):
        build_tokenizer(TokenizerConfig(vocab_size=300), DataConfig(files=[str(path)], sequence_length=64))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", b'[{"text": "x"},\n{"text": "y"},\n{"text" "z"}]', ":3: cannot be read as json from here on .Expecting ':'"),
        ("a.json", b'[{"text": "x"}\n{"text": "y"}]', ":2: .*a comma or ] is missing"),
        ("a.json", b'[{"text": "x"},\n', ":2: .*the ] at the end is missing"),
        ("a.json", b'[{"text": "x"}]\n]', ":2: .*more after the ]"),
        ("a.json", b'[\n{"text": "\xff"}]', ":2: .*not UTF-8"),
        ("a.json", b'{\n  "text": "x"\n}\n{\n  "text": 4\n}\n', ":4: field 'text' holds int"),
        ("a.json", b'[{"text": "x"},\n\n 7]', ":3: holds int, not an object with fields"),
        ("a.json", b'{"text": "x"}\n{"text": y}\n{"text": "z"}\n7\n', r"2 of 4 rows.*\n.*:2: .*\n.*:4: "),
        ("a.jsonl", b"PK\x03\x04....", "a zip archive: unpack it first"),
        ("a.jsonl", gzip.compress(b"{}", mtime=0), "gzip: unpack it first"),
        ("a.jsonl", "{}".encode("utf-16"), "UTF-16: write it as UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', ":2: cannot be read as json .not UTF-8: byte 11"),
        ("a.jsonl", b'\n\r\n{"text": "\\ud800"}\n', r":3: a text holds half of a character, the lone surrogate '\\ud800'"),
        ("a.jsonl", b'{"text": "x", "text": "y"}\n', ":1: a key of the row occurs twice .keys: text"),
        ("a.jsonl", deep(300).encode(), ":1: nested deeper than 64 levels"),
        ("a.jsonl", deep(100_000).encode(), ":1: cannot be read as json .nested too deeply"),
        ("a.jsonl", b'{"text": ' + b"9" * 5000 + b"}", ":1: cannot be read as json .Exceeds the limit"),
        ("a.txt", b"caf\xe9", "a.txt: not UTF-8 text .byte 3"),
    ],
)
def test_file_line_and_reason(tmp_path: Path, tokenizer, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        prepare(DataConfig(files=[str(tmp_path / name)], sequence_length=64), tokenizer, tmp_path / "stores", 0)


def test_marks_and_line_ends_that_do_no_harm(tmp_path: Path, tokenizer) -> None:
    texts = sentences(4)
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf" + b"\r\n\r\n".join(json.dumps({"text": text, "score": float("nan")}).encode() for text in texts)
    )
    (tmp_path / "b.json").write_bytes(b"\xef\xbb\xbf[" + json.dumps({"text": texts[0]}, indent=2).encode() + b"\n]\r\n")
    config = DataConfig(files=[str(path), str(tmp_path / "b.json")], sequence_length=64)
    store = prepare(config, tokenizer, tmp_path / "stores", 0)
    assert tokenizer.decode(store.tokens) == "".join(text + "<|eos|>" for text in [*texts, texts[0]])


def test_text_of_arrow_that_is_no_utf8(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    offsets = struct.pack("<3i", 0, 2, 4)
    words = pyarrow.Array.from_buffers(
        pyarrow.string(), 2, [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(b"ok\xff\xfe")]
    )
    (tmp_path / "set").mkdir()
    path = tmp_path / "set" / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": words}), path)
    with pytest.raises(DataError, match=r"train.parquet, after row 1: cannot be read as parquet .'utf-8'"):
        list(documents(DataConfig(files=[str(path)], sequence_length=64)))
    with pytest.raises(DataError, match=r"set, after row 1: cannot be read .'utf-8'"):
        list(documents(DataConfig(hub=str(path.parent), sequence_length=64), tmp_path / "cache"))

"""All bad rows in one report, or left out up to a share; what became of the data is counted."""

import json
import re

import pytest

from meshwright.data.data_config import DataConfig
from meshwright.data.preparation import prepare
from meshwright.data.rows.bad_rows import EXAMPLES, KINDS, BadRows
from meshwright.data.rows.corpora import documents
from meshwright.errors import DataError
from tests.harness import refuses

GOOD = {"messages": [{"role": "user", "content": "quick?"}, {"role": "assistant", "content": "fox"}]}
SILENT = {"messages": [{"role": "user", "content": "quick?"}, {"role": "assistant", "content": None}]}
LONG = {"messages": [{"role": "user", "content": "quick?"}, {"role": "assistant", "content": "fox " * 50}]}
CUT = {"messages": [{"role": "user", "content": "quick " * 50}, {"role": "assistant", "content": "fox"}]}


def config(*files, **changes):
    return DataConfig(**({"files": list(files), "sequence_length": 48} | changes))


@pytest.fixture
def spoiled(tmp_path):
    """Ten rows; lines 2 (of reading), 4 (of format), 7 (of the template's) and 10 (of length) are bad, 5 is empty."""
    lines = [json.dumps(GOOD)] * 11
    lines[1], lines[3], lines[4], lines[6], lines[9] = "{", '{"messages": 3}', "", json.dumps(SILENT), json.dumps(LONG)
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def problems(data, tokenizer, folder):
    with pytest.raises(DataError) as caught:
        prepare(data, tokenizer, folder, 0)
    return caught.value.problems


def test_all_kinds_of_bad_rows_are_reported_at_once(spoiled, tokenizer, tmp_path):
    head, *rows = problems(config(spoiled), tokenizer, tmp_path / "store")
    assert head.startswith("data: 4 of 10 rows cannot be used, and data.bad_rows is 'stop'; correct them, or set 'skip'")
    long, *rows = rows
    assert long.startswith(f"data: 1 of 10 rows is longer than data.sequence_length=48 (the longest, {spoiled}:10, has 124 ")
    expected = {
        2: "cannot be read as json (Expecting",
        4: "'messages' is not a list",
        7: "answer is null",
    }
    assert len(rows) == 3
    for row, (line, words) in zip(sorted(rows, key=lambda row: int(row.split(":")[1])), expected.items(), strict=True):
        assert row.startswith(f"{spoiled}:{line}: ")
        assert words in row


def test_bad_rows_of_several_files_are_reported_at_once(spoiled, tokenizer, tmp_path, jsonl):
    other = jsonl([GOOD, SILENT, GOOD], "other.jsonl")
    (tmp_path / "torn.parquet").write_text("no parquet")
    (tmp_path / "held.jsonl").write_text(json.dumps(GOOD) + "\n[]\n")
    data = config(spoiled, other, eval_files=[str(tmp_path / "held.jsonl")])
    found = problems(data, tokenizer, tmp_path / "store")
    assert found[0].startswith("data: 6 of 15 rows")
    assert f"{other}:2: message 2: the assistant's answer is null" in found
    assert found[-1] == f"{tmp_path / 'held.jsonl'}:2: holds list, not an object with fields"
    torn = problems(config(str(tmp_path / "torn.parquet"), spoiled), tokenizer, tmp_path / "store")
    assert "torn.parquet: cannot be read as parquet" in torn[0]
    assert any(f"{spoiled}:2:" in line for line in torn[1:])  # found while the other file was read all the same


def test_skipped_rows_are_counted_and_the_others_are_as_if_alone(spoiled, tokenizer, tmp_path, jsonl):
    store = prepare(config(spoiled, bad_rows="skip", bad_rows_limit=0.4), tokenizer, tmp_path / "store", 0)
    index = store.index
    assert (index.rows, index.documents, index.bad, index.dropped, index.truncated, index.empty) == (10, 6, 4, 0, 0, 0)
    assert [line.split(": ")[0] for line in index.bad_rows] == ["data", *(f"{spoiled}:{line}" for line in (2, 4, 7))]
    assert index.too_long == 1
    alone = prepare(config(jsonl([GOOD] * 6, "good.jsonl")), tokenizer, tmp_path / "store", 0)
    assert store.tokens.tolist() == alone.tokens.tolist()
    assert store.loss_mask.tolist() == alone.loss_mask.tolist()


def test_a_share_above_the_limit_stops_the_run(spoiled, tokenizer, tmp_path):
    head, *rows = problems(config(spoiled, bad_rows="skip", bad_rows_limit=0.39), tokenizer, tmp_path / "store")
    assert "4 of 10 rows cannot be used, a share of 0.4; data.bad_rows_limit=0.39 is the most" in head
    assert len(rows) == 4
    assert (
        "a share of 0.4; data.bad_rows_limit=0.1"
        in problems(config(spoiled, bad_rows="skip"), tokenizer, tmp_path / "store")[0]
    )


def test_tokens_that_are_there_are_judged_as_if_they_were_not(spoiled, tokenizer, tmp_path):
    """What bad rows may do is no part of what a store holds: a run that resumes finds it again, and judges it again."""
    lenient = config(spoiled, bad_rows="skip", bad_rows_limit=0.5)
    first = prepare(lenient, tokenizer, tmp_path / "store", 0)
    for strict in (config(spoiled), config(spoiled, bad_rows="skip", bad_rows_limit=0.2)):
        there = problems(strict, tokenizer, tmp_path / "store")
        assert there == problems(strict, tokenizer, tmp_path / "elsewhere")
    more = prepare(config(spoiled, bad_rows="skip", bad_rows_limit=0.9), tokenizer, tmp_path / "store", 0)
    assert more.directory == first.directory


def test_format_and_columns_are_part_of_what_a_store_is(tokenizer, tmp_path, jsonl):
    path = jsonl([{"prompt": "a", "completion": "fox", "other": "dog"}] * 3)
    found = {
        prepare(config(path, **changes), tokenizer, tmp_path / "store", 0).fingerprint
        for changes in ({}, {"columns": {"completion": "other"}}, {"format": "text", "columns": {"text": "other"}})
    }
    assert len(found) == 3


def test_the_list_is_short_and_can_be_printed(tokenizer, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(json.dumps({"a\n\ud800" + "b" * 5000: number}) for number in range(100)))
    found = problems(config(str(path)), tokenizer, tmp_path / "store")
    assert len(found) == 1 + EXAMPLES + 1  # one kind, whatever the names of the columns
    assert found[-1] == f"... and {100 - EXAMPLES} rows more with this"
    for line in found:
        assert line.encode()
        assert "\n" not in line
        assert len(line) < 500


def test_three_examples_of_each_kind_and_the_number_of_the_others(tokenizer, tmp_path, jsonl):
    parts = [{"role": "user", "content": [{"type": "image", "url": "x"}]}]
    wrong = [*[SILENT] * 5, *[{"messages": 3}] * 4, {"messages": [{"role": "user"}]}, {"messages": parts}]
    path = jsonl([row for number in range(5) for row in wrong[number::5]])
    head, *rows = problems(config(path), tokenizer, tmp_path / "store")
    assert head.startswith("data: 11 of 11 rows cannot be used")
    words = [row.split(": ", 1)[1] if row.startswith(path) else row for row in rows]
    assert sorted(words, key=words.index) == words  # those of a kind stand together
    for example in ("message 2: the assistant's answer is null", "field 'messages' is not a list of messages"):
        assert words.count(example) == 3
    more = [word for word in words if word.startswith("...")]
    assert more == ["... and 2 rows more with this", "... and 1 row more with this"]
    assert len(words) == 3 + 1 + 3 + 1 + 1 + 1


def test_many_kinds_are_not_all_listed():
    bad = BadRows()
    for number in range(2 * KINDS):
        for _ in range(2):
            bad.add(DataError(f"a.jsonl:{number}: wrong in way {'x' * number}"))
    assert len(bad.lines) == 2 * KINDS + 1
    assert bad.lines[-1] == f"... and {2 * KINDS} rows more with other problems"


def chat(words):
    return {"messages": [{"role": "user", "content": "quick?"}, {"role": "assistant", "content": "fox " * words}]}


def test_long_rows_are_one_line_that_says_what_would_keep_them(tokenizer, tmp_path, jsonl):
    rows = [chat(1 + number) for number in range(100)]
    path = jsonl(rows)
    (line,) = problems(config(path, sequence_length=64), tokenizer, tmp_path / "store")
    match = re.fullmatch(
        rf"data: (\d+) of 100 rows are longer than data.sequence_length=64 \(the longest, {path}:100, has (\d+) tokens\); "
        r"(\d+) would keep 95 % of the documents, (\d+) all; or set data.long_documents to 'truncate' or 'drop'",
        line,
    )
    count, longest, most, every = map(int, match.groups())
    assert longest == every
    for length, expected in ((64, count), (most - 1, 6), (most, 5), (every, 0)):
        wish = config(path, sequence_length=length, long_documents="drop")
        assert prepare(wish, tokenizer, tmp_path / "store", 0).index.dropped == expected
    few = jsonl([chat(1)] * 39 + [chat(99)], "few.jsonl")
    (line,) = problems(config(few, sequence_length=64), tokenizer, tmp_path / "store")
    assert f"data: 1 of 40 rows is longer than data.sequence_length=64 (the longest, {few}:40, has " in line
    assert "95 %" not in line  # as many are kept already
    head, line = problems(config(few, sequence_length=64, bad_rows="skip", bad_rows_limit=0.01), tokenizer, tmp_path / "store")
    assert head.startswith("data: 1 of 40 rows cannot be used, a share of 0.025; data.bad_rows_limit=0.01")
    assert "would keep all" in line
    texts = jsonl([{"text": "fox " * 99}], "texts.jsonl")
    (line,) = problems(config(texts, long_documents="error"), tokenizer, tmp_path / "store")
    assert line.endswith("'truncate' or 'drop', or 'split'")


def test_what_truncation_cuts_away_is_dropped_and_not_bad(tokenizer, tmp_path, jsonl):
    path = jsonl([GOOD, CUT, LONG])
    index = prepare(config(path, long_documents="truncate"), tokenizer, tmp_path / "store", 0).index
    assert (index.rows, index.documents, index.truncated, index.dropped, index.bad, index.empty) == (3, 2, 1, 1, 0, 0)
    index = prepare(config(path, long_documents="drop"), tokenizer, tmp_path / "store", 0).index
    assert (index.rows, index.documents, index.truncated, index.dropped, index.bad, index.empty) == (3, 1, 0, 2, 0, 0)


def test_rows_of_parquet_and_of_the_hub(tokenizer, tmp_path):
    from datasets import Dataset

    (tmp_path / "set").mkdir()
    Dataset.from_list([GOOD, SILENT, GOOD, {"messages": None}]).to_parquet(str(tmp_path / "set" / "train.parquet"))
    file = str(tmp_path / "set" / "train.parquet")
    for name, data in (
        (file, config(file)),
        (str(tmp_path / "set"), DataConfig(hub=str(tmp_path / "set"), sequence_length=48)),
    ):
        _, *rows = problems(data, tokenizer, tmp_path / "store")
        assert sorted(rows) == [
            f"{name}, row 2: message 2: the assistant's answer is null",
            f"{name}, row 4: field 'messages' is not a list of messages",
        ]


def test_nothing_but_bad_rows(tokenizer, tmp_path, jsonl):
    path = jsonl([SILENT, SILENT])
    data = config(path, bad_rows="skip", bad_rows_limit=1)
    with pytest.raises(DataError, match=r"no document is left to train on: 0 dropped .*, 2 bad rows"):
        prepare(data, tokenizer, tmp_path / "store", 0)
    with refuses(DataError, "data.empty"):
        list(documents(config(jsonl([{}]), bad_rows="skip", bad_rows_limit=1)))
    assert not list((tmp_path / "store").glob("*/index.json"))


def test_documents_alone_are_judged_at_their_end(jsonl):
    path = jsonl([GOOD, {"messages": "x"}, GOOD])
    stream = documents(config(path))
    assert [next(stream).source, next(stream).source] == [f"{path}:1", f"{path}:3"]
    with pytest.raises(DataError, match=f"1 of 3 rows.*\n{path}:2: "):
        next(stream)
    assert len(list(documents(config(path, max_documents=1)))) == 1  # no further than asked for

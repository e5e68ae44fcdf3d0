"""Chats as users have them: recognised by their columns or said by `data.format`, with columns of other names."""

import json

import pytest
from pydantic import ValidationError

from meshwright.data.data_config import DataConfig
from meshwright.data.preparation import prepare
from meshwright.data.rows.corpora import documents
from meshwright.data.tokenizer import DEFAULT_CHAT_TEMPLATE
from meshwright.errors import DataError


def config(path, **changes):
    return DataConfig(**({"files": [path], "sequence_length": 128} | changes))


def turns(*said):
    return [{"role": role, "content": content} for role, content in said]


EXCHANGE = turns(("user", "quick?"), ("assistant", "fox"))
BRIEFED = turns(("system", "be lazy"), ("user", "quick?"), ("assistant", "fox"))
FORMATS = {
    "messages": ({"messages": EXCHANGE}, EXCHANGE),
    "sharegpt": ({"conversations": [{"from": "human", "value": "quick?"}, {"from": "gpt", "value": "fox"}]}, EXCHANGE),
    "alpaca": ({"instruction": "quick?", "input": "", "output": "fox"}, EXCHANGE),
    "prompt_completion": ({"prompt": "quick?", "completion": "fox"}, EXCHANGE),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("said", [True, False], ids=["said", "recognised"])
def test_each_format(jsonl, tokenizer, tmp_path, name, said):
    row, expected = FORMATS[name]
    changes = {"format": name} if said else {}
    path = jsonl([row, row | {"id": 7}])  # other columns do no harm
    found = list(documents(config(path, **changes)))
    assert [document.messages for document in found] == [expected, expected]
    assert [document.source for document in found] == [f"{path}:1", f"{path}:2"]
    store = prepare(config(path, **changes), tokenizer, tmp_path / "store", 0)
    assert tokenizer.decode(store.tokens[store.loss_mask]) == "fox<|im_end|>" * 2


@pytest.mark.parametrize("name", ["sharegpt", "alpaca", "prompt_completion"])
def test_a_system_column(jsonl, name):
    row, _ = FORMATS[name]
    found = list(documents(config(jsonl([row | {"system": "be lazy"}, row | {"system": None}, row | {"system": ""}]))))
    assert [document.messages for document in found] == [BRIEFED, EXCHANGE, EXCHANGE]


def test_an_input_of_alpaca_follows_the_instruction(jsonl):
    row = {"instruction": "Translate.", "input": "renard", "output": "fox"}
    found = next(documents(config(jsonl([row]))))
    assert found.messages == turns(("user", "Translate.\n\nrenard"), ("assistant", "fox"))


def test_who_speaks_in_sharegpt(jsonl):
    names = ["system", "human", "user", "gpt", "assistant", "chatgpt", "bing", "tool", "observation"]
    row = {"conversations": [{"from": name, "value": name} for name in names]}
    found = next(documents(config(jsonl([row]))))
    roles = ["system", "user", "user", "assistant", "assistant", "assistant", "assistant", "tool", "tool"]
    assert found.messages == turns(*zip(roles, names, strict=True))
    with pytest.raises(DataError, match=r":1: message 1 is from 'narrator'; legal are system, human"):
        list(documents(config(jsonl([{"conversations": [{"from": "narrator", "value": "x"}]}]))))
    with pytest.raises(DataError, match=r":1: message 1 has no from; its keys are value"):
        list(documents(config(jsonl([{"conversations": [{"value": "x"}]}]))))


def test_conversations_whose_messages_have_roles(jsonl):
    assert next(documents(config(jsonl([{"conversations": EXCHANGE}])))).messages == EXCHANGE


def test_what_else_a_message_has_is_kept(jsonl):
    call = [{"function": {"name": "jump"}}]
    for row in (
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": call}]},
        {"conversations": [{"role": "assistant", "content": "a", "tool_calls": call}]},
        {"conversations": [{"from": "gpt", "value": "a", "tool_calls": call}]},
    ):
        assert next(documents(config(jsonl([row])))).messages == [{"role": "assistant", "content": "a", "tool_calls": call}]
    mapped = config(jsonl([{"messages": [{"who": "user", "role": "x", "says": "b", "content": "y"}]}]))
    mapped = mapped.model_copy(update={"columns": {"role": "who", "content": "says"}})
    assert next(documents(mapped)).messages == turns(("user", "b"))


def test_a_function_call_of_sharegpt(jsonl):
    call = json.dumps({"name": "jump", "arguments": {"over": "dog"}})
    row = {"conversations": [{"from": "human", "value": "go"}, {"from": "function_call", "value": call}]}
    (_, said) = next(documents(config(jsonl([row])))).messages
    expected = {"type": "function", "function": {"name": "jump", "arguments": {"over": "dog"}}}
    assert said == {"role": "assistant", "content": "", "tool_calls": [expected]}
    row["conversations"][1]["value"] = "jump(dog)"
    with pytest.raises(DataError, match=":1: message 2: a function_call is JSON with 'name' and 'arguments'"):
        list(documents(config(jsonl([row]))))


def test_content_in_parts(jsonl):
    parts = [{"type": "text", "text": "brown "}, {"type": "text", "text": "fox"}]
    assert next(documents(config(jsonl([{"messages": turns(("assistant", parts))}])))).messages[0]["content"] == "brown fox"
    for part, words in (
        ({"type": "image", "url": "x"}, "of type 'image'; only text"),
        (7, "is int"),
        ({"type": "text"}, "type 'text'"),
    ):
        with pytest.raises(DataError, match=f":1: message 1: a part of its content is .*{words.removeprefix('is ')}"):
            list(documents(config(jsonl([{"messages": turns(("user", [part]))}]))))


# ---- columns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"dialog": EXCHANGE}, {"messages": "dialog"}),
        ({"question": "quick?", "answer": "fox"}, {"prompt": "question", "completion": "answer"}),
        ({"task": "quick?", "context": "", "answer": "fox"}, {"instruction": "task", "input": "context", "output": "answer"}),
        ({"instruction": "quick?", "answer": "fox"}, {"output": "answer"}),
        ({"turns": FORMATS["sharegpt"][0]["conversations"]}, {"conversations": "turns"}),
        (
            {"turns": [{"who": "human", "says": "quick?"}, {"who": "gpt", "says": "fox"}]},
            {"conversations": "turns", "from": "who", "value": "says"},
        ),
        (
            {"messages": [{"who": "user", "text": "quick?"}, {"who": "assistant", "text": "fox"}]},
            {"role": "who", "content": "text"},
        ),
        ({"text": "also a text", "messages": EXCHANGE}, {"messages": "messages"}),
    ],
)
def test_columns_of_other_names(jsonl, row, columns):
    assert next(documents(config(jsonl([row]), columns=columns))).messages == EXCHANGE


def test_texts_in_a_column_of_another_name(jsonl):
    for changes in ({"columns": {"text": "body"}}, {"text_field": "body"}):
        assert next(documents(config(jsonl([{"body": "fox"}]), **changes))).text == "fox"


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"messages": "dialogue"}, "no field 'dialogue'; its fields are dialog, n; set data"),
        ({"completion": "answer", "prompt": "n"}, "no field 'answer'; its fields are dialog, n|holds int"),
    ],
)
def test_a_column_that_is_not_there(jsonl, columns, words):
    with pytest.raises(DataError, match=words):
        list(documents(config(jsonl([{"dialog": EXCHANGE, "n": 1}]), columns=columns)))


def test_an_optional_column_that_no_row_has(jsonl):
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b", "brief": "c"}]
    wish = {"columns": {"system": "brief"}, "format": "prompt_completion"}
    assert len(list(documents(config(jsonl(rows), **wish)))) == 2
    both = [jsonl(rows[:1], "a.jsonl"), jsonl(rows[1:], "b.jsonl")]
    assert len(list(documents(config("", files=both, **wish)))) == 2
    with pytest.raises(DataError, match=r"no column 'brief' .for 'system'.; its columns are prompt, completion"):
        list(documents(config(jsonl(rows[:1]), **wish)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "openai"}, "'text', 'messages', 'sharegpt', 'alpaca', 'prompt_completion', 'tokens', 'preference'"),
        ({"columns": {"answer": "x"}}, "no format has all of answer; legal together: text .text.; messages, role, content"),
        ({"columns": {"prompt": "x", "output": "y"}}, "no format has all of prompt, output"),
        (
            {"format": "alpaca", "columns": {"prompt": "x"}},
            r"no format has all of prompt; legal together: instruction, output, input",
        ),
        ({"format": "text", "kind": "chat"}, "data.format='text' and data.kind='chat' exclude each other"),
        ({"format": "alpaca", "kind": "text"}, "data.format='alpaca' and data.kind='text' exclude each other"),
        ({"format": "alpaca", "long_documents": "split"}, "data.long_documents='split': a chat cannot be split"),
        ({"columns": {"messages": "x"}, "messages_field": "y"}, "data.messages_field and data.columns.messages say the same"),
        ({"bad_rows_limit": 0.5}, "data.bad_rows_limit=0.5 needs data.bad_rows='skip'"),
        ({"bad_rows": "skip", "bad_rows_limit": 1.5}, "less than or equal to 1"),
        ({"files": [], "corpus": "python-stdlib", "format": "alpaca"}, "corpus 'python-stdlib' has no rows"),
    ],
)
def test_contradictions(changes, words):
    with pytest.raises(ValidationError, match=words):
        config("a.jsonl", **changes)


def test_a_text_file_is_no_chat(tmp_path):
    (tmp_path / "a.txt").write_text("fox")
    wish = config(str(tmp_path / "a.txt"), format="sharegpt")
    assert "is text; chats come from .jsonl" in wish.problems()[0]
    with pytest.raises(DataError, match=r"data.format='sharegpt'.* is text"):
        list(documents(wish))


def test_each_file_has_its_format_and_one_odd_row_is_not_all(jsonl):
    first = jsonl([{"odd": 1}, *[FORMATS["alpaca"][0]] * 3], "a.jsonl")
    second = jsonl([FORMATS["sharegpt"][0]], "b.jsonl")
    found = list(documents(config(first, files=[first, second], bad_rows="skip", bad_rows_limit=0.2)))
    assert [document.messages for document in found] == [EXCHANGE] * 4


# ---- answers that would be lost --------------------------------------------------------------------------------------

CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "jump", "arguments": {}}}],
}
WRITES_CALLS = DEFAULT_CHAT_TEMPLATE.replace(
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}",
    "{{ message.get('content', '') }}{% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    "<|im_end|>{% endgeneration %}",
)
LENIENT = DEFAULT_CHAT_TEMPLATE.replace("message['content']", "(message.content or '')")
SKIPS = DEFAULT_CHAT_TEMPLATE.replace("for message in messages", "for message in messages if 'seven' not in message.content")
TRIMS = DEFAULT_CHAT_TEMPLATE.replace("message['content'] +", "message.content.split('</think>')[-1] | trim | upper ~")


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize(
    ("template", "answer", "words"),
    [
        (LENIENT, {"content": None}, ":2: message 2: the assistant's answer is null"),
        (LENIENT, {}, ":2: message 2: the assistant's answer is null"),
        (LENIENT, {"content": " \n"}, ":2: message 2: the assistant's answer is empty"),
        (LENIENT, CALL, ":2: message 2: the chat template leaves out the assistant's tool call 1, so it would not be learned"),
        (
            LENIENT,
            CALL | {"content": "jump"},
            "leaves out the assistant's tool call 1",
        ),
        (WRITES_CALLS, {"content": "x", "function_call": {"name": "jump"}}, "leaves out the assistant's tool call 1"),
        (
            LENIENT,
            {"content": None, "tool_calls": ["jump"]},
            "leaves out the assistant's tool call 1, which is str and no object",
        ),
    ],
)
def test_answers_that_are_null_or_a_call(jsonl, tokenizer, tmp_path, template, answer, words, marked):
    tokenizer = with_template(tokenizer, template, marked)
    rows = [{"messages": EXCHANGE}, {"messages": [EXCHANGE[0], {"role": "assistant"} | answer]}]
    with pytest.raises(DataError, match=words):
        prepare(config(jsonl(rows)), tokenizer, tmp_path / "store", 0)


def with_template(tokenizer, template, marked=True):
    import copy

    if not marked:
        template = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


@pytest.mark.parametrize("marked", [True, False])
def test_calls_that_the_template_writes_are_learned(jsonl, tokenizer, tmp_path, marked):
    tokenizer = with_template(tokenizer, WRITES_CALLS, marked)
    store = prepare(config(jsonl([{"messages": [EXCHANGE[0], CALL]}])), tokenizer, tmp_path / "store", 0)
    assert tokenizer.decode(store.tokens[store.loss_mask]) == "jump<|im_end|>"


def test_a_turn_that_the_template_skips(jsonl, tokenizer, tmp_path):
    tokenizer = with_template(tokenizer, SKIPS)
    rows = [{"messages": EXCHANGE}, {"messages": [*turns(("user", "a"), ("assistant", "seven")), *EXCHANGE]}]
    with pytest.raises(DataError, match=":2: message 2: the chat template leaves out the assistant's answer"):
        prepare(config(jsonl(rows)), tokenizer, tmp_path / "store", 0)


@pytest.mark.parametrize("marked", [True, False])
def test_a_template_that_trims_leaves_nothing_out(jsonl, tokenizer, tmp_path, marked):
    tokenizer = with_template(tokenizer, TRIMS, marked)
    rows = [{"messages": turns(("user", "a"), ("assistant", " <think>so</think> fox \n"))}]
    store = prepare(config(jsonl(rows)), tokenizer, tmp_path / "store", 0)
    assert tokenizer.decode(store.tokens[store.loss_mask]) == "FOX<|im_end|>"


def test_roles(jsonl, tokenizer, tmp_path):
    rows = [{"messages": [{"role": "robot", "content": "x"}, *EXCHANGE]}]
    with pytest.raises(DataError, match=r":1: message 1 has the role 'robot'; legal are system, developer, user"):
        prepare(config(jsonl(rows)), tokenizer, tmp_path / "store", 0)
    named = with_template(tokenizer, DEFAULT_CHAT_TEMPLATE + "{# 'robot' #}")
    assert prepare(config(jsonl(rows)), named, tmp_path / "store", 0).index.documents == 1
    with pytest.raises(DataError, match=":1: message 1, of the user, has no content"):
        prepare(config(jsonl([{"messages": [{"role": "user"}, EXCHANGE[1]]}])), tokenizer, tmp_path / "store", 0)
    with pytest.raises(DataError, match=":1: message 1 has a role that is int, not text"):
        prepare(config(jsonl([{"messages": [{"role": 3}]}])), tokenizer, tmp_path / "store", 0)


# ---- folders of save_to_disk -----------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path):
    """A Dataset of two rows, and a DatasetDict with another split."""
    from datasets import Dataset, DatasetDict

    one = Dataset.from_list([{"messages": EXCHANGE}, {"messages": BRIEFED}])
    one.save_to_disk(str(tmp_path / "one"))
    texts = DatasetDict({"train": Dataset.from_list([{"text": "fox"}] * 3), "test": Dataset.from_list([{"text": "dog"}])})
    texts.with_format("numpy").save_to_disk(str(tmp_path / "several"))
    return tmp_path / "one", tmp_path / "several"


def test_a_folder_of_save_to_disk(folders, tokenizer, tmp_path):
    one, several = map(str, folders)
    for data in (config(one), config("", files=[], hub=one)):
        found = list(documents(data, tmp_path / "cache"))
        assert [document.messages for document in found] == [EXCHANGE, BRIEFED]
        assert found[1].source == f"{one}, row 2"
        assert data.problems() == []
        assert prepare(data, tokenizer, tmp_path / "store", 0).index.documents == 2
    for changes, expected in (({}, ["fox"] * 3), ({"hub_split": "test"}, ["dog"])):
        for data in (config(several, **changes), config("", files=[], hub=several, **changes)):
            assert [document.text for document in documents(data, tmp_path / "cache")] == expected
            assert data.problems() == []
    store = prepare(config(several, eval_files=[f"{several}/test"]), tokenizer, tmp_path / "store", 0)
    assert (store.index.train_documents, store.index.eval_documents) == (3, 1)


def test_other_contents_of_such_a_folder_are_other_tokens(folders, tokenizer, tmp_path):
    from datasets import Dataset

    _, several = folders
    first = prepare(config(str(several)), tokenizer, tmp_path / "store", 0)
    several.rename(tmp_path / "moved")
    assert prepare(config(str(tmp_path / "moved")), tokenizer, tmp_path / "store", 0).directory == first.directory
    assert prepare(config(str(tmp_path / "moved"), hub_split="test"), tokenizer, tmp_path / "store", 0).index.documents == 1
    Dataset.from_list([{"text": "box"}] * 3).save_to_disk(str(tmp_path / "moved" / "train"))
    second = prepare(config(str(tmp_path / "moved")), tokenizer, tmp_path / "store", 0)
    assert second.directory != first.directory


def test_such_folders_are_refused_with_what_is_legal(folders, tmp_path):
    one, several = folders
    with pytest.raises(DataError, match=r"several: has no split 'dev'; its splits are train, test; set data.hub_split"):
        list(documents(config(str(several), hub_split="dev")))
    assert "has no folder of a DatasetDict" in config(str(one), hub_split="test").problems()[0]
    assert f"give one of them, such as {several}/test" in config(str(one), eval_files=[str(several)]).problems()[0]
    with pytest.raises(DataError, match=r"data.hub_config='x': .* is of save_to_disk"):
        list(documents(config("", files=[], hub=str(one), hub_config="x")))
    (one / "state.json").write_text("{")
    with pytest.raises(DataError, match="one: cannot be read as a folder of save_to_disk"):
        list(documents(config(str(one))))
    (one / "state.json").unlink()
    assert "is a directory, and not one of save_to_disk; give files" in config(str(one)).problems()[0]

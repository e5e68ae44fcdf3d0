"""Tools, documents and other arguments of a template, answers that are not learned, and what nothing reads."""

import copy
import inspect
import json
import re

import pytest

from meshwright.data.chat import encode_chat
from meshwright.data.data_config import DataConfig
from meshwright.data.preparation import prepare
from meshwright.data.rows.columns import EXTRAS
from meshwright.data.rows.corpora import documents
from meshwright.data.rows.extras import template_arguments
from meshwright.data.rows.formats import RowReader
from meshwright.data.rows.row_files import Row
from meshwright.data.tokenizer import DEFAULT_CHAT_TEMPLATE
from meshwright.errors import DataError

TOOL = {"type": "function", "function": {"name": "jump", "parameters": {"type": "object", "properties": {"over": {}}}}}
CALL = {"type": "function", "id": "1", "function": {"name": "jump", "arguments": {"over": "dog"}}}
ASKED, SAID = {"role": "user", "content": "quick?"}, {"role": "assistant", "content": "fox"}
CALLS = [
    ASKED,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "lazy"},
    SAID,
]
WRITES = (
    "{% if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for page in documents or [] %}{{ '<|im_start|>page\n' + page.text + '<|im_end|>\n' }}{% endfor %}"
    "{% if brief is defined %}{{ '<|im_start|>brief ' ~ brief ~ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name ~ (call.function.arguments | tojson) }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def unmarked(template):
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def config(path, **changes):
    return DataConfig(**({"files": [path], "sequence_length": 512} | changes))


@pytest.fixture
def using(tokenizer):
    def use(template):
        changed = copy.deepcopy(tokenizer)
        changed.chat_template = template
        return changed

    return use


@pytest.fixture(params=["marked", "unmarked"])
def writer(request, using):
    """A tokenizer whose template writes tools, documents and calls."""
    return using(WRITES if request.param == "marked" else unmarked(WRITES))


def learned(store, tokenizer):
    return tokenizer.decode(store.tokens[store.loss_mask])


# ---- tools and documents ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_text", [False, True], ids=["objects", "json"])
def test_the_template_gets_what_a_row_gives(jsonl, writer, tmp_path, as_text):
    form = json.dumps if as_text else lambda value: value
    pages = [{"title": "a", "text": "brown"}]
    rows = [
        {"messages": CALLS, "tools": form([TOOL])},
        {"messages": [ASKED, SAID], "documents": form(pages), "chat_template_kwargs": form({"brief": 7})},
        {"messages": [ASKED, SAID], "tools": None, "documents": form([])},
    ]
    store = prepare(config(jsonl(rows)), writer, tmp_path / "store", 0)
    expected = [
        writer.apply_chat_template(CALLS, tools=[TOOL], tokenize=False),
        writer.apply_chat_template([ASKED, SAID], documents=pages, brief=7, tokenize=False),
        writer.apply_chat_template([ASKED, SAID], tokenize=False),
    ]
    assert writer.decode(store.tokens) == "".join(expected)
    assert '"jump"' in expected[0]
    assert learned(store, writer) == 'jump{"over": "dog"}<|im_end|>fox<|im_end|>fox<|im_end|>fox<|im_end|>'
    assert store.index.given == {"brief": 1, "documents": 1, "tools": 1}
    assert store.index.unwritten == {}
    assert store.index.unread_columns == []
    assert store.index.unread_keys == ["tool_call_id"]  # the template writes no numbers of calls


@pytest.mark.parametrize("empty", ["", " ", "{}", "[]", "null", '""', {}, [], None])
def test_what_is_empty_is_none(empty):
    columns = dict.fromkeys(EXTRAS, "x")
    assert template_arguments(dict.fromkeys(EXTRAS, empty), columns, "a.jsonl:1") == {}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tools": [TOOL, "search"]}, "field 'tools': item 2 of its list is 'search', no object; data.columns.tools=null"),
        ({"documents": "a text"}, "field 'documents' holds str, no list of objects or its JSON; data.columns.documents=null"),
        ({"chat_template_kwargs": "x"}, "holds str, no object or its JSON; data.columns.chat_template_kwargs=null leaves"),
    ],
)
def test_a_column_for_another_purpose_can_be_left_out(jsonl, values, words):
    path = jsonl([{"messages": [ASKED, SAID], **values}])
    with pytest.raises(DataError, match=re.escape(words)):
        RowReader(config(path), {}).document(Row({"messages": [ASKED, SAID], **values}, "a.jsonl:1"))
    unread = {}
    reader = RowReader(config(path, columns=dict.fromkeys(values)), {}, unread)
    found = reader.document(Row({"messages": [ASKED, SAID], **values}, "a.jsonl:1"))
    assert (found.messages, found.arguments, unread) == ([ASKED, SAID], {}, dict.fromkeys(values))
    assert len(list(documents(config(path, columns=dict.fromkeys(values))))) == 1


def test_a_system_column_can_be_left_out():
    row = Row({"prompt": "quick?", "completion": "fox", "system": ["a", "list"]}, "a.jsonl:1")
    assert RowReader(config("a.jsonl", columns={"system": None}), {}).document(row).messages == [ASKED, SAID]


def test_no_argument_of_transformers_is_for_a_row_to_set():
    from transformers import PreTrainedTokenizerBase
    from transformers.utils import chat_template_utils

    for function in (PreTrainedTokenizerBase.apply_chat_template, chat_template_utils.render_jinja_template):
        for name in inspect.signature(function).parameters.keys() - {"kwargs"}:
            with pytest.raises(DataError, match=f"sets '{name}'; legal are names that the template reads"):
                template_arguments({"chat_template_kwargs": {name: 1}}, {"chat_template_kwargs": "x"}, "a.jsonl:1")


def test_columns_of_other_names_and_each_format_of_chats(jsonl, writer, tmp_path):
    rows = [{"instruction": "quick?", "output": "fox", "functions": [TOOL]}]
    store = prepare(config(jsonl(rows), columns={"tools": "functions"}), writer, tmp_path / "store", 0)
    assert "jump" in writer.decode(store.tokens)
    with pytest.raises(DataError, match=r"no column 'functoins' .for 'tools'.; its columns are instruction, output"):
        list(documents(config(jsonl(rows), columns={"tools": "functoins"})))
    rows = [{"conversations": [{"from": "human", "value": "quick?"}, {"from": "gpt", "value": "fox"}], "tools": [TOOL]}]
    assert prepare(config(jsonl(rows)), writer, tmp_path / "store", 0).index.given == {"tools": 1}


def test_a_template_of_its_own_for_tools(jsonl, tokenizer, tmp_path):
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = {"default": DEFAULT_CHAT_TEMPLATE, "tool_use": WRITES}
    rows = [{"messages": [ASKED, SAID]}, {"messages": [ASKED, SAID], "tools": [TOOL]}]
    store = prepare(config(jsonl(rows)), changed, tmp_path / "store", 0)
    assert changed.decode(store.tokens).count("<|im_start|>tools") == 1
    assert store.index.unwritten == {}


def test_what_the_template_does_not_write_is_counted(jsonl, tokenizer, tmp_path):
    rows = [{"messages": [ASKED, SAID], "tools": [TOOL], "chat_template_kwargs": {"think": False}}] * 3
    index = prepare(config(jsonl(rows)), tokenizer, tmp_path / "store", 0).index
    assert index.given == index.unwritten == {"think": 3, "tools": 3}


def test_nulls_that_arrow_adds_to_tools_and_calls_are_not_written(writer, tmp_path):
    from datasets import Dataset

    other = copy.deepcopy(CALLS)
    other[1]["tool_calls"][0]["function"]["arguments"] = {"under": "fox"}
    tools = [
        {"function": {"name": "a", "parameters": {"x": "t"}}},
        {"function": {"name": "b", "parameters": {"y": "t"}}},
    ]
    rows = [{"messages": CALLS, "tools": tools[:1]}, {"messages": other, "tools": tools[1:]}]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    store = prepare(config(str(tmp_path / "rows.parquet")), writer, tmp_path / "store", 0)
    assert "null" not in writer.decode(store.tokens)
    assert learned(store, writer).startswith('jump{"over": "dog"}<|im_end|>fox<|im_end|>jump{"under": "fox"}')


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tools": "jump"}, "field 'tools' holds str, no list of objects or its JSON"),
        ({"tools": {"name": "jump"}}, "field 'tools' holds dict"),
        ({"tools": ["jump"]}, "field 'tools': item 1 of its list is 'jump', no object"),
        ({"documents": 3}, "field 'documents' holds int"),
        ({"chat_template_kwargs": [1]}, "field 'chat_template_kwargs' holds list, no object"),
        ({"chat_template_kwargs": {"tokenize": True}}, "'chat_template_kwargs' sets 'tokenize'; legal are names that the"),
        ({"chat_template_kwargs": {"a b": True}}, "sets 'a b'"),
        ({"tools": [{"name": "\ud800"}]}, "half of a character"),
        ({"tools": '[{"name": "\\ud800"}]'}, "half of a character"),
    ],
)
def test_arguments_that_are_none(jsonl, given, words):
    with pytest.raises(DataError, match=f":1: .*{words}"):
        list(documents(config(jsonl([{"messages": [ASKED, SAID], **given}]))))


# ---- answers that are not learned ------------------------------------------------------------------------------------

SAYS = [ASKED, SAID, {"role": "user", "content": "and?"}, {"role": "assistant", "content": "dog"}]


@pytest.mark.parametrize("key", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"weight": False, "train": 0}])
def test_an_answer_of_weight_0_is_read_and_not_learned(jsonl, writer, tmp_path, key):
    rows = [{"messages": [ASKED, SAID | key, *SAYS[2:]]}, {"messages": [*SAYS[:3], SAYS[3] | key]}, {"messages": SAYS}]
    store = prepare(config(jsonl(rows)), writer, tmp_path / "store", 0)
    assert writer.decode(store.tokens) == writer.apply_chat_template(SAYS, tokenize=False) * 3
    assert learned(store, writer) == "dog<|im_end|>" + "fox<|im_end|>" + "fox<|im_end|>dog<|im_end|>"
    assert store.index.unlearned == 2
    assert store.index.unread_keys == []


def test_weight_1_and_the_weights_of_others_change_nothing(jsonl, writer, tmp_path):
    rows = [{"messages": [ASKED | {"weight": 0}, SAID | {"weight": 1}, SAYS[2] | {"train": 1}, SAYS[3] | {"train": True}]}]
    store = prepare(config(jsonl(rows)), writer, tmp_path / "store", 0)
    assert learned(store, writer) == "fox<|im_end|>dog<|im_end|>"
    assert store.index.unlearned == 0


def test_weights_in_sharegpt_and_under_another_name(jsonl, tokenizer, tmp_path):
    turns = [
        {"from": "human", "value": "a"},
        {"from": "gpt", "value": "fox", "loss": 0},
        {"from": "human", "value": "b"},
        {"from": "gpt", "value": "dog"},
    ]
    wish = config(jsonl([{"conversations": turns}]), columns={"weight": "loss"}, format="sharegpt")
    assert learned(prepare(wish, tokenizer, tmp_path / "store", 0), tokenizer) == "dog<|im_end|>"


def test_a_chat_without_an_answer_to_learn_is_empty_and_not_bad(jsonl, writer, tmp_path):
    silent = {"messages": [ASKED, {"role": "assistant", "content": "", "weight": 0}]}
    store = prepare(config(jsonl([silent, {"messages": [ASKED, SAID]}])), writer, tmp_path / "store", 0)
    assert (store.index.documents, store.index.empty, store.index.bad) == (1, 1, 0)


def test_calls_and_answers_in_several_marks_are_told_apart(using):
    """A turn of weight 0 whose words are marked in two pieces, between turns that are learned."""
    pieces = WRITES.replace("{{ message.content or '' }}", "{{ message.content or '' }}{% endgeneration %}|{% generation %}")
    tokenizer = using(pieces)
    chat = [ASKED, CALLS[1], CALLS[2], SAID | {"weight": 0}, SAYS[2], SAYS[3]]
    ids, mask = encode_chat(tokenizer, chat)
    said = tokenizer.decode([i for i, bit in zip(ids, mask, strict=True) if bit])
    assert said == 'jump{"over": "dog"}<|im_end|>dog<|im_end|>'


def test_a_template_that_marks_the_last_answer_alone_does_not_lose_it(using):
    last = WRITES.replace("{% if message['role'] == 'assistant' %}", "{% if message['role'] == 'assistant' and loop.last %}")
    with pytest.raises(DataError, match="message 2 has weight 0, but the chat template marks"):
        encode_chat(using(last), [ASKED, SAID | {"weight": 0}, *SAYS[2:]])


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ({"weight": 0.5}, "has weight=0.5; legal are 0 or false .it is not learned. and 1 or true"),
        ({"weight": "0"}, "has weight='0'"),
        ({"train": 2}, "has train=2"),
        ({"weight": float("nan")}, "has weight=nan"),
        ({"weight": 1, "train": False}, "has weight=True and train=False; remove one"),
    ],
)
def test_other_weights_are_refused(jsonl, key, words):
    with pytest.raises(DataError, match=f":1: message 2 {words}"):
        list(documents(config(jsonl([{"messages": [ASKED, SAID | key]}]))))


# ---- what nothing reads ----------------------------------------------------------------------------------------------


def test_columns_and_keys_that_nothing_reads_are_listed(jsonl, using, tmp_path):
    tokenizer = using(WRITES.replace("message.content or ''", "(message.reasoning_content or '') ~ message.content"))
    first = {"messages": [ASKED | {"name": "me"}, SAID | {"reasoning_content": "so"}], "id": 7, "score": 0.5}
    rows = [first, {"messages": [ASKED, SAID | {"mood": "calm"}], "id": 8, "a b": 1}]
    index = prepare(config(jsonl(rows)), tokenizer, tmp_path / "store", 0).index
    assert index.unread_columns == ["id", "score", "'a b'"]
    assert index.unread_keys == ["mood", "name"]
    texts = prepare(config(jsonl([{"text": "fox", "url": "x"}], "t.jsonl")), tokenizer, tmp_path / "store", 0).index
    assert texts.unread_columns == ["url"]

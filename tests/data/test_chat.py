"""Loss on the assistant's words, whatever the template."""

import pytest

from meshwright.data.chat import encode_chat
from meshwright.data.tokenizer import DEFAULT_CHAT_TEMPLATE
from meshwright.errors import DataError

CHAT = [
    {"role": "system", "content": "the lazy dog"},
    {"role": "user", "content": "quick fox?"},
    {"role": "assistant", "content": "brown fox"},
    {"role": "user", "content": "wizards"},
    {"role": "assistant", "content": "\nseven, quiet"},
]
UNMARKED = DEFAULT_CHAT_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.fixture
def with_template(tokenizer):
    before = tokenizer.chat_template

    def use(template):
        tokenizer.chat_template = template
        return tokenizer

    yield use
    tokenizer.chat_template = before


def learned(tokenizer, messages=CHAT):
    ids, mask = encode_chat(tokenizer, messages)
    assert len(ids) == len(mask)
    return tokenizer.decode([i for i, bit in zip(ids, mask, strict=True) if bit])


@pytest.mark.parametrize("template", [DEFAULT_CHAT_TEMPLATE, UNMARKED], ids=["marked", "unmarked"])
def test_loss_is_on_the_replies_and_their_ends(with_template, template):
    tokenizer = with_template(template)
    assert learned(tokenizer) == "brown fox<|im_end|>\nseven, quiet<|im_end|>"
    ids, _ = encode_chat(tokenizer, CHAT)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(CHAT, tokenize=False)


def test_both_ways_agree(with_template):
    assert encode_chat(with_template(DEFAULT_CHAT_TEMPLATE), CHAT) == encode_chat(with_template(UNMARKED), CHAT)


def test_a_plain_template_without_special_tokens(with_template):
    tokenizer = with_template(
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    assert "brown fox\n\n" in learned(tokenizer)
    assert "wizards" not in learned(tokenizer)


def test_a_template_that_rewrites_earlier_turns(with_template):
    tokenizer = with_template(
        "{% for m in messages %}{{ m['role'] + ':' }}"
        "{% if loop.last and m['role'] == 'assistant' %}{{ '<think>' }}{% endif %}"
        "{{ m['content'] + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    with pytest.raises(DataError, match=r"row 7: .*turn 3 differently .*chat_template"):
        encode_chat(tokenizer, CHAT, "data.jsonl, row 7")


def test_no_template(with_template):
    with pytest.raises(DataError, match=r"no chat template; set tokenizer\.chat_template"):
        encode_chat(with_template(None), CHAT)


@pytest.mark.parametrize("messages", [[], CHAT[:2]])
def test_no_turn_of_the_assistant(tokenizer, messages):
    with pytest.raises(DataError, match="row 3: no turn of the assistant"):
        encode_chat(tokenizer, messages, "row 3")


def test_an_assistant_who_begins(with_template):
    messages = [{"role": "assistant", "content": "fox"}, {"role": "user", "content": "dog"}]
    with pytest.raises(DataError, match="begins with the assistant"):
        encode_chat(with_template(UNMARKED), messages)
    assert learned(with_template(DEFAULT_CHAT_TEMPLATE), messages) == "fox<|im_end|>"


def test_a_template_that_refuses(with_template):
    with pytest.raises(DataError, match="refuses the messages: roles must alternate"):
        encode_chat(with_template("{{ raise_exception('roles must alternate') }}"), CHAT)
    turns = [{"role": "user", "content": 3}, {"role": "assistant", "content": "fox"}]
    with pytest.raises(DataError, match="row 2: the chat template refuses"):
        encode_chat(with_template(DEFAULT_CHAT_TEMPLATE), turns, "row 2")


def test_marks_around_nothing(with_template):
    template = "{% for m in messages %}{{ m['content'] }}{% generation %}{% endgeneration %}{% endfor %}"
    with pytest.raises(DataError, match="gives the assistant's turns no token"):
        encode_chat(with_template(template), CHAT)

"""Training and loading tokenizers."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.data_config import DataConfig
from meshwright.data.tokenizer import build_tokenizer, load_tokenizer, tokenizer_state, train_tokenizer
from meshwright.data.tokenizer_config import TokenizerConfig
from meshwright.errors import ConfigError, DataError
from tests.harness import refuses

from .conftest import sentences


def test_training_is_deterministic_across_processes(tokenizer):
    code = (
        "import json, sys\n"
        "from meshwright.data.tokenizer import train_tokenizer\n"
        "print(train_tokenizer(json.load(sys.stdin), 300).backend_tokenizer.to_str())\n"
    )
    texts = json.dumps(sentences(200))
    other = subprocess.run([sys.executable, "-c", code], input=texts, check=True, timeout=600, capture_output=True, text=True)
    assert other.stdout.strip() == tokenizer.backend_tokenizer.to_str()


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_round_trips(tokenizer, text):
    if any(token in text for token in tokenizer.all_special_tokens):
        return
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_save_and_load(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    assert tokenizer_state(again) == tokenizer_state(tokenizer)
    assert len(again) == 300
    assert (again.pad_token, again.bos_token, again.eos_token) == ("<|pad|>", "<|bos|>", "<|eos|>")
    assert again("a quick  brown\n fox")["input_ids"] == tokenizer("a quick  brown\n fox")["input_ids"]


def test_state_ignores_padding_and_truncation(tokenizer):
    before = tokenizer_state(tokenizer)
    tokenizer(["a b c", "d"], padding=True, truncation=True, max_length=2)
    assert tokenizer_state(tokenizer) == before


def test_bad_sizes():
    with pytest.raises(ConfigError, match="vocab_size=100: must be at least 261"):
        train_tokenizer(sentences(5), 100)
    with refuses(DataError, "tokenizer.vocab_size"):
        train_tokenizer(["abc"], 5000)
    assert len(train_tokenizer(["abab"], 5000, at_most=True)) < 300


@pytest.mark.parametrize("files", [{}, {"config.json": json.dumps({"model_type": "llama"})}, {"tokenizer.json": "{"}])
def test_a_directory_without_tokenizer(tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with refuses(ConfigError, "tokenizer.path"):
        load_tokenizer(tmp_path)


def test_a_missing_directory():
    with pytest.raises(ConfigError, match="no such directory"):
        load_tokenizer("/nowhere/at/all")


def test_chat_template_from_string_or_file(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (tmp_path / "mine.jinja").write_text(template)
    assert load_tokenizer(tmp_path, chat_template=template).chat_template == template
    assert load_tokenizer(tmp_path, chat_template=str(tmp_path / "mine.jinja")).chat_template == template
    with pytest.raises(ConfigError, match=r"chat_template='gone.jinja' is neither"):
        load_tokenizer(tmp_path, chat_template="gone.jinja")


def test_which_tokenizer_is_built(tokenizer, tmp_path):
    (tmp_path / "corpus.txt").write_text("\n".join(sentences(100)))
    data = DataConfig(files=[str(tmp_path / "corpus.txt")], sequence_length=8)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer.path .* or tokenizer.vocab_size"):
        build_tokenizer(TokenizerConfig(), data, model)
    assert len(build_tokenizer(TokenizerConfig(), data, model, default_vocab_size=270)) == 270
    tokenizer.save_pretrained(model)
    assert len(build_tokenizer(TokenizerConfig(), data, model, default_vocab_size=270)) == 300
    assert len(build_tokenizer(TokenizerConfig(vocab_size=280), data, model)) == 280
    assert len(build_tokenizer(TokenizerConfig(path=str(model)), data)) == 300

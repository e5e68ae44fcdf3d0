"""Loads a tokenizer, or trains one on the corpus of the run."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import ConfigError, DataError
from meshwright.paths import no_directory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    from meshwright.data.data_config import DataConfig
from meshwright.data.tokenizer_config import TokenizerConfig

__all__ = ["DEFAULT_CHAT_TEMPLATE", "build_tokenizer", "load_tokenizer", "train_tokenizer"]

PAD, BOS, EOS, TURN_START, TURN_END = "<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [PAD, BOS, EOS, TURN_START, TURN_END]

# ChatML. The generation block marks what the assistant must learn to say: the content and the end of the turn.
DEFAULT_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def _read_chat_template(value: str) -> str:
    """Return a template, or the contents of the file that `value` names."""
    if "{{" in value or "{%" in value:
        return value
    path = Path(value).expanduser()
    if not path.is_file():
        raise ConfigError(
            "tokenizer.chat_template",
            f"tokenizer.chat_template={value!r} is neither a jinja template (no '{{{{' and no '{{%' in it) nor a file",
        )
    return path.read_text(encoding="utf-8")


def load_tokenizer(
    path: str | Path, trust_remote_code: bool = False, chat_template: str | None = None
) -> "PreTrainedTokenizerBase":
    """Load a tokenizer of transformers.

    Args:
        path: directory or hub name.
        trust_remote_code: run code that comes with the directory or repository.
        chat_template: jinja string or file that replaces the tokenizer's own template.

    Raises:
        ConfigError: there is no tokenizer at `path`, or it cannot be read.
    """
    from transformers import AutoTokenizer

    if absent := no_directory("tokenizer.path", str(path)):
        raise ConfigError(absent)
    local = Path(path).expanduser()
    source = str(local) if local.exists() else str(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ImportError and its own for one cause
        first = next(iter(str(error).splitlines()), "")
        raise ConfigError(
            "tokenizer.path",
            f"tokenizer.path={str(path)!r}: no tokenizer can be loaded ({type(error).__name__}: {first}); "
            f"a tokenizer directory holds one of {', '.join(_TOKENIZER_FILES)}",
        ) from error
    if chat_template is not None:
        tokenizer.chat_template = _read_chat_template(chat_template)
    return tokenizer


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, chat_template: str | None = None, at_most: bool = False
) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE. Any text round-trips, and the same texts give the same tokenizer.

    Args:
        texts: documents; read once.
        vocab_size: total number of tokens, with the 256 bytes and 5 special tokens.
        chat_template: jinja string or file; None: a ChatML template with generation markers.
        at_most: accept fewer tokens than `vocab_size` if the texts give no more.

    Raises:
        ConfigError: `vocab_size` is too small for bytes and special tokens.
        DataError: the texts are too few to give that many tokens, and `at_most` is False.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(alphabet) + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise ConfigError(
            "tokenizer.vocab_size",
            f"tokenizer.vocab_size={vocab_size}: must be at least {smallest} ({len(alphabet)} bytes and "
            f"{len(SPECIAL_TOKENS)} special tokens)",
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    trained = backend.get_vocab_size()
    if trained != vocab_size and trained == smallest and not at_most:
        raise DataError("data.empty", "the documents hold no text to train a tokenizer on; set tokenizer.path")
    if trained != vocab_size and not at_most:
        raise DataError(
            "tokenizer.vocab_size",
            f"tokenizer.vocab_size={vocab_size}: the corpus is too small, it gives {trained} tokens; "
            f"choose {smallest} to {trained}, or more text",
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[TURN_START, TURN_END],
        clean_up_tokenization_spaces=False,  # text must round-trip
        chat_template=DEFAULT_CHAT_TEMPLATE if chat_template is None else _read_chat_template(chat_template),
    )


def build_tokenizer(
    config: "TokenizerConfig",
    data: "DataConfig",
    model_path: str | Path | None = None,
    default_vocab_size: int | None = None,
    trust_remote_code: bool = False,
    cache_dir: str | Path | None = None,
) -> "PreTrainedTokenizerBase":
    """Return the tokenizer that the configuration asks for: that of `path`, else a trained one, else the model's own.

    Args:
        config: its `path` wins; its `vocab_size` trains a tokenizer on `data`.
        data: the corpus to train on.
        model_path: directory or hub name of the model, whose tokenizer is used if `config` names nothing.
        default_vocab_size: largest vocabulary to train, if neither `config` nor the model decides it.
        trust_remote_code: passed to transformers.
        cache_dir: where `datasets` keeps its cache.

    Raises:
        ConfigError: nothing says which tokenizer to use, or it cannot be loaded.
    """
    if config.path is not None:
        return load_tokenizer(config.path, trust_remote_code, config.chat_template)
    if config.vocab_size is None and model_path is not None and _may_have_tokenizer(model_path):
        return load_tokenizer(model_path, trust_remote_code, config.chat_template)
    vocab_size = default_vocab_size if config.vocab_size is None else config.vocab_size
    if vocab_size is None:
        raise ConfigError(
            "tokenizer.missing",
            "tokenizer: the model has none; set tokenizer.path (a directory or hub name) or "
            "tokenizer.vocab_size (to train one on the corpus)",
        )
    from meshwright.data.rows.bad_rows import BadRows
    from meshwright.data.rows.corpora import training_texts

    bad = BadRows()  # judged when the tokens are stored, together with chats that no template accepts
    texts = training_texts(data, cache_dir, bad)
    try:
        return train_tokenizer(texts, vocab_size, config.chat_template, at_most=config.vocab_size is None)
    except DataError:
        bad.judge(data)  # if the texts are too few, this may be the reason
        raise


def _may_have_tokenizer(model_path: str | Path) -> bool:
    """Return whether to try `model_path`: a hub name always, a directory only if it has a file of a tokenizer."""
    path = Path(model_path).expanduser()
    return not path.exists() or any((path / name).is_file() for name in _TOKENIZER_FILES)


def vocabulary_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a digest of the words and their ids: where it is equal, ids mean the same."""
    words = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    return hashlib.sha256(words).hexdigest()[:16]


def tokenizer_state(tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """Return everything that decides which ids this tokenizer gives, for a fingerprint. Padding and truncation do not."""
    state: dict[str, Any] = {
        "chat_template": tokenizer.chat_template,
        "special": {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())},
    }
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        # calls leave their padding and truncation in the backend
        state["backend"] = {key: value for key, value in backend.items() if key not in ("padding", "truncation")}
    else:
        state["vocab"] = tokenizer.get_vocab()
        state["class"] = type(tokenizer).__name__
    return state

"""What decides the contents of a token store: one fingerprint for its name, and parts to compare with those of a checkpoint."""

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from meshwright.data.data_config import DataConfig
from meshwright.data.rows.own_rows import code_of_parts
from meshwright.data.sums import FileSums
from meshwright.data.tokenizer import tokenizer_state

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TRAINED", "differences", "fingerprint_of", "parts_of", "trained_digest"]

CONTENT_VERSION = 2
"""Part of the fingerprint: increased whenever the same configuration and documents give other tokens in every store."""

TRAINED = "trained"
"""The part that decides what a run trains on: a digest of the tokens themselves. The other parts only say why it differs."""

_KEYS = ("kind", "format", "columns", "text_field", "messages_field", "sequence_length", "long_documents", "max_documents")
_SOURCE, _TOKENIZER, _TEMPLATE = "data.files, data.hub or data.corpus", "tokenizer", "tokenizer.chat_template"
_DIGESTS = (_SOURCE, _TOKENIZER, _TEMPLATE)
_HELD_OUT = "data.eval_fraction"
_UNPAIRS = "training.objective with answers by themselves"
_WHOLE, _LABELS = "training.objective with whole texts", "model.head.labels"
_SCALES = "training.objective with advantages that are scaled"
_OPTIONAL = ("data.source", "data.map", "data.tensors", _UNPAIRS, _SCALES, _WHOLE, _LABELS)
"""Parts that only a run that uses them has, so that stores and checkpoints of other runs stay what they are."""


def fingerprint_of(config: DataConfig, tokenizer: "PreTrainedTokenizerBase", source: str, seed: int) -> str:
    """Return a hash of all that decides the contents of a store.

    The documents are included by the digest of their source. Packing and shuffling happen later.
    """
    decides = config.model_dump(include=set(_KEYS))
    decides |= {"held_out": config.held_out, "seed": seed, "digest": source, "format": CONTENT_VERSION}
    decides["tokenizer"] = tokenizer_state(tokenizer)
    return _hash(decides | _optional(config))


def _optional(config: DataConfig) -> dict[str, Any]:
    """Return what decides the contents of a store besides, if it is given: parts of the user, and columns of values."""
    columns = {"data.tensors": {name: column.model_dump(mode="json") for name, column in config.values.items()}}
    read_as = {"data.format": list(config.formats)} if config.pairs else {}
    unpaired = ({_UNPAIRS: "held out by prompts"} if config.unpairs else {}) | ({} if config.scales else {_SCALES: False})
    whole: dict[str, Any] = {_WHOLE: True} if config.whole else {}
    if {"labeled", "labeled_words"} & {*config.formats} and config.labels:
        whole[_LABELS] = [config.labels.kind, config.labels.count, list(config.labels.names)]
    return {**code_of_parts(config), **(columns if config.values else {}), **read_as, **unpaired, **whole}


def parts_of(config: DataConfig, tokenizer: "PreTrainedTokenizerBase", source: str, trained: str) -> dict[str, Any]:
    """Return what decides the documents to train on, by the keys of the configuration.

    Args:
        config: the source, and how to read its rows.
        tokenizer: the tokenizer.
        source: digest of the documents to train on, without those to evaluate on.
        trained: digest of their tokens.
    """
    state = tokenizer_state(tokenizer)
    template = state.pop("chat_template")
    values = config.model_dump(mode="json", include=set(_KEYS) - {"sequence_length"})  # which the state of a loader has
    return {
        TRAINED: trained,
        **{f"data.{key}": value for key, value in values.items()},
        _HELD_OUT: config.held_out,
        _SOURCE: source,
        _TOKENIZER: _hash(state),
        _TEMPLATE: _hash(template),
        **_optional(config),
    }


def trained_digest(
    sums: Mapping[str, FileSums], lengths: npt.NDArray[np.int64], held_out: npt.NDArray[np.bool_], pad_token_id: int
) -> str:
    """Return a digest of the tokens to train on.

    Args:
        sums: digests of the files with the documents of the source.
        lengths: number of tokens in each of these documents.
        held_out: which of them are held out.
        pad_token_id: id of the padding.
    """
    digest = hashlib.sha256(json.dumps([sums, pad_token_id], sort_keys=True).encode())
    digest.update(lengths.astype(np.int64).tobytes())
    digest.update(held_out.tobytes())
    return digest.hexdigest()


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str] | None:
    """Say why a run trains on other documents than the run of a checkpoint.

    Args:
        before: the parts in the checkpoint.
        now: the parts of this run.

    Returns:
        A line for each part that differs, maybe none; ``None``: both train on the same tokens, whatever differs.
    """
    if before.get(TRAINED) == now.get(TRAINED):
        return None
    lines = []
    differ = [key for key in before if key != TRAINED and key in now and before[key] != now[key]]
    differ += [key for key in _OPTIONAL if (key in before) != (key in now)]
    for key in differ:
        if key in _DIGESTS:
            lines.append(f"{key}: its content is another than that of the checkpoint")
        else:
            beside = f"; set it to {before[key]}, which is possible beside data.eval_files" if key == _HELD_OUT else ""
            lines.append(f"{key}: {before.get(key)!r} in the checkpoint, {now.get(key)!r} now{beside}")
    return lines


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

"""Small corpora, a tokenizer trained once, and stores written by hand."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from meshwright.data.index import FORMAT_VERSION, StoreIndex, write_index
from meshwright.data.store import TokenStore
from meshwright.data.sums import sums_of
from meshwright.data.tokenizer import train_tokenizer

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "while", "seven", "wizards", "box", "quiet"]


def sentences(count):
    return [" ".join(WORDS[(i * 7 + j * 3) % len(WORDS)] for j in range(3 + i % 11)) for i in range(count)]


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(sentences(200), 300)


@pytest.fixture
def jsonl(tmp_path):
    """Write rows to a .jsonl file."""

    def write(rows, name="data.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def make_store(tmp_path_factory):
    return write_store_factory(tmp_path_factory)


def write_store_factory(tmp_path_factory):
    def make(lengths, held_out=(), long_documents="split", sequence_length=16, mask=None):
        return write_store(tmp_path_factory.mktemp("store"), lengths, held_out, long_documents, sequence_length, mask)

    return make


def write_store(directory: Path, lengths, held_out=(), long_documents="split", sequence_length=16, mask=None):
    """A store whose every token has an id of its own, so that a target tells which one it is."""
    total = int(sum(lengths))
    (np.arange(total) + 1).astype(np.uint32).tofile(directory / "tokens.bin")
    if mask is not None:
        np.asarray(mask, dtype=np.bool_).tofile(directory / "loss_mask.bin")
    np.save(directory / "offsets.npy", np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    held = np.zeros(len(lengths), dtype=np.bool_)
    held[list(held_out)] = True
    np.save(directory / "held_out.npy", held)
    index = StoreIndex(
        format_version=FORMAT_VERSION,
        fingerprint=f"{sorted(lengths)}",
        kind="text" if mask is None else "chat",
        long_documents=long_documents,
        sequence_length=sequence_length,
        token_dtype="uint32",
        pad_token_id=0,
        documents=len(lengths),
        tokens=total,
        train_documents=int((~held).sum()),
        train_tokens=int(np.asarray(lengths)[~held].sum()),
        eval_documents=int(held.sum()),
        eval_tokens=int(np.asarray(lengths)[held].sum()),
        split=0,
        truncated=0,
        dropped=0,
        empty=0,
        files={path.name: sums_of(path) for path in directory.iterdir()},
    )
    write_index(directory, index)
    return TokenStore.open(directory)

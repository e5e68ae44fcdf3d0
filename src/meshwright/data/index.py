"""The index of a token store: its counts, and the digests of its files and of itself."""

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from meshwright.data.sums import FileSums
from meshwright.errors import DataError

__all__ = ["FORMAT_VERSION", "INDEX", "DamagedStoreError", "StoreIndex", "read_index", "write_index"]

FORMAT_VERSION = 3
"""Increased whenever a store has other files or another index, or the same configuration and documents give other tokens."""

INDEX = "index.json"


class DamagedStoreError(Exception):
    """What is wrong with a file of a store, or that another version wrote it. Its sources give it again."""


@dataclass(frozen=True)
class StoreIndex:
    """What a store has. Counts are of documents, unless their names say tokens or rows."""

    format_version: int
    fingerprint: str
    kind: Literal["text", "chat"]
    long_documents: Literal["split", "truncate", "drop", "error"]
    sequence_length: int
    token_dtype: Literal["uint16", "uint32"]
    pad_token_id: int
    documents: int
    tokens: int
    train_documents: int
    train_tokens: int
    eval_documents: int
    eval_tokens: int
    split: int
    """Longer than a sequence, and continued in the next one."""
    truncated: int
    dropped: int
    """Longer than a sequence, and left out, also if truncation would remove all answers."""
    empty: int
    """Left out because nothing in them can be learned: no text."""
    rows: int = 0
    """Rows that were read from the source. Those that gave no document are in `dropped`, `empty` and `bad`."""
    bad: int = 0
    """Rows that were left out, as `data.bad_rows` allows."""
    bad_rows: list[str] = field(default_factory=list)
    """What is wrong with them, with examples: file, line, reason."""
    too_long: int = 0
    """Rows among `bad` that are only longer than a sequence."""
    given: dict[str, int] = field(default_factory=dict)
    """Argument of the chat template, such as tools, to the chats that have it."""
    unwritten: dict[str, int] = field(default_factory=dict)
    """The same, of those of which the template writes nothing of it."""
    unlearned: int = 0
    """Answers that their messages say not to learn."""
    unread_columns: list[str] = field(default_factory=list)
    unread_keys: list[str] = field(default_factory=list)
    """Columns of rows, and keys of messages, that nothing reads."""
    parts: dict[str, Any] = field(default_factory=dict)
    """What decides the documents to train on, by keys of the configuration (`identity.py`)."""
    files: dict[str, FileSums] = field(default_factory=dict)
    """Name to size and digests, of all files but the index."""
    mapped_away: int = 0
    """Rows for which `data.map` returned nothing."""
    alike: int = 0
    """Pairs that are left out because both answers are the same."""
    pairs: bool = False
    """Whether each document is two: the tokens of the second follow those of the first."""
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name to per, width and dtype of the columns that reach the batch."""


_OPTIONAL = {"mapped_away", "tensors", "alike", "pairs"}
"""Values that are only written where there are some, so that earlier stores stay valid."""


def write_index(directory: Path, index: StoreIndex) -> None:
    """Write the index of a store, with its own digest."""
    values = {name: value for name, value in asdict(index).items() if value or name not in _OPTIONAL}
    content = json.dumps({**values, "digest": _digest(values)}, indent=2)
    (directory / INDEX).write_text(content + "\n", encoding="utf-8")


def read_index(directory: Path) -> StoreIndex:
    """Read the index of a store.

    Raises:
        DamagedStoreError: it is missing, is not what was written, or is that of another version.
        DataError: it cannot be read.
    """
    path = directory / INDEX
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DamagedStoreError(f"{path} is missing") from None
    except OSError as error:
        raise DataError("data.store.unreadable", f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DamagedStoreError(f"{path}: not the index of a token store ({error})") from error
    if not isinstance(values, dict):
        raise DamagedStoreError(f"{path}: not the index of a token store")
    version, digest = values.get("format_version"), values.pop("digest", None)
    # An index without a digest is one of before there were digests, unless its own version says otherwise.
    if digest != _digest(values) and (digest is not None or version == FORMAT_VERSION):
        raise DamagedStoreError(f"{path} is not what was written: its SHA-256 differs")
    if version != FORMAT_VERSION or set(values) | _OPTIONAL != {column.name for column in fields(StoreIndex)}:
        raise DamagedStoreError(f"{directory}: token store of format {version!r}, this version reads {FORMAT_VERSION}")
    return StoreIndex(**values)


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

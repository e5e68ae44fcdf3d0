"""Where documents come from: Python's own library, files, a data set of the hub.

Every source is a stream of :class:`Document` in an order that depends on nothing but the source, and each document can
say where it came from, so that an error names a file and a row.
"""

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.data.config import TEXT_EXTENSIONS, DataConfig, expand_files
from meshwright.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["Document", "documents", "eval_documents", "source_digest", "training_texts"]

# Packages that some installations lack (Linux distributions package them apart), or that are tests and tools.
_STDLIB_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo", "ensurepip", "distutils", "venv"}


@dataclass(frozen=True, slots=True)
class Document:
    """One document: either a text or the messages of a chat."""

    text: str | None
    messages: list[dict[str, Any]] | None
    source: str
    """File and row, or data set and row, for messages to the user."""


def documents(config: DataConfig, cache_dir: str | Path | None = None) -> Iterator[Document]:
    """Documents of the source, `config.max_documents` at most.

    Args:
        config: the source, and how its rows are to be read.
        cache_dir: where `datasets` keeps its copy of a hub data set and its lock files; its own default if None.

    Raises:
        DataError: nothing to read, an unreadable file or row, a field that is not there, text and chat mixed.
    """
    stream = _refuse_mixture(_source_documents(config, cache_dir))
    count = 0
    for document in islice(stream, config.max_documents):
        count += 1
        yield document
    if count == 0:
        raise DataError(f"data: {_source_name(config)} holds no document")


def eval_documents(config: DataConfig, cache_dir: str | Path | None = None) -> Iterator[Document]:
    """Documents of `config.eval_files`; none if there are no such files.

    Raises:
        DataError: as for :func:`documents`.
    """
    if not config.eval_files:
        return
    count = 0
    for document in _refuse_mixture(_file_documents(config, config.eval_files, "eval_files", cache_dir)):
        count += 1
        yield document
    if count == 0:
        raise DataError(f"data: eval_files={config.eval_files} hold no document")


def training_texts(config: DataConfig, cache_dir: str | Path | None = None) -> Iterator[str]:
    """Plain text of the source, to train a tokenizer on: documents, or the contents of the messages."""
    for document in documents(config, cache_dir):
        if document.text is not None:
            yield document.text
        for message in document.messages or []:
            if isinstance(message.get("content"), str):
                yield message["content"]


def source_digest(config: DataConfig, cache_dir: str | Path | None = None) -> str:
    """A hash of the contents of every file that is read. Paths do not count: data may move between runs."""
    digest = hashlib.sha256()
    if config.hub is not None:
        # datasets' own fingerprint: a hash of the data files' revision and of the builder's configuration
        digest.update(_load_hub(config, cache_dir)._fingerprint.encode())
    paths = _stdlib_files() if config.corpus else expand_files(config.files)
    for path in [*paths, None, *expand_files(config.eval_files)]:
        if path is None:
            digest.update(b"evaluation")
            continue
        digest.update(path.suffix.encode())
        with _readable(path).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _source_name(config: DataConfig) -> str:
    """The source as the user wrote it."""
    if config.corpus:
        return f"corpus={config.corpus!r}"
    return f"hub={config.hub!r}" if config.hub else f"files={config.files}"


def _source_documents(config: DataConfig, cache_dir: str | Path | None) -> Iterator[Document]:
    if config.corpus:
        return _stdlib_documents()
    if config.hub is not None:
        return _row_documents(config, iter(_load_hub(config, cache_dir)), config.hub)
    return _file_documents(config, config.files, "files", cache_dir)


def _refuse_mixture(stream: Iterator[Document]) -> Iterator[Document]:
    """Pass documents on as long as all are texts, or all are chats: the loss is defined for one of them at a time."""
    first: Document | None = None
    for document in stream:
        first = first or document
        if (document.text is None) != (first.text is None):
            raise DataError(
                f"data: {first.source} is {_kind(first)}, but {document.source} is {_kind(document)}; "
                "set data.kind to 'text' or 'chat', or leave one out"
            )
        yield document


def _kind(document: Document) -> str:
    return "text" if document.text is not None else "chat"


def _readable(path: Path) -> Path:
    if not path.is_file():
        raise DataError(f"data: {str(path)!r}: no such file")
    return path


# ---- text files ------------------------------------------------------------------------------------------------------


def _stdlib_files() -> list[Path]:
    """Source files of the standard library that every installation of this Python version has, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    found: list[tuple[tuple[str, ...], Path]] = []
    for folder, subfolders, names in os.walk(root):
        inside = Path(folder).relative_to(root).parts
        # The top level also holds site-packages, files of the distribution and of this build.
        subfolders[:] = [name for name in subfolders if name not in _STDLIB_SKIPPED and (inside or _in_stdlib(name))]
        for name in names:
            if name.endswith(".py") and (inside or _in_stdlib(name.removesuffix(".py"))):
                found.append(((*inside, name), Path(folder, name)))
    if not found:
        raise DataError(f"data.corpus='python-stdlib': no source files under {root}; this Python comes without them")
    return [path for _, path in sorted(found)]


def _in_stdlib(name: str) -> bool:
    return name in sys.stdlib_module_names and not name.startswith("_sysconfigdata")


def _stdlib_documents() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in _stdlib_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a few codecs and examples are written in other encodings
        yield Document(text, None, f"python-stdlib/{path.relative_to(root).as_posix()}")


def _file_documents(config: DataConfig, patterns: list[str], knob: str, cache_dir: str | Path | None) -> Iterator[Document]:
    missing = [pattern for pattern in patterns if not expand_files([pattern])]
    if missing:
        raise DataError(f"data.{knob}: {pattern!r} matches no file" for pattern in missing)
    for path in expand_files(patterns):
        if path.suffix in TEXT_EXTENSIONS:
            if config.kind == "chat":
                raise DataError(f"data.kind='chat': {str(path)!r} is text")
            try:
                yield Document(path.read_text(encoding="utf-8"), None, str(path))
            except UnicodeDecodeError as error:
                raise DataError(f"{path}: not UTF-8 text (byte {error.start}: {error.reason})") from error
        else:
            yield from _row_documents(config, _file_rows(path, cache_dir), str(path))


# ---- rows ------------------------------------------------------------------------------------------------------------


def _file_rows(path: Path, cache_dir: str | Path | None) -> Iterator[dict[str, Any]]:
    """Rows of a .jsonl, .json or .parquet file, streamed: `datasets` copies nothing into its cache."""
    from datasets import load_dataset

    builders = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
    if path.suffix not in builders:
        raise DataError(f"data: {str(path)!r}: extensions of rows are {', '.join(builders)}")
    if _readable(path).stat().st_size == 0:
        raise DataError(f"data: {str(path)!r} is empty")
    try:
        yield from load_dataset(
            builders[path.suffix],
            data_files=str(path),
            split="train",
            streaming=True,
            cache_dir=None if cache_dir is None else str(cache_dir),
        )
    except Exception as error:  # errors of arrow, pandas, json and datasets for one cause
        where = _first_bad_line(path) if path.suffix == ".jsonl" else ""
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(f"{path}{where}: cannot be read as {builders[path.suffix]} ({reason})") from error


def _first_bad_line(path: Path) -> str:
    """':LINE' of the first line that is no JSON; arrow's own message counts within a block of the file."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                json.loads(line)
            except ValueError:
                if line.strip():
                    return f":{number}"
    return ""


def _load_hub(config: DataConfig, cache_dir: str | Path | None) -> "Dataset":
    """The data set itself, memory-mapped."""
    from datasets import load_dataset

    try:
        return load_dataset(
            config.hub,
            config.hub_config,
            split=config.hub_split or "train",
            cache_dir=None if cache_dir is None else str(cache_dir),
        )
    except Exception as error:  # network, name, configuration, split and format errors have no common class
        raise DataError(
            f"data.hub={config.hub!r} (hub_config={config.hub_config!r}, hub_split={config.hub_split or 'train'!r}): {error}"
        ) from error


def _row_documents(config: DataConfig, rows: Iterator[dict[str, Any]], name: str) -> Iterator[Document]:
    kind: str = config.kind
    for number, row in enumerate(rows, start=1):
        source = f"{name}, row {number}"
        if kind == "auto":
            kind = _kind_of_row(config, row, source)
        if kind == "chat":
            yield Document(None, _messages(row, config.messages_field, source), source)
        else:
            text = _field(row, config.text_field, "text_field", source)
            if not isinstance(text, str):
                raise DataError(f"{source}: field {config.text_field!r} holds {type(text).__name__}, not text")
            yield Document(text, None, source)


def _kind_of_row(config: DataConfig, row: dict[str, Any], source: str) -> str:
    text, messages = config.text_field in row, config.messages_field in row
    if text == messages:
        which = "both fields" if text else "neither field"
        raise DataError(
            f"{source}: {which} {config.text_field!r} (text) and {config.messages_field!r} (chat); fields there are "
            f"{', '.join(row)}; set data.kind, data.text_field or data.messages_field"
        )
    return "text" if text else "chat"


def _field(row: dict[str, Any], field: str, knob: str, source: str) -> Any:
    if field not in row:
        raise DataError(f"{source}: no field {field!r}; fields there are {', '.join(row)}; set data.{knob}")
    return row[field]


def _messages(row: dict[str, Any], field: str, source: str) -> list[dict[str, Any]]:
    """Messages of a row, without the keys that `datasets` fills with None to make all rows alike."""
    value = _field(row, field, "messages_field", source)
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise DataError(f"{source}: field {field!r} is not a list of messages")
    messages = [{key: part for key, part in message.items() if part is not None} for message in value]
    for number, message in enumerate(messages, start=1):
        if not isinstance(message.get("role"), str):
            raise DataError(f"{source}: message {number} has no role; its keys are {', '.join(message) or 'none'}")
    return messages

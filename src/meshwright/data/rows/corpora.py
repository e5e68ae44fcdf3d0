"""The sources of documents: Python's own library, files, a data set of the hub, rows by a part of the user.

Every source is a stream of :class:`Document` in an order that depends only on the source. Each document has its origin, so that
an error can name a file and a row.
"""

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.data.data_config import DataConfig
from meshwright.data.rows.bad_rows import BadRows
from meshwright.data.rows.document import Document
from meshwright.data.rows.formats import RowReader, check_columns
from meshwright.data.rows.own_rows import RowMap, source_rows
from meshwright.data.rows.preferences import mismatched
from meshwright.data.rows.rollouts import with_advantages
from meshwright.data.rows.row_files import Row, file_rows, library_rows, load_saved, open_file
from meshwright.data.rows.source_files import TEXT_EXTENSIONS, expand_files, saved
from meshwright.errors import DataError, MeshwrightError, Problems, Refusal, number_of
from meshwright.paths import no_directory

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["documents", "eval_documents", "first_rows", "source_digests", "training_texts"]

FIRST = 8
"""Rows of a part of the user that are read before anything else is prepared."""

# Packages that some installations lack (Linux distributions package them separately), or that are tests and tools.
_STDLIB_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo", "ensurepip", "distutils", "venv"}


def documents(config: DataConfig, cache_dir: str | Path | None = None, bad: BadRows | None = None) -> Iterator[Document]:
    """Yield the documents of the source, at most `config.max_documents`.

    Args:
        config: the source, and how to read its rows.
        cache_dir: where `datasets` keeps its copy of a hub data set and its lock files; None: its own default.
        bad: collects the rows that give no document; the caller judges them. None: they are judged here, at the end.

    Raises:
        DataError: nothing to read, an unreadable file, a mixture of text and chat, or bad rows that `config` does not allow.
    """
    stream = islice(_source_documents(config, cache_dir, gathered := bad or BadRows()), config.max_documents)
    yield from _checked(config, stream, _source_name(config), gathered, judged=bad is None)


def eval_documents(config: DataConfig, cache_dir: str | Path | None = None, bad: BadRows | None = None) -> Iterator[Document]:
    """Yield the documents of `config.eval_files`, if there are such files.

    Raises:
        DataError: as for :func:`documents`.
    """
    if not config.eval_files:
        return
    stream = _file_documents(config, config.eval_files, "eval_files", cache_dir, gathered := bad or BadRows())
    yield from _checked(config, stream, f"eval_files={config.eval_files}", gathered, judged=bad is None)


def _checked(config: DataConfig, stream: Iterator[Document], name: str, bad: BadRows, judged: bool) -> Iterator[Document]:
    count = 0
    for document in _refuse_mixture(stream):
        count += 1
        yield document
    if judged or count == 0:
        bad.judge(config)
    if count == 0:
        raise DataError("data.empty", f"data: {name} holds no document")


def training_texts(config: DataConfig, cache_dir: str | Path | None = None, bad: BadRows | None = None) -> Iterator[str]:
    """Yield plain text of the source, to train a tokenizer on: documents, or the contents of the messages."""
    for document in documents(config, cache_dir, bad):
        if document.text is not None:
            yield document.text
        if document.words is not None:
            yield " ".join(document.words.words)
        for message in (*(document.messages or ()), *(document.second or ())):
            if isinstance(message.get("content"), str):
                yield message["content"]


def first_rows(config: DataConfig) -> Problems:
    """Return what is wrong with the first rows of `data.source`, if there is one: it is called, and they are read."""
    problems, bad = Problems(), BadRows()
    if config.source is None:
        return problems
    try:
        found = list(_Documents(config, bad).of_rows(islice(source_rows(config, bad), FIRST)))
    except MeshwrightError as error:
        return Problems(error.problems)
    name = f"data.{_source_name(config)}"
    if not bad.rows:
        problems.add("data.empty", f"{name}: holds no row")
    elif bad.bad and (config.bad_rows == "stop" or not found):
        problems.add("data.bad_rows", f"{name}: {bad.bad} of the first {number_of(bad.rows, 'row')} cannot be used")
        problems += [Refusal("data.bad_rows", line) for line in bad.lines]
    return problems


def source_digests(config: DataConfig, cache_dir: str | Path | None = None) -> tuple[str, str]:
    """Return a hash of the contents of every file that is trained on, and of every file that is read.

    Paths are not included: data may move between runs. Of parts of the user their code counts, see :func:`code_of_parts`.
    """
    digest, trained = hashlib.sha256(), ""
    paths = _stdlib_files() if config.corpus else expand_files(config.files)
    if config.hub is not None and saved(Path(config.hub).expanduser()):
        paths = [Path(config.hub).expanduser()]
    elif config.hub is not None:
        # datasets' own fingerprint: a hash of the revision of the data files and of the builder's configuration
        digest.update(_load_hub(config, cache_dir)._fingerprint.encode())
    for path in [*paths, None, *expand_files(config.eval_files)]:
        if path is None:
            trained = digest.hexdigest()
            digest.update(b"evaluation")
            continue
        digest.update(path.suffix.encode())
        for part in _parts(path, config.hub_split):
            with open_file(part) as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return trained, digest.hexdigest()


def _parts(path: Path, split: str | None) -> list[Path]:
    """Return the files with the contents of a path: itself, or the tables of a folder of save_to_disk."""
    return [Path(table["filename"]) for table in load_saved(path, split).cache_files] if saved(path) else [path]


def _source_name(config: DataConfig) -> str:
    """Return the source as the user wrote it."""
    if config.corpus:
        return f"corpus={config.corpus!r}"
    if config.source is not None:
        return f"source={config.source.use}"
    return f"hub={config.hub!r}" if config.hub else f"files={config.files}"


def _source_documents(config: DataConfig, cache_dir: str | Path | None, bad: BadRows) -> Iterator[Document]:
    if config.corpus:
        return _stdlib_documents(config, bad)
    if config.hub is not None:
        return _row_documents(config, library_rows(lambda: _load_hub(config, cache_dir), config.hub, bad), config.hub, bad)
    if config.source is not None:
        return _row_documents(config, source_rows(config, bad), config.source.use, bad)
    return _file_documents(config, config.files, "files", cache_dir, bad)


def _refuse_mixture(stream: Iterator[Document]) -> Iterator[Document]:
    """Yield documents as long as all are texts, or all are chats: the loss is defined for only one of them at a time."""
    first: Document | None = None
    for document in stream:
        first = first or document
        if document.kind != first.kind:
            raise DataError(
                "data.kind",
                f"data: {first.source} is {first.kind}, but {document.source} is {document.kind}; "
                "set data.kind to 'text' or 'chat', or leave one out",
            )
        yield document


# ---- text files ------------------------------------------------------------------------------------------------------


def _stdlib_files() -> list[Path]:
    """Return the source files of the standard library that every installation of this Python version has, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[tuple[tuple[str, ...], Path]] = []
    for folder, subfolders, names in os.walk(root):
        inside = Path(folder).relative_to(root).parts
        # The top level also has site-packages, files of the distribution and files of this build.
        subfolders[:] = [name for name in subfolders if name not in _STDLIB_SKIPPED and (inside or _in_stdlib(name))]
        for name in names:
            if name.endswith(".py") and (inside or _in_stdlib(name.removesuffix(".py"))):
                files.append(((*inside, name), Path(folder, name)))
    if not files:
        raise DataError(
            "data.source", f"data.corpus='python-stdlib': no source files under {root}; this Python comes without them"
        )
    return [path for _, path in sorted(files)]


def _in_stdlib(name: str) -> bool:
    return name in sys.stdlib_module_names and not name.startswith("_sysconfigdata")


def _stdlib_documents(config: DataConfig, bad: BadRows) -> Iterator[Document]:
    root, made = Path(sysconfig.get_path("stdlib")), _Documents(config, bad)
    for path in _stdlib_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a few codecs and examples are written in other encodings
        bad.rows += 1
        yield from made.of_text(text, f"python-stdlib/{path.relative_to(root).as_posix()}")


def _file_documents(
    config: DataConfig, patterns: list[str], knob: str, cache_dir: str | Path | None, bad: BadRows
) -> Iterator[Document]:
    missing = [pattern for pattern in patterns if not expand_files([pattern])]
    if missing:
        raise DataError(Refusal("data.files", f"data.{knob}: {pattern!r} matches no file") for pattern in missing)
    broken: list[Refusal] = []
    made = _Documents(config, bad)
    for path in expand_files(patterns):
        try:
            if saved(path):
                rows = library_rows(lambda path=path: load_saved(path, config.hub_split), str(path), bad)  # type: ignore[misc]
                yield from made.of_rows(rows)
            elif path.suffix in TEXT_EXTENSIONS:
                yield from _text_file(config, path, made)
            else:
                yield from made.of_rows(file_rows(path, bad, cache_dir))
        except DataError as error:  # the other files are read too, so that one report has the problems of all
            broken.extend(error.problems)
    try:
        check_columns(config, made.seen, f"{knob}={patterns}")
    except DataError as error:
        broken.extend(error.problems)
    if broken:
        raise DataError([*broken, *(Refusal("data.bad_rows", line) for line in bad.lines if config.bad_rows == "stop")])


def _text_file(config: DataConfig, path: Path, made: "_Documents") -> Iterator[Document]:
    if "text" not in config.formats and config.map is None:
        raise DataError("data.kind", f"data.kind={config.kind!r}, data.format={config.format!r}: {str(path)!r} is text")
    if config.values and config.map is None:
        raise DataError("data.tensors", f"data.tensors: {str(path)!r} is one text, and has no columns")
    made.bad.rows += 1
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        made.bad.add(DataError("data.text", f"{path}: not UTF-8 text (byte {error.start}: {error.reason})"))
    except OSError as error:
        raise DataError("data.unreadable", f"data: {str(path)!r} cannot be read ({error.strerror or error})") from error
    else:
        yield from made.of_text(text, str(path))


# ---- rows ------------------------------------------------------------------------------------------------------------


def _load_hub(config: DataConfig, cache_dir: str | Path | None) -> "Dataset":
    """Return the data set itself, memory-mapped."""
    from datasets import load_dataset

    assert config.hub is not None
    if saved(folder := Path(config.hub).expanduser()):
        if config.hub_config is not None:
            raise DataError(
                "data.source",
                f"data.hub_config={config.hub_config!r}: {config.hub} is of save_to_disk, and has none; remove it",
            )
        return load_saved(folder, config.hub_split)
    try:
        return load_dataset(
            str(folder) if folder.is_dir() else config.hub,
            config.hub_config,
            split=config.hub_split or "train",
            cache_dir=None if cache_dir is None else str(cache_dir),
        )
    except Exception as error:  # network, name, configuration, split and format errors have no common class
        asked = f"hub_config={config.hub_config!r}, hub_split={config.hub_split or 'train'!r}"
        if (absent := no_directory("data.hub", config.hub, hub=False)) is not None:
            raise DataError("data.source", f"{absent}; as a name of the hub ({asked}): {error}") from error
        raise DataError("data.source", f"data.hub={config.hub!r} ({asked}): {error}") from error


def _row_documents(config: DataConfig, rows: Iterator[Row], name: str, bad: BadRows) -> Iterator[Document]:
    made = _Documents(config, bad)
    yield from made.of_rows(rows)
    check_columns(config, made.seen, name)


class _Documents:
    """Makes documents of the rows of a source, which `data.map` may change before.

    Args:
        config: how to read the rows.
        bad: collects the rows that give no document, and counts those that the map leaves out.
    """

    def __init__(self, config: DataConfig, bad: BadRows) -> None:
        self.config, self.bad, self.map = config, bad, RowMap(config)
        self.seen: dict[str, None] = {}

    def of_text(self, text: str, source: str) -> Iterator[Document]:
        """Yield the documents of a file that is one text."""
        if self.map:
            yield from self.of_rows(iter([Row({self.config.text_column: text}, source)]))
        else:
            yield Document(text, None, source)

    def of_rows(self, rows: Iterator[Row]) -> Iterator[Document]:
        """Yield the documents of the rows of one file or data set, all of one format."""
        read = with_advantages(self._by_row(rows), self.config.scales, self.bad)
        if self.config.unpairs:
            yield from mismatched(read, _source_name(self.config))
        else:
            yield from chain.from_iterable(read)

    def _by_row(self, rows: Iterator[Row]) -> Iterator[list[Document]]:
        reader = RowReader(self.config, self.seen, self.bad.unread)
        for row in rows:
            try:
                made = self.map.rows(row)
            except DataError as error:
                self.bad.add(error)
                continue
            self.bad.mapped_away += not made
            for one in made:
                try:
                    found = reader.documents(one)
                except DataError as error:
                    self.bad.add(error)
                    continue
                other = found[0].second if len(found) == 1 else found[1].messages  # answers of a pair may be by themselves
                tokens = found[0].tokens
                same = tokens is not None and tokens.first > 0 and tokens.ids[: tokens.first] == tokens.ids[tokens.first :]
                if same or (other is not None and other == found[0].messages):
                    self.bad.alike += 1
                else:
                    yield found

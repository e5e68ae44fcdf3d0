"""Files of rows: JSON lines, JSON and Parquet. Each row has its file and the line that it begins on.

JSON is read here, not by `datasets`: arrow wants one type for a column, so one odd row would make a whole file fail, without
its line.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.data.rows.bad_rows import BadRows
from meshwright.errors import DataError

__all__ = [
    "DuplicateKeys",
    "Row",
    "file_rows",
    "library_rows",
    "load_saved",
    "names_of",
    "open_file",
    "refuse_duplicates",
    "without_nulls",
]

if TYPE_CHECKING:
    from datasets import Dataset

_BOM = b"\xef\xbb\xbf"
_NOT_JSON = {
    b"\x1f\x8b": "gzip: unpack it first",
    b"PK\x03\x04": "a zip archive: unpack it first",
    b"\x28\xb5\x2f\xfd": "zstd: unpack it first",
    b"PAR1": "parquet: name it .parquet",
    b"\xff\xfe": "UTF-16: write it as UTF-8",
    b"\xfe\xff": "UTF-16: write it as UTF-8",
}
"""First bytes of files with an extension of JSON but another format, and what to do."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a file or of a data set."""

    values: dict[str, Any]
    source: str
    """FILE:LINE, or a name and the number of the row."""


class DuplicateKeys(dict[str, Any]):
    """A JSON object in which a key occurs twice. It has the last value, and it is unknown which one was meant."""


def refuse_duplicates(row: Row) -> None:
    """Refuse a row in which a key occurs twice.

    Raises:
        DataError: it does.
    """
    if isinstance(row.values, DuplicateKeys):
        raise DataError("data.json", f"{row.source}: a key of the row occurs twice (keys: {names_of(row.values)})")


def names_of(names: Iterable[str]) -> str:
    """Return some names of columns or keys in printable form."""
    shown = [name if name.isidentifier() and len(name) <= 40 else f"{name!a:.40}" for name in names]
    return ", ".join(shown[:20]) + (f" and {len(shown) - 20} more" if len(shown) > 20 else "") if shown else "none"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    return fields if len(fields) == len(pairs) else DuplicateKeys(fields)


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
_SPACE = re.compile(r"[ \t\r\n]*")


def open_file(path: Path) -> Any:
    """Return the file, opened for reading bytes.

    Raises:
        DataError: there is no such file, or it cannot be read.
    """
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise DataError("data.files", f"data: {str(path)!r}: no such file") from None
    except OSError as error:
        raise DataError("data.unreadable", f"data: {str(path)!r} cannot be read ({error.strerror or error})") from error


def file_rows(path: Path, bad: BadRows, cache_dir: str | Path | None) -> Iterator[Row]:
    """Yield the rows of a .jsonl, .json or .parquet file, one after another.

    Args:
        path: path of the file.
        bad: counts the rows, and collects those that are no JSON object.
        cache_dir: cache of `datasets`, which reads parquet and copies nothing there.

    Raises:
        DataError: the file cannot be read as a whole, or from some line on.
    """
    readers = {".jsonl": _json_lines, ".json": _json_values}
    if path.suffix not in (*readers, ".parquet"):
        raise DataError(
            "data.files", f"data: {str(path)!r}: the extension of a file of rows must be one of {', '.join(readers)}, .parquet"
        )
    with open_file(path) as file:
        begin: bytes = file.read(4)
    if not begin:
        raise DataError("data.empty", f"data: {str(path)!r} is empty")
    if path.suffix == ".parquet":
        yield from _parquet(path, bad, cache_dir)
        return
    for magic, kind in _NOT_JSON.items():
        if begin.startswith(magic):
            raise DataError("data.json", f"{path}: cannot be read as json: it is {kind}")
    yield from readers[path.suffix](path, bad)


def _row(value: Any, source: str, bad: BadRows) -> Iterator[Row]:
    """Yield a JSON value as a row, if it is an object."""
    bad.rows += 1
    if isinstance(value, dict):
        yield Row(value, source)
    else:
        bad.add(DataError("data.json", f"{source}: holds {type(value).__name__}, not an object with fields"))


def _json_lines(path: Path, bad: BadRows) -> Iterator[Row]:
    with open_file(path) as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(_BOM) if number == 1 else line
            if not line.strip():
                continue
            source = f"{path}:{number}"
            try:
                value = _DECODER.decode(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                bad.rows += 1
                bad.add(DataError("data.json", f"{source}: cannot be read as json ({_reason(error)})"))
                continue
            yield from _row(value, source, bad)


def _json_values(path: Path, bad: BadRows) -> Iterator[Row]:
    """Yield the rows of a .json file: the elements of one array, or objects one after another."""
    with open_file(path) as file:
        content: bytes = file.read().removeprefix(_BOM)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError("data.json", f"{path}:{line}: cannot be read as json ({_reason(error)})") from error
    at, line, seen = _skip(text, 0), 1, 0
    array = text.startswith("[", at)
    if array:
        at = _skip(text, at + 1)
    if not array and _is_json(text[at : text.find("\n", at) + 1]):  # lines: after a bad one the next can be found
        yield from _json_lines(path, bad)
        return
    while at < len(text) and not (array and text[at] == "]"):
        line, seen = line + text.count("\n", seen, at), at
        try:
            value, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            wrong = error.lineno if isinstance(error, json.JSONDecodeError) else line
            raise DataError("data.json", f"{path}:{wrong}: cannot be read as json from here on ({_reason(error)})") from error
        yield from _row(value, f"{path}:{line}", bad)
        at = _skip(text, at)
        if array and text.startswith(",", at):
            at = _skip(text, at + 1)
        elif array and not text.startswith("]", at):
            line += text.count("\n", seen, at)
            raise DataError("data.json", f"{path}:{line}: cannot be read as json from here on (a comma or ] is missing)")
    end = _skip(text, at + 1) if at < len(text) else -1
    if array and end != len(text):
        line += text.count("\n", seen, end if end >= 0 else at)
        reason = "the ] at the end is missing" if end < 0 else "there is more after the ]"
        raise DataError("data.json", f"{path}:{line}: cannot be read as json ({reason})")


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _is_json(line: str) -> bool:
    try:
        _DECODER.decode(line)
    except (ValueError, RecursionError):
        return False
    return True


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: byte {error.start + 1}: {error.reason}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, column {error.colno}"
    return str(error).split(";")[0]  # an integer of too many digits, with advice for programmers


def library_rows(load: Callable[[], Iterable[Any]], name: str, bad: BadRows, kind: str = "") -> Iterator[Row]:
    """Yield rows that `datasets` reads.

    Args:
        load: returns the rows.
        name: name of the file or of the data set.
        bad: counts the rows.
        kind: how they are read, for a message.

    Raises:
        DataError: they cannot be read, or not from some row on.
    """
    number = 0
    try:
        for number, values in enumerate(load(), start=1):
            yield from _row({key: without_nulls(value) for key, value in values.items()}, f"{name}, row {number}", bad)
    except DataError:
        raise
    except Exception as error:  # errors of arrow and of datasets for one cause
        where = f", after row {number}" if number else ""
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError("data.unreadable", f"{name}{where}: cannot be read{kind} ({reason})") from error


def load_saved(folder: Path, split: str | None) -> "Dataset":
    """Return a data set that `save_to_disk` has written, memory-mapped.

    Args:
        folder: the folder of a `Dataset`, or of a `DatasetDict`.
        split: split of a `DatasetDict`; ``None``: `train`.

    Raises:
        DataError: it cannot be read, or has no such split.
    """
    from datasets import Dataset, load_from_disk

    try:
        found = load_from_disk(str(folder))
    except Exception as error:  # errors of arrow, of datasets and of JSON for one cause
        raise DataError(
            "data.unreadable", f"{folder}: cannot be read as a folder of save_to_disk ({' '.join(str(error).split())})"
        ) from error
    if not isinstance(found, Dataset):
        name = split or "train"
        if name not in found:
            raise DataError(
                "data.source", f"{folder}: has no split {name!r}; its splits are {', '.join(found)}; set data.hub_split"
            )
        found = found[name]
    return found.with_format(None)  # a format of tensors is saved with the data


def without_nulls(value: Any) -> Any:
    """Return a value without the keys that arrow adds, as null, to make the objects of all rows alike."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def _parquet(path: Path, bad: BadRows, cache_dir: str | Path | None) -> Iterator[Row]:
    from datasets import load_dataset

    cache = None if cache_dir is None else str(cache_dir)
    options = {"data_files": str(path), "split": "train", "streaming": True, "cache_dir": cache}
    yield from library_rows(lambda: load_dataset("parquet", **options), str(path), bad, kind=" as parquet")

"""Columns of rows that reach the batch as tensors: read and checked, stored beside the tokens, cut and padded as these are.

A value of ``per: token`` belongs to a token of the document. In a sequence it stands where the token is the label, beside the
log-probability of this token; where there is no label it is 0. One of ``per: input`` belongs to a token too, and stands where
the token is fed. One of ``per: document`` stands at each token of its document.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.data.rows.columns import TensorColumn
from meshwright.data.rows.row_files import Row, names_of
from meshwright.data.sums import SummedFile
from meshwright.errors import DataError, number_of

__all__ = ["Values", "check_lengths", "cut", "file_of", "open_values", "read_values", "shape_of", "stored", "write_values"]

Values = Mapping[str, npt.NDArray[Any]]
"""Name to the values of one document: [tokens, ...] or [...]."""


def shape_of(column: TensorColumn) -> tuple[int, ...]:
    """Return the shape of the value of one token or document."""
    return () if column.width is None else (column.width,)


def stored(columns: Mapping[str, TensorColumn]) -> dict[str, dict[str, Any]]:
    """Return what the index of a store says of its columns."""
    return {name: column.model_dump(mode="json", exclude={"column"}) for name, column in columns.items()}


def file_of(name: str) -> str:
    """Return the name of the file of a store with the values of a column."""
    return f"column-{name}.bin"


def read_values(columns: Mapping[str, TensorColumn], row: Row) -> dict[str, npt.NDArray[Any]]:
    """Return the values of a row.

    Raises:
        DataError: one is missing, has another shape or type, or is not finite; names file, line and field.
    """
    return {name: _read(name, column, row) for name, column in columns.items()}


def _read(name: str, column: TensorColumn, row: Row) -> npt.NDArray[Any]:
    field = column.column or name
    where = f"{row.source}: field {field!a}"
    if field not in row.values:
        raise DataError(
            "data.tensors",
            f"{row.source}: no field {field!a}, which data.tensors.{name} needs; its fields are {names_of(row.values)}",
        )
    dimensions = (column.per != "document") + (column.width is not None)
    legal = _legal(column)
    try:
        found = np.asarray(row.values[field])
    except ValueError:  # lists of different lengths
        raise DataError("data.tensors", f"{where} holds lists of different lengths; legal is {legal}") from None
    if found.dtype.kind not in "biuf":
        raise DataError("data.tensors", f"{where} holds {_kind(row.values[field])}; legal is {legal}")
    if found.ndim != dimensions or (column.width is not None and found.shape[-1] != column.width):
        raise DataError("data.tensors", f"{where} has the shape {list(found.shape)}; legal is {legal}")
    if column.dtype == "int64":
        if found.size and (found.dtype.kind == "f" or found.max() > np.iinfo(np.int64).max):
            raise DataError("data.tensors", f"{where} holds {found.max()}, which is no int64; legal is {legal}, in int64")
        return found.astype(np.int64)
    with np.errstate(over="ignore"):
        cast = found.astype(np.float32)
    if not (finite := np.isfinite(cast)).all():
        raise DataError("data.tensors", f"{where} holds {_first(found, ~finite)}; legal is {legal}, finite in float32")
    return cast


def _legal(column: TensorColumn) -> str:
    one = "a number" if column.width is None else f"a list of {number_of(column.width, 'number')}"
    return one if column.per == "document" else f"a list with {one} for each token"


def _first(found: npt.NDArray[Any], wrong: Any) -> str:
    place = tuple(int(index[0]) for index in np.nonzero(np.atleast_1d(wrong)))
    return f"{np.atleast_1d(found)[place]}" + (f" at place {', '.join(map(str, place))}" if found.ndim else "")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return "a list of something other than numbers" if isinstance(value, list) else f"{type(value).__name__}, no number"


def check_lengths(columns: Mapping[str, TensorColumn], values: Values, tokens: int, source: str) -> None:
    """Refuse a row whose values are not as many as its tokens.

    Args:
        columns: the columns.
        values: the values of the row.
        tokens: number of its tokens, before it is cut.
        source: origin of the row.

    Raises:
        DataError: names file, line, field and both numbers.
    """
    for name, column in columns.items():
        if column.per != "document" and len(values[name]) != tokens:
            raise DataError(
                "data.tensors",
                f"{source}: field {column.column or name!a} has {number_of(len(values[name]), 'value')}, and the row has "
                f"{number_of(tokens, 'token')}, with those that the tokenizer or the chat template adds; each token has one",
            )


def cut(columns: Mapping[str, TensorColumn], values: Values, places: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
    """Return the values of some tokens of a document, by their places in it."""
    return {name: values[name] if column.per == "document" else values[name][places] for name, column in columns.items()}


def write_values(files: Mapping[str, SummedFile], columns: Mapping[str, TensorColumn], values: Values) -> None:
    """Append the values of a document to the files of a store."""
    for name, column in columns.items():
        files[file_of(name)].write(np.ascontiguousarray(values[name], dtype=column.dtype).tobytes())


def open_values(directory: Path, name: str, column: TensorColumn) -> npt.NDArray[Any]:
    """Return the values of a column of a store, memory-mapped: [tokens or documents, ...]."""
    return np.memmap(directory / file_of(name), dtype=column.dtype, mode="r").reshape(-1, *shape_of(column))

"""What a model says of the tokens of a store: columns that lie in a directory of their own, beside it.

- ``column-NAME.bin``: the values of all tokens of the store end to end; those of the first token of a document are 0
- ``index.json``: the fingerprint of the store, what the model is, the columns, and the digests of all files

Ranks write their parts, in the order in which they compute them, and one process joins these. The directory is written under a
temporary name and renamed when complete, so it is either whole or absent.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from meshwright.data.index import INDEX
from meshwright.data.loader import EvalLoader
from meshwright.data.packing import IGNORE
from meshwright.data.rows.columns import ROUTED_EXPERTS, TensorColumn
from meshwright.data.rows.row_values import file_of, open_values, shape_of
from meshwright.data.store import TokenStore
from meshwright.data.sums import FileSums, damage, sizes_differ, sums_of
from meshwright.errors import DataError

__all__ = ["EveryToken", "Scores", "Split", "join_parts", "part_file"]

FORMAT_VERSION = 1
Split = Literal["train", "eval"]


class EveryToken(EvalLoader):
    """Batches in which each token but the first of a document is a label, also those that are not to be learned."""

    def _sequence(self, number: int) -> dict[str, npt.NDArray[Any]]:
        sequence = super()._sequence(number)
        labels, places = np.full_like(sequence["labels"], IGNORE), self.targets(number)
        labels[places >= 0] = self.dataset.store.tokens[places[places >= 0]]
        kept = {name: own for name, own in sequence.items() if name in ("input_ids", "position_ids", ROUTED_EXPERTS)}
        return {**kept, "labels": labels}

    def targets(self, number: int) -> npt.NDArray[np.int64]:
        """Return for each slot of a sequence the place of its label in the store; -1: it has none."""
        if number < self.sequences:
            return self.dataset.targets(number)
        return np.full(self.dataset.sequence_length, -1, dtype=np.int64)

    def places(self) -> Iterator[npt.NDArray[np.int64]]:
        """Yield for each sequence of this data rank the places in the store of the values that it writes."""
        for batch in range(len(self)):
            for number in self.numbers(batch):
                found = self.targets(number)
                yield found[found >= 0]


@dataclass(frozen=True)
class Scores:
    """Columns of a store that a model has computed.

    Attributes:
        directory: where they are.
        columns: name to what each is.
        model: what the model is, as plain values.
        files: name to size and digests.
    """

    directory: Path
    columns: dict[str, TensorColumn]
    model: dict[str, Any]
    files: dict[str, FileSums]

    @classmethod
    def open(cls, directory: Path, store: TokenStore) -> "Scores":
        """Open the scores of a store.

        Raises:
            DataError: there are none, they are those of another store, or they are damaged.
        """
        path = directory / INDEX
        try:
            values = json.loads(path.read_bytes())
            written, known = values.pop("digest"), _digest(values)
            columns = {name: TensorColumn.model_validate(one) for name, one in values["columns"].items()}
            facts = columns, values["model"], values["files"]
        except FileNotFoundError:
            raise DataError("data.store.missing", f"{directory}: no scores of tokens (no {INDEX})") from None
        except OSError as error:
            raise DataError("data.store.unreadable", f"{path}: cannot be read: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError("data.store.damaged", f"{path}: not the index of scores ({error})") from error
        if written != known or values["format_version"] != FORMAT_VERSION:
            raise DataError("data.store.damaged", f"{path} is not what was written, or by another version")
        if values["store"] != store.fingerprint:
            raise DataError("data.store.damaged", f"{directory}: has scores of other tokens than those in {store.directory}")
        if lines := sizes_differ(directory, facts[2]):
            raise DataError("data.store.damaged", "; ".join(lines))
        return cls(directory, *facts)

    def damage(self, *, fast: bool = False) -> list[str]:
        """Return a line for each file that is not what was written; ``fast`` reads a sample of large ones."""
        return damage(self.directory, self.files, fast=fast)[0]

    def beside(self, store: TokenStore) -> TokenStore:
        """Return the store with these columns."""
        values = {name: (column, open_values(self.directory, name, column)) for name, column in self.columns.items()}
        return store.beside(values)


def part_file(directory: Path, name: str, split: Split, data_rank: int) -> Path:
    """Return the file with the part of a data rank of a column."""
    return directory / f"part-{name}-{split}-{data_rank}.bin"


def join_parts(
    directory: Path,
    store: TokenStore,
    columns: Mapping[str, TensorColumn],
    parts: Mapping[tuple[Split, int], EveryToken],
    model: Mapping[str, Any],
) -> None:
    """Make columns of the parts of all data ranks, remove these, and write the index. One process does it.

    Args:
        directory: where the parts are.
        store: the tokens.
        columns: name to what each column is.
        parts: split and data rank to the batches that the part was computed from.
        model: what the model is, as plain values.
    """
    for name, column in columns.items():
        shape = shape_of(column)
        whole = np.memmap(directory / file_of(name), column.dtype, "w+", shape=(store.index.tokens, *shape))
        for (split, data_rank), loader in parts.items():
            file, at = part_file(directory, name, split, data_rank), 0
            if not file.stat().st_size:
                continue
            values = np.memmap(file, column.dtype, "r").reshape(-1, *shape)
            for places in loader.places():
                whole[places] = values[at : at + len(places)]
                at += len(places)
            if at != len(values):
                raise DataError("data.store.damaged", f"{file}: has {len(values):,} values instead of {at:,}")
            del values
        whole.flush()
        del whole
    for (split, data_rank), name in ((part, name) for part in parts for name in columns):
        part_file(directory, name, split, data_rank).unlink()
    index: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "store": store.fingerprint,
        "model": dict(model),
        "columns": {name: column.model_dump(mode="json") for name, column in columns.items()},
        "files": {file_of(name): sums_of(directory / file_of(name)) for name in columns},
    }
    (directory / INDEX).write_text(json.dumps({**index, "digest": _digest(index)}, indent=2) + "\n", encoding="utf-8")


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

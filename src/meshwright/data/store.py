"""Tokenized documents on disk: written once, memory-mapped by every process that reads them.

A store is a directory of its own, named after the fingerprint of everything that decides its contents:

- ``tokens.bin``: the ids of all documents end to end, uint16 or uint32 by the size of the vocabulary
- ``loss_mask.bin``: for chats, one byte per token: whether the model is to learn it
- ``column-NAME.bin``: for each column of `data.tensors`, its values of all tokens or documents end to end, float32 or int64
- ``offsets.npy``: int64; document d is ``tokens[offsets[d]:offsets[d + 1]]``
- ``held_out.npy``: bool; whether document d is for evaluation
- ``seconds.npy``: for pairs, int64; how many tokens of document d are those of its first member
- ``index.json``: the counts of :class:`StoreIndex`, and the digests of all files

It is written under a temporary name and renamed when complete, so it is either whole or absent. What happens to its files
later is found by their digests when a run starts, and a damaged store is made again from its sources.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from meshwright.data.index import INDEX, DamagedStoreError, StoreIndex, read_index
from meshwright.data.rows.columns import TensorColumn
from meshwright.data.rows.row_values import open_values
from meshwright.data.sums import damage, sizes_differ
from meshwright.errors import DataError

__all__ = ["SECONDS", "StoreIndex", "TokenStore"]

SECONDS = "seconds.npy"


class TokenStore:
    """A complete store, opened for reading. Opening is cheap: only the offsets and the flags of held-out documents are read."""

    def __init__(self, directory: Path, index: StoreIndex) -> None:
        self.directory = directory
        self.index = index
        path = directory / "offsets.npy"
        self.offsets: npt.NDArray[np.int64] = _array(path, np.dtype(np.int64), index.documents + 1)
        if self.offsets[0] != 0 or self.offsets[-1] != index.tokens or (np.diff(self.offsets) < 1).any():
            raise DamagedStoreError(f"{path} is damaged: it does not rise from 0 to the number of tokens, {index.tokens:,}")
        path = directory / "held_out.npy"
        self.held_out: npt.NDArray[np.bool_] = _array(path, np.dtype(np.bool_), index.documents)
        if self.held_out.sum() != index.eval_documents:
            raise DamagedStoreError(f"{path} is damaged: it does not mark {index.eval_documents:,} documents")
        self.seconds: npt.NDArray[np.int64] | None = None
        if index.pairs:
            self.seconds = _array(directory / SECONDS, np.dtype(np.int64), index.documents)
            if (self.seconds < 1).any() or (self.seconds >= self.lengths).any():
                raise DamagedStoreError(f"{directory / SECONDS} is damaged: a document has no second member")

    @classmethod
    def open(cls, directory: str | Path) -> "TokenStore":
        """Open the store that :func:`prepare` wrote; `directory` is its `TokenStore.directory`.

        Sizes, the index and the offsets are checked. The bytes of the tokens are not: :meth:`damage` reads them.

        Raises:
            DataError: there is no store, another version wrote it, or a file is missing or damaged.
        """
        directory = Path(directory)
        if not (directory / INDEX).exists():
            raise DataError("data.store.missing", f"{directory}: no token store (no {INDEX})")
        try:
            return cls._open(directory)
        except DamagedStoreError as error:
            remedy = "start the run again, which makes damaged tokens again from their sources"
            raise DataError("data.store.damaged", f"{error}; {remedy}") from error

    @classmethod
    def _open(cls, directory: Path) -> "TokenStore":
        index = read_index(directory)
        if lines := sizes_differ(directory, index.files):
            raise DamagedStoreError("; ".join(lines))
        return cls(directory, index)

    def damage(self, *, fast: bool = False) -> tuple[list[str], str]:
        """Compare the files with their digests: see :func:`meshwright.data.sums.damage`."""
        return damage(self.directory, self.index.files, fast=fast)

    def beside(self, columns: Mapping[str, tuple[TensorColumn, npt.NDArray[Any]]]) -> "TokenStore":
        """Return this store with further columns and their values, which lie elsewhere."""
        store = TokenStore(self.directory, self.index)
        store.tensors = {**self.tensors, **{name: column for name, (column, _) in columns.items()}}
        store.values = {**self.values, **{name: values for name, (_, values) in columns.items()}}
        return store

    @property
    def fingerprint(self) -> str:
        """Hash of everything that decided the contents."""
        return self.index.fingerprint

    @cached_property
    def tokens(self) -> npt.NDArray[Any]:
        """Ids of all documents end to end, memory-mapped."""
        return np.memmap(self.directory / "tokens.bin", dtype=self.index.token_dtype, mode="r")

    @cached_property
    def loss_mask(self) -> npt.NDArray[np.bool_] | None:
        """For chats, whether each token is to be learned, memory-mapped; None for texts, where every token is."""
        if self.index.kind == "text":
            return None
        return np.memmap(self.directory / "loss_mask.bin", dtype=np.bool_, mode="r")

    @cached_property
    def tensors(self) -> dict[str, TensorColumn]:
        """The columns that reach the batch."""
        return {name: TensorColumn.model_validate(column) for name, column in self.index.tensors.items()}

    @cached_property
    def values(self) -> dict[str, npt.NDArray[Any]]:
        """Their values [tokens or documents, ...], memory-mapped."""
        return {name: open_values(self.directory, name, column) for name, column in self.tensors.items()}

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of tokens in each document."""
        return np.diff(self.offsets)

    def documents(self, split: Literal["train", "eval"]) -> npt.NDArray[np.int64]:
        """Return the numbers of the documents of a split, in the order of the source."""
        return np.flatnonzero(self.held_out == (split == "eval"))


def _array(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    """Read an array of numpy. A header that is damaged must not make it allocate what the file does not have."""
    try:
        mapped = np.load(path, mmap_mode="r")
    except Exception as error:  # numpy has no common class for what is wrong with a file
        raise DamagedStoreError(f"{path} is damaged: {' '.join(str(error).split())}") from error
    if mapped.dtype != dtype or mapped.shape != (count,):
        raise DamagedStoreError(f"{path} is damaged: it has {mapped.dtype} {list(mapped.shape)} instead of {dtype} [{count}]")
    return np.array(mapped)

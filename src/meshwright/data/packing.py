"""From documents to sequences of one length.

A *piece* is a run of tokens of one document in one sequence. In a packed sequence every piece is a segment: its positions start
at 0, and where positions restart, transformers lets no attention cross (if no attention mask is given).

A label is the next token of the same piece. A document that continues in the next sequence begins there with its last token in
this sequence, so that each of its tokens but the first is a target exactly once::

    document  a b c d e     sequence_length 3
    inputs    a b c | c d e
    labels    b c - | d e -

A sequence is computed from four numbers per row, so any sequence can be read without those before it.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from meshwright.data.order import stable_permutation
from meshwright.data.rows.columns import MEMBER
from meshwright.data.store import TokenStore
from meshwright.errors import DataError, Refusal

__all__ = ["IGNORE", "PackIndex", "Piece", "SequenceDataset", "pack", "pad"]

IGNORE = -100
"""Label of a position that has no target: the default of torch's cross entropy."""

_DOCUMENTS, _SEQUENCES = 2, 3  # the purposes of a hash, see order.py

Integers = npt.NDArray[np.int64]


class Piece(NamedTuple):
    """`length` tokens of document `document` (its position in the order of the epoch), from its token `start` on."""

    document: int
    start: int
    length: int


@dataclass(frozen=True)
class PackIndex:
    """Which pieces make each sequence.

    Row i has the documents `first[i]` to `end[i] - 1` up to their ends, then `tail[i]` tokens of document `end[i]`. The first
    piece begins at token `start[i]` of its document, every other at token 0.
    """

    lengths: Integers
    first: Integers
    start: Integers
    end: Integers
    tail: Integers

    def __len__(self) -> int:
        return len(self.first)

    def pieces(self, row: int) -> list[Piece]:
        """Return the pieces of a sequence, in order."""
        first, start, end, tail = (int(column[row]) for column in (self.first, self.start, self.end, self.tail))
        pieces = []
        for document in range(first, end + (tail > 0)):
            begin = start if document == first else 0
            pieces.append(Piece(document, begin, int(self.lengths[document]) - begin if document < end else tail))
        return pieces


def _index(lengths: Integers, rows: list[tuple[int, int, int, int]]) -> PackIndex:
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    return PackIndex(lengths, *(np.ascontiguousarray(column) for column in table.T))


def pack(lengths: Integers, sequence_length: int, split: bool) -> PackIndex:
    """Fill sequences with documents one after another.

    Args:
        lengths: number of tokens in each document, in the order of the epoch; each at least 2.
        sequence_length: number of slots in a sequence.
        split: let documents continue in the next sequence, so that only the last sequence is padded (and single slots, which
            could have no target). Otherwise a document that does not fit into the rest of a sequence begins the next one.

    Raises:
        DataError: a document is longer than a sequence, and `split` is False.
    """
    ends = np.concatenate([[0], np.cumsum(lengths)])
    count = len(lengths)
    rows = []
    document = start = 0
    while document < count:
        limit = int(ends[document]) + start + sequence_length
        end = int(np.searchsorted(ends, limit, side="right")) - 1  # documents before `end` fit to their ends
        tail = next_start = 0
        if split and end < count:
            tail = sequence_length if end == document else limit - int(ends[end])
            if tail < 2:
                tail = 0
            else:
                next_start = (start if end == document else 0) + tail - 1
        elif end == document:
            raise DataError(
                "data.long_documents",
                f"a document of {int(lengths[document])} tokens must not be split, but does not fit into sequences of "
                f"{sequence_length}; prepare the data for this sequence_length",
            )
        rows.append((document, start, end, tail))
        document, start = end, next_start
    return _index(lengths, rows)


def pad(lengths: Integers, sequence_length: int) -> PackIndex:
    """Put one document in each sequence; a longer one takes as many sequences as it needs. Arguments as for :func:`pack`."""
    step = sequence_length - 1  # the last token of a piece begins the next
    counts = 1 + np.maximum(0, -(-(lengths - sequence_length) // step))
    first = np.repeat(np.arange(len(lengths)), counts)
    begin_of_document = np.repeat(np.cumsum(counts) - counts, counts)
    number = np.arange(len(first)) - begin_of_document
    last = number == counts[first] - 1
    return PackIndex(
        lengths,
        first=first,
        start=number * step,
        end=np.where(last, first + 1, first),
        tail=np.where(last, 0, sequence_length),
    )


class SequenceDataset:
    """The sequences of one epoch of one split, by number.

    Which documents share a sequence, and the order of the sequences, depend only on the store, `seed` and `epoch`.

    Args:
        store: tokenized documents.
        split: the documents to train on, or those held out.
        sequence_length: number of slots in a sequence.
        packing: "pack" or "pad", see :class:`~meshwright.data.data_config.DataConfig`.
        seed: decides the order, together with `epoch`.
        epoch: counted from 0.
        shuffle: shuffle the documents, then the sequences packed from them.

    Raises:
        DataError: the split is empty, or has documents too long for `sequence_length` that must stay whole.
    """

    def __init__(
        self,
        store: TokenStore,
        split: Literal["train", "eval"],
        sequence_length: int,
        packing: Literal["pack", "pad"] = "pack",
        seed: int = 0,
        epoch: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.store, self.split, self.sequence_length, self.packing = store, split, sequence_length, packing
        documents = store.documents(split)
        if len(documents) == 0:
            raise DataError(_empty_split(store, split))
        if shuffle:
            documents = documents[stable_permutation(len(documents), seed, epoch, _DOCUMENTS)]
        lengths = store.lengths[documents]
        may_split = store.index.long_documents == "split"
        if not may_split and lengths.max() > sequence_length:
            raise DataError(
                "data.long_documents",
                f"sequence_length={sequence_length}: the store was prepared for {store.index.sequence_length} with "
                f"long_documents={store.index.long_documents!r} and holds documents of {int(lengths.max())} tokens; "
                "prepare it again",
            )
        self._documents = documents
        self._index = pack(lengths, sequence_length, may_split) if packing == "pack" else pad(lengths, sequence_length)
        self._order = stable_permutation(len(self._index), seed, epoch, _SEQUENCES) if shuffle else None

    def __len__(self) -> int:
        """Return the number of sequences in the epoch."""
        return len(self._index)

    def pieces(self, number: int) -> list[Piece]:
        """Return the pieces of sequence `number`; documents by their number in the store."""
        if not 0 <= number < len(self):
            raise IndexError(f"sequence {number} of {len(self)}")
        row = number if self._order is None else int(self._order[number])
        return [piece._replace(document=int(self._documents[piece.document])) for piece in self._index.pieces(row)]

    def targets(self, number: int) -> Integers:
        """Return for each slot of a sequence the place in the store of the token that follows it; -1: none follows.

        So a value beside the labels of all tokens comes back to its token. Each token but the first of a document is there once
        in an epoch.
        """
        places = np.full(self.sequence_length, -1, dtype=np.int64)
        at = 0
        for document, start, length in self.pieces(number):
            begin = int(self.store.offsets[document]) + start
            places[at : at + length - 1] = np.arange(begin + 1, begin + length)
            if self.store.seconds is not None:
                places[at + int(self.store.seconds[document]) - 1] = -1
            at += length
        return places

    def __getitem__(self, number: int) -> dict[str, npt.NDArray[Any]]:
        """Return input_ids, labels and position_ids of a sequence: int64, `sequence_length` long; and the store's columns.

        Labels are already shifted: ``labels[i]`` is the token that the model should predict after ``input_ids[i]``, or IGNORE.
        The two members of a pair are documents of their own: positions begin again, and no label crosses. ``member`` is 1 or 2.
        The columns [sequence_length, ...] have at i the value of the token ``labels[i]``, of the token ``input_ids[i]``, or of
        its document, as their ``per`` says; where there is none, what :attr:`TensorColumn.absent` says.
        """
        store = self.store
        input_ids = np.full(self.sequence_length, store.index.pad_token_id, dtype=np.int64)
        labels = np.full(self.sequence_length, IGNORE, dtype=np.int64)
        # In a packed sequence, padding is a segment of its own. A padded document must not look packed: positions continue.
        position_ids = np.arange(self.sequence_length, dtype=np.int64)
        columns = {
            name: np.full((self.sequence_length, *found.shape[1:]), store.tensors[name].absent, found.dtype)
            for name, found in store.values.items()
        }
        member = np.zeros(self.sequence_length, dtype=np.int64)
        at = 0
        for document, start, length in self.pieces(number):
            begin = int(store.offsets[document]) + start
            tokens = store.tokens[begin : begin + length]
            input_ids[at : at + length] = tokens
            targets = tokens[1:].astype(np.int64)
            if store.loss_mask is not None:
                targets = np.where(store.loss_mask[begin + 1 : begin + length], targets, IGNORE)
            labels[at : at + length - 1] = targets
            if self.packing == "pack":
                position_ids[at : at + length] = np.arange(length)
            if store.seconds is not None:
                first = int(store.seconds[document])
                position_ids[at + first : at + length] = np.arange(length - first)
                labels[at + first - 1] = IGNORE
                member[at : at + length] = np.where(np.arange(length) < first, 1, 2)
            for name, column in columns.items():
                per = store.tensors[name].per
                if per == "document":
                    column[at : at + length] = store.values[name][document]
                elif per == "input":
                    column[at : at + length] = store.values[name][begin : begin + length]
                else:
                    column[at : at + length - 1] = store.values[name][begin + 1 : begin + length]
            at += length
        if self.packing == "pack" or store.seconds is not None:
            position_ids[at:] = np.arange(self.sequence_length - at)
        for name, column in columns.items():
            if store.tensors[name].per == "token":
                column[labels == IGNORE] = 0
        pairs = {} if store.seconds is None else {MEMBER: member}
        return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids, **columns, **pairs}


def _empty_split(store: TokenStore, split: str) -> Refusal:
    index = store.index
    if split == "train":
        return Refusal(
            "data.split", f"no document to train on: all {index.documents} are for evaluation; lower data.eval_fraction"
        )
    return Refusal(
        "data.split",
        f"no document to evaluate on ({index.documents} in all, held out by whole documents); raise data.eval_fraction "
        "above 0 with at least 2 documents, give data.eval_files, or turn evaluation off",
    )

"""The data of an audit, which both sides get: real documents of the run, or random ones.

Documents are packed so that several meet in a sequence, and sequences have different numbers of valid tokens. The number of
labels that count in a sequence depends on the sequence's number in the global stream, not on the rank that reads it. So one
process and many get the same data, and a loss that is averaged over ranks or microbatches, instead of over tokens, cannot pass
for right.

Two difficult cases are added. First, the token ids at the edges of every rank's slice of the vocabulary, and the padding, are
inputs and labels in the first step, for any `tp` that a few processes can have. Second, one microbatch has no valid token at
all: the last one of the second step, so that in the first step every rank has valid tokens; if there is only one step, the last
one of that.
"""

import hashlib
import math
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from meshwright.audit.small_routes import Routes
from meshwright.data.loader import TrainLoader
from meshwright.data.packing import IGNORE, Integers
from meshwright.data.preparation import prepare, write_documents
from meshwright.data.rows.columns import ROUTED_EXPERTS, TensorColumn
from meshwright.data.rows.row_values import shape_of
from meshwright.data.store import TokenStore
from meshwright.data.tokenizer import build_tokenizer
from meshwright.distributed.context.sequences import join_sequences
from meshwright.distributed.mesh import ParallelMesh
from meshwright.models.objective import ROUTED
from meshwright.objectives.documents import EXISTS
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.train.config import RunConfig

__all__ = [
    "UnevenLoader",
    "documents_of_run",
    "draw_documents",
    "edge_words",
    "gathered_batches",
    "sequence_digests",
    "unlabelled_microbatch",
    "unlike",
    "whole_sequences",
    "words_to_feed",
]

DOCUMENTS = 64
"""Largest number of documents that an audit reads from a run's source."""

_GOLDEN = 0.6180339887  # its multiples modulo 1 are spread evenly, and never repeat


CANVAS = "canvas_"
"""How the names of tensors of a batch begin that hold canvases: sequences beside the sequences."""

RANKS = (2, 4, 8, 3, 5, 6, 7)
"""Sizes of `tp`, in the order in which their edges are fed. The most usual sizes come first, for the first step may be too
short for all."""


def edge_words(vocabulary: int, ranks: int) -> list[int]:
    """Return the first and the last token id of every rank's slice of a vocabulary, as ``torch.chunk`` cuts it."""
    width = -(-vocabulary // ranks)
    edges = [(begin, min(begin + width, vocabulary) - 1) for begin in range(0, vocabulary, width)]
    return [word for edge in edges for word in edge]


def words_to_feed(vocabulary: int, pads: Iterable[int | None], never: Container[int] = ()) -> tuple[int, ...]:
    """Return the token ids that are difficult: padding, and the edges of slices. They are the same for every layout.

    Args:
        vocabulary: number of token ids.
        pads: token ids that are used as padding somewhere.
        never: token ids that stand for something other than text; they are left out.
    """
    words = [*pads, *(word for ranks in RANKS for word in edge_words(vocabulary, ranks))]
    return tuple(dict.fromkeys(word for word in words if word is not None and 0 <= word < vocabulary and word not in never))


def unlabelled_microbatch(global_batch_size: int, microbatch_size: int, steps: int) -> range:
    """Return the numbers of the sequences of the microbatch without a valid token.

    It is the last microbatch of the second step, or of the only step. The range is empty if a step is one microbatch of one
    rank.
    """
    if global_batch_size == microbatch_size:
        return range(0)
    end = global_batch_size * min(2, steps)
    return range(end - microbatch_size, end)


class UnevenLoader(TrainLoader):
    """The loader of a run, but with the last labels of each sequence removed: between none and two thirds of them.

    Attributes:
        starves: whether in every third microbatch each sequence repeats its first token. Then all its positions are routed to
            the same few experts, and other experts get no token.
        words: token ids that are put into the first step, as inputs and as labels, as far as there is room.
        unlabelled: numbers of the sequences that have no label.
    """

    starves = False
    words: tuple[int, ...] = ()
    unlabelled = range(0)

    def _sequence(self, number: int) -> dict[str, Integers]:
        sequence = super()._sequence(number)
        kept = self.sequence_length - int(self.sequence_length * (number * _GOLDEN % 1) * 2 / 3)
        if number in self.unlabelled:
            kept = 0
        ids, labels = sequence["input_ids"].copy(), sequence["labels"].copy()
        labels[kept:] = IGNORE
        if self.starves and number // self.microbatch_size % 3 == 1:
            ids[:] = ids[0]
        elif number < self.global_batch_size and self.words:
            words = self._words_by_sequence[number]
            ids[_places(labels)[: len(words)]] = words
            targets = labels[:-1] != IGNORE
            labels[:-1][targets] = ids[1:][targets]
        columns = {name: sequence[name].copy() for name, column in self.store.tensors.items() if column.per == "token"}
        for column in columns.values():
            column[labels == IGNORE] = 0
        return {**sequence, "input_ids": ids, "labels": labels, **columns}

    @cached_property
    def _words_by_sequence(self) -> dict[int, tuple[int, ...]]:
        """The token ids that are put into each sequence of the first step: as many as fit, in their order."""
        words, self.words = self.words, ()  # `_sequence` below must not insert them
        by_sequence, begin = {}, 0
        for number in range(self.global_batch_size):
            starved = self.starves and number // self.microbatch_size % 3 == 1
            room = 0 if starved or begin == len(words) else len(_places(self._sequence(number)["labels"]))
            by_sequence[number] = words[begin : begin + room]
            begin += len(by_sequence[number])
        self.words = words
        return by_sequence


def _places(labels: Integers) -> npt.NDArray[np.intp]:
    """Return the positions of the tokens that are a label and that have a valid label: as inputs they get a gradient."""
    counts = labels != IGNORE
    return np.flatnonzero(counts[:-1] & counts[1:]) + 1


def whole_sequences(batch: dict[str, torch.Tensor], plan: ShardingPlan, mesh: ParallelMesh) -> dict[str, torch.Tensor]:
    """Return what the ranks of `cp` were fed of a batch together, in the order of the sequences. All of them call this."""
    if plan.layout.size("cp") == 1:
        return batch
    rows, length = batch["input_ids"].shape
    whole = {name: one for name, one in batch.items() if name.startswith(CANVAS)}
    parts = {
        name: one for name, one in batch.items() if name not in (ROUTED, EXISTS, *whole) and one.shape[:2] == (rows, length)
    }
    return {**{name: join_sequences(plan, mesh, one) for name, one in parts.items()}, **whole}


def gathered_batches(batches: list[dict[str, torch.Tensor]], ranks: int) -> list[dict[str, torch.Tensor]]:
    """Return for each number of a microbatch those of all data ranks as one batch, as an objective that gathers sees them.

    Args:
        batches: the microbatches of all data ranks, one rank after another.
        ranks: number of data ranks.
    """
    each = len(batches) // ranks
    return [_in_one([batches[rank * each + number] for rank in range(ranks)]) for number in range(each)]


def _in_one(batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the rows of several batches as one. What has a column for each document gets as many as any of them has."""
    columns = {name: max(batch[name].shape[1] for batch in batches) for name in batches[0]}

    def wide(tensor: torch.Tensor, name: str) -> torch.Tensor:
        more = tensor.new_zeros(len(tensor), columns[name] - tensor.shape[1], *tensor.shape[2:])
        return torch.cat([tensor, more], 1)

    return {name: torch.cat([wide(batch[name], name) for batch in batches]) for name in batches[0]}


def sequence_digests(batches: list[dict[str, torch.Tensor]], length: int) -> list[str]:
    """Return the digests of each sequence in some microbatches: ``NAME=DIGEST`` for tensors with a number for each token.

    So have canvases, of which every rank of `cp` has the whole.

    Padding after ``length`` does not count. :func:`unlike` compares them.
    """
    digests = []
    for batch in batches:
        shape = batch["input_ids"].shape
        names = sorted(
            name
            for name, tensor in batch.items()
            if (tensor.shape[:2] == shape or name.startswith(CANVAS)) and name != EXISTS and not tensor.is_floating_point()
        )
        for row in range(shape[0]):
            rows = {name: batch[name][row] if name.startswith(CANVAS) else batch[name][row, :length] for name in names}
            parts = {name: values.cpu().numpy().tobytes() for name, values in rows.items()}
            digests.append(" ".join(f"{name}={hashlib.sha256(part).hexdigest()[:16]}" for name, part in parts.items()))
    return digests


def unlike(one: str, other: str) -> list[str]:
    """Return the names of the inputs in which two sequences differ."""
    mine, theirs = (dict(part.split("=") for part in digests.split()) for digests in (one, other))
    return sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))


def documents_of_run(
    config: RunConfig, vocabulary: int, sequence_length: int, directory: Path, routes: Routes | None = None
) -> TokenStore:
    """Return the first documents of a run's source, tokenized as in the run and cut to different lengths.

    Args:
        config: the original configuration of the run.
        vocabulary: vocabulary size of the audited model; if the model was shrunk, larger ids are taken modulo this size.
        sequence_length: number of tokens in a sequence of the audit.
        directory: directory to write in.
        routes: how many experts the audited model has, if it was shrunk and rows say which ones tokens went to.

    Raises:
        MeshwrightError: the errors of the source and of the tokenizer that `train` would raise.
    """
    limit = min(config.data.max_documents or DOCUMENTS, DOCUMENTS)
    # The share of bad rows may be larger among the first rows than among all. A run that skips bad rows is judged by all.
    lenient = {"bad_rows_limit": 1.0} if config.data.bad_rows == "skip" else {}
    few = config.data.model_copy(update={"max_documents": limit, "eval_fraction": 0.0, "eval_files": [], **lenient})
    tokenizer = build_tokenizer(
        config.tokenizer,
        few,
        model_path=config.model.local or config.model.path,
        default_vocab_size=(config.model.config or {}).get("vocab_size"),
        trust_remote_code=config.model.trust_remote_code,
        cache_dir=directory / "datasets-cache",
    )
    source = prepare(few, tokenizer, directory / "source", config.training.seed)
    lengths = _uneven_lengths(sequence_length, config.training.seed)
    tensors, stored = source.tensors, dict(source.values)
    if routes is not None:
        tensors, stored[ROUTED_EXPERTS] = routes.columns(tensors), routes.fit(stored[ROUTED_EXPERTS])
    tokens, masks, values, seconds = [], [], [], []
    for number, (begin, end) in enumerate(zip(source.offsets[:-1], source.offsets[1:], strict=True)):
        if source.seconds is None:
            pieces = [(np.arange(*cut), 0) for cut in _cuts(int(begin), int(end), lengths)]
        else:
            pieces = [_pair(int(begin), int(begin + source.seconds[number]), int(end), lengths)]
        for places, second in pieces:
            mask = None if source.loss_mask is None else np.asarray(source.loss_mask[places])
            if mask is None or mask[1:].any():
                tokens.append(np.asarray(source.tokens[places], dtype=np.int64) % vocabulary)
                masks.append(mask)
                seconds.append(second)
                values.append(
                    {
                        name: found[number] if source.tensors[name].per == "document" else found[places]
                        for name, found in stored.items()
                    }
                )
    return write_documents(
        directory / "documents",
        tokens,
        None if source.loss_mask is None else [mask for mask in masks if mask is not None],
        sequence_length=sequence_length,
        pad_token_id=source.index.pad_token_id % vocabulary,
        tensors=tensors,
        values=values,
        seconds=None if source.seconds is None else seconds,
    )


def _pair(begin: int, second: int, end: int, lengths: Iterator[int]) -> tuple[npt.NDArray[np.intp], int]:
    """Return the places of the last tokens of both members of a pair, its answers, and how many are the first's."""
    first, other = (max(2, next(lengths) // 2) for _ in range(2))
    places = np.r_[max(begin, second - first) : second, max(second, end - other) : end]
    return places, int((places < second).sum())


def draw_documents(
    vocabulary: int,
    sequence_length: int,
    count: int,
    seed: int,
    directory: Path,
    longest: int | None = None,
    tensors: Mapping[str, TensorColumn] | None = None,
    pairs: bool = False,
) -> TokenStore:
    """Return documents of random tokens, of different lengths; most are below ``longest``, or below a sequence.

    With ``pairs``, each is two documents, of at least two tokens.

    Columns have random values, of which :func:`~meshwright.objectives.trying.invented.invented` says what they can mean.
    """
    draw = np.random.default_rng(seed)
    lengths = _uneven_lengths(longest or sequence_length, seed)
    tokens = [draw.integers(0, vocabulary, max(4 if pairs else 2, next(lengths)), dtype=np.int64) for _ in range(count)]
    seconds = [int(draw.integers(2, len(ids) - 1)) for ids in tokens] if pairs else None
    values = [{name: _drawn(draw, name, one, len(ids)) for name, one in (tensors or {}).items()} for ids in tokens]
    return write_documents(
        directory, tokens, None, sequence_length=sequence_length, tensors=tensors, values=values, seconds=seconds
    )


def _drawn(draw: np.random.Generator, name: str, column: TensorColumn, tokens: int) -> npt.NDArray[Any]:
    shape = (*(() if column.per == "document" else (tokens,)), *shape_of(column))
    if column.dtype == "int64":
        if column.width is not None and name.endswith("ids"):
            return np.asarray(draw.integers(0, 2, (*shape[:-1], 1)) + np.arange(column.width))
        return np.asarray(draw.integers(column.absent, 2, shape))
    found = np.asarray(draw.uniform(0.0, 1.0, shape))
    return -found - math.log(column.width or 1) if name.endswith("log_probs") else found


def _uneven_lengths(sequence_length: int, seed: int) -> Iterator[int]:
    """Yield lengths of documents. Most are below a sequence, so that several meet in it; some continue in the next one."""
    draw = np.random.default_rng([seed, 1])
    while True:
        yield int(draw.integers(2, max(3, sequence_length * 4 // 5)))


def _cuts(begin: int, end: int, lengths: Iterator[int]) -> Iterator[tuple[int, int]]:
    while end - begin >= 2:
        last = min(end, begin + next(lengths))
        yield begin, last
        begin = last

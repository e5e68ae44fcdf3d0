"""Which sequences a rank gets in which optimizer step.

The stream of sequences is endless and global: epoch after epoch, each in the order given by seed and epoch. Optimizer step s is
the block of `global_batch_size` sequences from ``s * global_batch_size`` on, and rank r of R takes the r-th of R equal slices
of it. So the number of ranks and the size of a microbatch change which rank computes a sequence, but never which sequences are
in a step. A loader needs only the number of the step to resume.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from meshwright.data.identity import differences
from meshwright.data.packing import IGNORE, SequenceDataset
from meshwright.data.store import TokenStore
from meshwright.errors import CheckpointError, ConfigError, Refusal, number_of

if TYPE_CHECKING:
    import torch

__all__ = ["EvalLoader", "TrainLoader", "check_batch_sizes"]

Batch = dict[str, "torch.Tensor"]
Values = npt.NDArray[Any]

_DECIDE = {
    "seed": "training.seed",
    "global_batch_size": "training.global_batch_size",
    "sequence_length": "data.sequence_length",
    "packing": "data.packing",
    "shuffle": "data.shuffle",
}
"""What decides the order of sequences: name in the state of a loader to key of the configuration."""


def check_batch_sizes(global_batch_size: int, microbatch_size: int, data_ranks: int) -> None:
    """Refuse batch sizes that do not divide evenly.

    Raises:
        ConfigError: `global_batch_size` is no positive multiple of `microbatch_size` times `data_ranks`.
    """
    for name, value in (("global_batch_size", global_batch_size), ("microbatch_size", microbatch_size)):
        if value < 1:
            raise ConfigError("config.value", f"{name}={value}: must be at least 1")
    unit = microbatch_size * data_ranks
    if global_batch_size % unit == 0:
        return
    below, above = global_batch_size // unit * unit, -(-global_batch_size // unit) * unit
    legal = f"{below} or {above}" if below else str(above)
    message = (
        f"global_batch_size={global_batch_size} is no multiple of microbatch_size={microbatch_size} x "
        f"{number_of(data_ranks, 'data rank')} = {unit}; nearest legal: {legal}"
    )
    if global_batch_size % data_ranks == 0:
        share = global_batch_size // data_ranks
        divisors = ", ".join(str(size) for size in range(1, share + 1) if share % size == 0)
        message += f"; or microbatch_size one of {divisors}"
    raise ConfigError("config.batch_size", message)


def _check_rank(data_rank: int, data_ranks: int) -> None:
    if not 0 <= data_rank < data_ranks:
        raise ConfigError("layout.rank", f"data_rank={data_rank}: legal are 0 to {data_ranks - 1}")


def _collate(sequences: list[dict[str, Values]], dataset: SequenceDataset, multiple: int) -> Batch:
    """Stack sequences, padded at the end to a length that is a multiple of `multiple`."""
    import torch

    batch = {key: np.stack([sequence[key] for sequence in sequences]) for key in sequences[0]}
    if lacking := -dataset.sequence_length % multiple:
        # As within a sequence: in a packed one, padding is a segment of its own; otherwise positions continue.
        begin = 0 if dataset.packing == "pack" or dataset.store.index.pairs else dataset.sequence_length
        filler = {
            "input_ids": np.full(lacking, dataset.store.index.pad_token_id),
            "labels": np.full(lacking, IGNORE),
            "position_ids": np.arange(begin, begin + lacking),
        }

        absent = {name: column.absent for name, column in dataset.store.tensors.items()}

        def more(key: str, rows: Values) -> Values:
            shape = (len(rows), lacking, *rows.shape[2:])
            return np.broadcast_to(filler.get(key, np.asarray(absent.get(key, 0), rows.dtype)), shape)

        batch = {key: np.concatenate([rows, more(key, rows)], axis=1) for key, rows in batch.items()}
    return {key: torch.from_numpy(rows) for key, rows in batch.items()}


class TrainLoader:
    """Microbatches of one data rank, as a function of the optimizer step. The loader stores no position.

    Args:
        store: tokenized documents.
        sequence_length: number of tokens in a sequence.
        global_batch_size: number of sequences in an optimizer step, over all ranks.
        microbatch_size: number of sequences in one forward and backward of one rank.
        data_rank: which part of the data this process reads (its coordinate on the `dp` axes).
        data_ranks: number of parts.
        seed: decides the order.
        packing: "pack" or "pad".
        shuffle: shuffle documents and sequences again in each epoch.
        multiple: the length of a batch must be a multiple of this (sequence and context parallel). It is padded, the labels of
            padding do not count, and the state of the loader does not depend on it.

    Attributes:
        accumulation: number of microbatches in a step.

    Raises:
        ConfigError: batch sizes that do not divide evenly, or a rank that does not exist.
        DataError: there is nothing to train on.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        sequence_length: int,
        global_batch_size: int,
        microbatch_size: int,
        data_rank: int = 0,
        data_ranks: int = 1,
        seed: int = 0,
        packing: Literal["pack", "pad"] = "pack",
        shuffle: bool = True,
        multiple: int = 1,
    ) -> None:
        _check_rank(data_rank, data_ranks)
        check_batch_sizes(global_batch_size, microbatch_size, data_ranks)
        self.store, self.sequence_length, self.packing = store, sequence_length, packing
        self.global_batch_size, self.microbatch_size = global_batch_size, microbatch_size
        self.data_rank, self.data_ranks = data_rank, data_ranks
        self.seed, self.shuffle, self.multiple = seed, shuffle, multiple
        self.accumulation = global_batch_size // (microbatch_size * data_ranks)
        self._epochs: dict[int, SequenceDataset] = {}
        self._starts = [0]  # the global number of each epoch's first sequence, as far as known
        self._dataset(0)

    def microbatches(self, step: int) -> list[Batch]:
        """Return the share of this rank in a step: `accumulation` batches of [microbatch_size, sequence_length, padded].

        Tensors are int64 and on the CPU. Keys are input_ids, labels (shifted, -100 for positions without a target) and
        position_ids; and the names of the store's columns [..., their width], float32 or int64.
        """
        return [
            _collate([self._sequence(number) for number in numbers], self._dataset(self.epoch(step)), self.multiple)
            for numbers in self.numbers(step)
        ]

    def numbers(self, step: int) -> list[range]:
        """Return the numbers of the sequences of each microbatch, in the stream of all sequences of the run.

        The same sequence of the same run has the same number on every layout.
        """
        share = self.global_batch_size // self.data_ranks
        begin = step * self.global_batch_size + self.data_rank * share
        return [range(at, at + self.microbatch_size) for at in range(begin, begin + share, self.microbatch_size)]

    def epoch(self, step: int) -> int:
        """Return the epoch of the first sequence of a step, counted from 0."""
        return self._locate(step * self.global_batch_size)[0]

    def epochs(self, steps: int) -> float:
        """Return how many epochs are seen after this many optimizer steps, such as 1.25."""
        number = steps * self.global_batch_size
        while number > self._starts[-1]:
            self._dataset(len(self._starts) - 1)
        epoch = bisect_right(self._starts, number) - 1
        begin = self._starts[epoch]
        return float(epoch) if number == begin else epoch + (number - begin) / (self._starts[epoch + 1] - begin)

    def sequences(self, epochs: float) -> int:
        """Return the number of sequences in this many epochs, from the first one on. For a part of an epoch, round up."""
        full = int(epochs)
        while len(self._starts) <= full + (epochs > full):
            self._dataset(len(self._starts) - 1)
        begin = self._starts[full]
        return begin if epochs == full else begin + math.ceil((epochs - full) * (self._starts[full + 1] - begin))

    def steps(self, epochs: float) -> int:
        """Return the number of optimizer steps for this many epochs. The last one is filled from the next epoch.

        It is the same on every layout.
        """
        return -(-self.sequences(epochs) // self.global_batch_size)

    def state_dict(self, next_step: int) -> dict[str, Any]:
        """Return the position of a run in its data, and what the data are. It is the same on every rank and layout."""
        return {
            "next_step": next_step,
            "seed": self.seed,
            "fingerprint": self.store.fingerprint,
            "data": self.store.index.parts,
            "global_batch_size": self.global_batch_size,
            "sequence_length": self.sequence_length,
            "packing": self.packing,
            "shuffle": self.shuffle,
        }

    def check_state(self, state: dict[str, Any]) -> int:
        """Return the step to continue with after another loader of the same data, with any ranks and microbatches.

        Documents to evaluate on may be others.

        Raises:
            CheckpointError: the state is that of other data, another order or another batch size: resuming would repeat some
                sequences and skip others.
        """
        own = self.state_dict(0)
        missing = [key for key in own if key not in state and key != "data"]
        if missing:
            raise CheckpointError("checkpoint.loader", f"state of the data loader lacks {', '.join(missing)}")
        problems = [
            Refusal(
                "checkpoint.loader", f"data loader: the checkpoint has {key}={state[name]!r}, this run has {key}={own[name]!r}"
            )
            for name, key in _DECIDE.items()
            if state[name] != own[name]
        ]
        problems += self._other_data(state, alone=not problems)
        if problems:
            raise CheckpointError(problems)
        return int(state["next_step"])

    def _other_data(self, state: dict[str, Any], alone: bool) -> list[Refusal]:
        """Say why the tokens to train on are not those of a state; `alone`: nothing else differs that may be the reason."""
        index = self.store.index
        if state.get("data") and index.parts:
            lines = differences(state["data"], index.parts)
            if lines is None:
                return []
            unknown = "the tokens to train on are others, with the same source and configuration: another version wrote them"
            return [Refusal("checkpoint.data", f"data loader: {line}") for line in lines or ([unknown] if alone else [])]
        if state["fingerprint"] != index.fingerprint:
            found = f"the checkpoint has fingerprint={state['fingerprint']!r}, this run has fingerprint={index.fingerprint!r}"
            why = "documents (also those of data.eval_files), tokenizer, training.seed or other keys of data differ"
            return [Refusal("checkpoint.data", f"data loader: {found}: {why}; the checkpoint does not say which")]
        read = [name for name, count in index.given.items() if index.unwritten.get(name, 0) < count]
        if read := [*read, *(["weight"] if index.unlearned else [])]:
            return [
                Refusal(
                    "checkpoint.data",
                    f"data loader: {', '.join(read)} of chats: the run of the checkpoint did not read them, this version does",
                )
            ]
        return []

    def _sequence(self, number: int) -> dict[str, Values]:
        epoch, local = self._locate(number)
        return self._dataset(epoch)[local]

    def _locate(self, number: int) -> tuple[int, int]:
        """Return the epoch of a global sequence, and its number in the epoch.

        The number of sequences of an epoch is known only after the epoch is packed.
        """
        while number >= self._starts[-1]:
            self._dataset(len(self._starts) - 1)
        epoch = bisect_right(self._starts, number) - 1
        return epoch, number - self._starts[epoch]

    def _dataset(self, epoch: int) -> SequenceDataset:
        """Return the sequences of an epoch. A step may have sequences of two epochs, so two are kept."""
        if epoch not in self._epochs:
            while len(self._epochs) >= 2:
                self._epochs.pop(next(iter(self._epochs)))
            self._epochs[epoch] = SequenceDataset(
                self.store, "train", self.sequence_length, self.packing, self.seed, epoch, self.shuffle
            )
        dataset = self._epochs[epoch]
        if epoch == len(self._starts) - 1:
            self._starts.append(self._starts[-1] + len(dataset))
        return dataset


class EvalLoader:
    """Batches of held-out sequences: the same number on every rank, so that collectives match.

    A rank with too few sequences gets some whose labels are all -100. They cost a forward, and do not count.

    Args:
        dataset: held-out sequences.
        microbatch_size: number of sequences in a batch.
        data_rank: which part this process reads.
        data_ranks: number of parts.
        max_sequences: stop after this many sequences, over all ranks.
        multiple: see :class:`TrainLoader`.

    Raises:
        ConfigError: sizes below 1, or a rank that does not exist.
    """

    def __init__(
        self,
        dataset: SequenceDataset,
        microbatch_size: int,
        data_rank: int = 0,
        data_ranks: int = 1,
        max_sequences: int | None = None,
        multiple: int = 1,
    ) -> None:
        _check_rank(data_rank, data_ranks)
        for name, value in (("microbatch_size", microbatch_size), ("max_sequences", max_sequences)):
            if value is not None and value < 1:
                raise ConfigError("config.value", f"{name}={value}: must be at least 1")
        self.dataset, self.microbatch_size = dataset, microbatch_size
        self.data_rank, self.data_ranks, self.multiple = data_rank, data_ranks, multiple
        self.sequences = len(dataset) if max_sequences is None else min(max_sequences, len(dataset))

    def __len__(self) -> int:
        """Return the number of batches on every rank."""
        return -(-self.sequences // (self.microbatch_size * self.data_ranks))

    def __iter__(self) -> Iterator[Batch]:
        for batch in range(len(self)):
            yield _collate([self._sequence(number) for number in self.numbers(batch)], self.dataset, self.multiple)

    def numbers(self, batch: int) -> range:
        """Return the numbers of the sequences of a batch of this rank, among all held-out ones. Larger numbers are filler."""
        begin = (batch * self.data_ranks + self.data_rank) * self.microbatch_size
        return range(begin, begin + self.microbatch_size)

    def _sequence(self, number: int) -> dict[str, Values]:
        if number < self.sequences:
            return self.dataset[number]
        filler = self.dataset[0]
        columns = {name: np.full_like(filler[name], column.absent) for name, column in self.dataset.store.tensors.items()}
        return filler | {"labels": np.full_like(filler["labels"], IGNORE)} | columns

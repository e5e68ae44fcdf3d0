"""The pass over all tokens of a store: what the model says of each, on any layout, without gradient."""

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.data.packing import SequenceDataset
from meshwright.data.rows.columns import TensorColumn
from meshwright.data.scores import EveryToken, Scores, Split, join_parts, part_file
from meshwright.data.store import TokenStore
from meshwright.distributed.context.sequences import join_sequences
from meshwright.distributed.process_group import from_rank_0
from meshwright.errors import DataError, Refusal, described, number_of
from meshwright.files import honour_umask, put_in_place
from meshwright.models.objective import Batch
from meshwright.objectives import given
from meshwright.objectives.running import running
from meshwright.terminal import console
from meshwright.train.engine.steps import StepEngine

__all__ = ["LOG_PROBS", "TOP_IDS", "TOP_LOG_PROBS", "PassLines", "score_columns", "score_store"]

LOG_PROBS, TOP_IDS, TOP_LOG_PROBS = "log_probs", "top_ids", "top_log_probs"
"""The columns: of each token as a label; of the likeliest words in its place."""

SECONDS = 10.0
"""Between two lines about a pass."""
GROUP = 8
"""Batches whose values are on the device before they are written: through stages, several are under way."""


def score_columns(top_k: int = 0, prefix: str = "") -> dict[str, TensorColumn]:
    """Return the columns that :func:`score_store` writes, by name."""
    columns = {f"{prefix}{LOG_PROBS}": TensorColumn(per="token")}
    if top_k:
        columns[f"{prefix}{TOP_IDS}"] = TensorColumn(per="token", width=top_k, dtype="int64")
        columns[f"{prefix}{TOP_LOG_PROBS}"] = TensorColumn(per="token", width=top_k)
    return columns


@torch.no_grad()
def score_store(
    engine: StepEngine,
    store: TokenStore,
    directory: Path,
    model: Mapping[str, Any],
    *,
    top_k: int = 0,
    prefix: str = "",
    progress: Callable[[int, int], None] = lambda done, batches: None,
) -> Scores:
    """Compute what the model of an engine says of all tokens of a store, and write it. All ranks call it.

    Each token but the first of a document gets its log-probability in nats, also where it is not to be learned. Documents meet
    in sequences as in an evaluation: in the order of the store, packed or padded as the run says.

    Args:
        engine: its model is called as it is, in evaluation mode.
        store: the tokens; those to train on and those that are held out.
        directory: where to write. It appears when it is complete; an earlier one is replaced.
        model: what the model is, as plain values, for the index.
        top_k: number of the likeliest words to write with their log-probabilities; 0: none.
        prefix: of the names of the columns.
        progress: called on all ranks with the numbers of batches that are done, and of all.

    Raises:
        DataError: on all ranks, if the values cannot be written.
    """
    columns = score_columns(top_k, prefix)
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=2))  # joining the parts takes one process long
    splits: list[Split] = [split for split in ("train", "eval") if len(store.documents(split))]
    datasets = {split: _dataset(engine, store, split) for split in splits}
    temporary = Path(_on_rank_0(patient, directory, lambda: _temporary(directory)))
    written = _Parts(engine, temporary, columns, patient)
    try:
        batches, done = sum(len(_loader(engine, dataset)) for dataset in datasets.values()), 0
        for split, dataset in datasets.items():
            loader = _loader(engine, dataset)
            on_host = iter(loader)
            for begin in range(0, len(loader), GROUP):
                group = list(islice(on_host, GROUP))
                engine.progress(f"the log-probabilities of tokens, batch {done + 1} of {batches}")
                numbers = [loader.numbers(begin + index) for index in range(len(group))]
                written.add(split, numbers, loader, _values(engine, group, top_k))
                done += len(group)
                progress(done, batches)

        def join() -> str:
            parts = {
                (split, rank): _loader(engine, dataset, rank)
                for split, dataset in datasets.items()
                for rank in range(engine.setup.layout.size("dp"))
            }
            join_parts(temporary, store, columns, parts, model)
            honour_umask(temporary)
            put_in_place(temporary, directory, temporary.with_name(f"{temporary.name}-old"))
            return str(directory)

        engine.progress("the log-probabilities of tokens, joined")
        return Scores.open(Path(_on_rank_0(patient, directory, join)), store)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)


def _dataset(engine: StepEngine, store: TokenStore, split: Split) -> SequenceDataset:
    data = engine.config.data
    return SequenceDataset(store, split, data.sequence_length, data.packing, shuffle=False)


def _loader(engine: StepEngine, dataset: SequenceDataset, data_rank: int | None = None) -> EveryToken:
    return EveryToken(
        dataset,
        engine.config.training.microbatch_size,
        engine.mesh.rank("dp") if data_rank is None else data_rank,
        engine.setup.layout.size("dp"),
        multiple=engine.setup.plan.sequence_multiple,
    )


def _values(engine: StepEngine, on_host: Sequence[Batch], top_k: int) -> list[list[torch.Tensor]]:
    """Return the columns of whole sequences of some batches, on the host; none on a rank without the last stage."""
    call = replace(engine.runner.call(), wanted=frozenset({LOG_PROBS}), trains=False)

    def values(model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        with running(call):
            top = given.top_k(model, batch, top_k) if top_k else ()
            found = [given.log_probs(model, batch), *top]
            return {str(number): one for number, one in enumerate(found)}

    batches = [engine.batches.to_device(engine.batches.cut(batch)) for batch in on_host]
    found = engine.runner.forwards(batches, values, nullcontext)
    return [[join_sequences(engine.setup.plan, engine.mesh, one).cpu() for one in of.values()] for of in found]


class PassLines:
    """Lines about the pass of a run: some while it is under way, and one at its end.

    Args:
        what: what it is for, the first word of each line.
        tokens: number of tokens.
        speaks: whether to print them.
    """

    def __init__(self, what: str, tokens: int, *, speaks: bool) -> None:
        self.what, self.tokens, self.page = what, tokens, console(quiet=not speaks)
        self.began = self.said = time.monotonic()

    def progress(self, done: int, batches: int) -> None:
        """Say how many batches are done, and how long the others will take; not too often."""
        now = time.monotonic()
        if now - self.said > SECONDS and done < batches:
            self.said = now
            left = (now - self.began) * (batches - done) / done
            self._say(f"{self.what}: {done:,} of {number_of(batches, 'batch')}, left {int(left) // 60}:{int(left) % 60:02}")

    def done(self, directory: Path) -> None:
        """Say that the values are there."""
        seconds = time.monotonic() - self.began
        self._say(f"{self.what}: log-probabilities of {number_of(self.tokens, 'token')} in {seconds:.1f} s, {directory}")

    def _say(self, line: str) -> None:
        self.page.print(line, highlight=False, markup=False, soft_wrap=True)


class _Parts:
    """The files with the values of this data rank, which one of its ranks writes.

    Args:
        engine: the engine.
        directory: where they are.
        columns: name to what each column is.
        group: all ranks.
    """

    def __init__(
        self, engine: StepEngine, directory: Path, columns: Mapping[str, TensorColumn], group: dist.ProcessGroup
    ) -> None:
        mesh = engine.mesh
        self.directory, self.columns, self.group = directory, columns, group
        self.data_rank, self.writes = mesh.rank("dp"), mesh.rank("tp") == 0 and mesh.rank("cp") == 0
        if plan := engine.setup.plan.stages:
            self.writes &= mesh.rank("pp") == plan[-1].rank

    def add(
        self, split: Split, numbers: Sequence[Sequence[int]], loader: EveryToken, found: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        """Write the values of some batches, whose sequences have these numbers. All ranks call it, and all fail if one does."""
        failure = ""
        try:
            for index, (name, column) in enumerate(self.columns.items() if self.writes else ()):
                with part_file(self.directory, name, split, self.data_rank).open("ab") as file:
                    for rows, values in zip(numbers, found, strict=True):
                        array = values[index].numpy().astype(column.dtype)
                        for row, number in enumerate(rows):
                            places = loader.targets(number)
                            file.write(array[row, : len(places)][places >= 0].tobytes())
        except OSError as error:
            failure = described(error, self.directory)
        if int(_sum(bool(failure), self.group)):
            failures: list[str] = [""] * dist.get_world_size()
            dist.all_gather_object(failures, failure, group=self.group)
            raise DataError([_unwritten(self.directory, one) for one in dict.fromkeys(failures) if one])


def _sum(number: int, group: dist.ProcessGroup) -> torch.Tensor:
    total = torch.tensor(number)
    dist.all_reduce(total, group=group)
    return total


def _unwritten(directory: Path, why: str) -> Refusal:
    return Refusal("data.store.unwritten", f"{directory}: the values of tokens cannot be written: {why}")


def _on_rank_0(group: dist.ProcessGroup, directory: Path, work: Callable[[], str]) -> str:
    return from_rank_0(work, lambda error: DataError([_unwritten(directory, described(error, directory))]), group)


def _temporary(directory: Path) -> str:
    directory.parent.mkdir(parents=True, exist_ok=True)
    return tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent)

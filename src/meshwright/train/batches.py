"""The microbatches of this rank: its sequences, of each its part, on its device."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from meshwright.data.loader import EvalLoader
from meshwright.data.rows.columns import MEMBER
from meshwright.device import Ability, able
from meshwright.distributed.context.sequences import share_batch
from meshwright.files import save_tensors
from meshwright.models.moved_batch import move_batch
from meshwright.models.objective import ROUTED, Batch, Objective
from meshwright.models.token_loss import count_tokens
from meshwright.objectives.call import calling
from meshwright.objectives.documents import most_documents, number_documents
from meshwright.objectives.trying.invented import spread_of
from meshwright.train.parts import RankSetup
from meshwright.train.run_objective import columns_of

__all__ = ["RankBatches", "write_batches"]


class RankBatches:
    """Makes the microbatches that the objective asks for.

    Args:
        run: the run on this rank.
        objective: what the model is trained to do.
    """

    def __init__(self, run: RankSetup, objective: Objective) -> None:
        self.objective, self.device, self.mesh = objective, run.device, run.mesh
        able(run.device.type, Ability.PINNED)  # tried now, and not in the first step
        self.data = run.config.data
        self.spread = spread_of(columns_of(run.config))
        self.shares = run.plan.layout.size("cp") > 1
        self.cut = partial(share_batch, run.plan, run.mesh.rank("cp"))  # once: a slice of a mesh reads a tensor

    def training(self, batches: list[Batch], numbers: Sequence[Sequence[int]]) -> list[Batch]:
        """Return this rank's part of the microbatches of a step, on the host.

        Args:
            batches: whole sequences, on the host.
            numbers: for each microbatch, the numbers of its sequences in the stream of all sequences of the run.
        """
        with calling(self.objective, "training"):
            whole = self.objective.training(batches, numbers)
        return [self.share(batch) for batch in whole]

    def held_out(self, loader: EvalLoader, progress: Callable[[], None]) -> Iterator[Batch]:
        """Yield this rank's part of what is held out, on the host; ``progress`` is called before each batch."""
        for index, batch in enumerate(loader):
            progress()
            with calling(self.objective, "held_out"):
                whole = self.objective.held_out(batch, loader.numbers(index))
            yield self.share(whole)

    def share(self, batch: Batch) -> Batch:
        """Return this rank's part of each sequence of a batch, which is on the host; without context parallel, all of it."""
        routed = self.objective.routed(batch) if self.shares else None
        known = {} if routed is None else {ROUTED: routed}
        spread = [name for name in dict.fromkeys((*self.spread, MEMBER)) if name in batch]
        numbered = self.objective.documents or spread
        most = most_documents(self.objective, self.data.packing, self.data.sequence_length)
        documents = number_documents(batch, most, spread) if numbered else {}
        return self.cut({**batch, **known, **documents})

    def counts(self, batches: list[Batch]) -> torch.Tensor:
        """Return the number of targets of each term; then of tokens that are learned, and of those that balance experts."""
        routed = sum(int(mask.sum()) for batch in batches if (mask := self.objective.routed(batch)) is not None)
        with calling(self.objective, "counts"):
            counts = list(self.objective.counts(batches))
        learned = counts[0] if self.objective.unit == "token" else count_tokens(batches)
        return torch.tensor([*counts, learned, routed])

    def to_device(self, batch: Batch) -> Batch:
        """Return a batch on the device of this rank."""
        return move_batch(batch, self.device)


def write_batches(batches: list[Batch], file: Path) -> None:
    """Write microbatches to a file, as rows of one batch."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_tensors({name: _stacked([batch[name] for batch in batches]) for name in batches[0]}, file)


def _stacked(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate the rows of several microbatches; shorter rows are padded with zeros at their end."""
    columns = max(tensor.shape[1] for tensor in tensors)
    deeper = (0, 0) * (tensors[0].ndim - 2)
    return torch.cat([nn.functional.pad(tensor, (*deeper, 0, columns - tensor.shape[1])) for tensor in tensors])

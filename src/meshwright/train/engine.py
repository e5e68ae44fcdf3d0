"""Engines, which run the microbatches of a step on this rank's part of the model.

The trainer defines the order of a step; an engine defines the order of the forwards and backwards in it. :class:`Sequential`
runs one microbatch after another through one model.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from meshwright.distributed.data.grad_sync import GradSync
from meshwright.distributed.experts.balance import Balance
from meshwright.distributed.grad_clip import clip_grad_norm_
from meshwright.distributed.mesh import ParallelMesh
from meshwright.models.objective import Batch, Objective
from meshwright.models.token_loss import forward_logits

__all__ = ["Batch", "Engine", "Sequential", "Sums"]

LOSS = "loss"
"""Name of the training loss among the sums."""


class Sums:
    """Named numbers of a step, each summed over the microbatches of this rank."""

    def __init__(self) -> None:
        self.values: dict[str, torch.Tensor] = {}

    def add(self, name: str, value: torch.Tensor) -> None:
        """Add a scalar, detached from its graph. Not in place, so that the result has the more precise of the two dtypes."""
        self.values[name] = value.detach() + self.values[name] if name in self.values else value.detach()

    def over_ranks(self, mesh: ParallelMesh) -> dict[str, torch.Tensor]:
        """Return the sums over all data ranks, by one all-reduce."""
        return dict(zip(self.values, mesh.sum(torch.stack(list(self.values.values()))), strict=True))


class Engine(ABC):
    """Runs microbatches. All ranks call every method.

    Attributes:
        objective: what the model is trained to do.
        balance: balance of the experts that this rank runs.
    """

    objective: Objective
    balance: Balance

    @property
    def reported_terms(self) -> tuple[str, ...]:
        """Names of the terms of the loss, if there are several."""
        names = tuple(self.objective.terms)
        return names if len(names) > 1 else ()

    def loss(self, model: nn.Module, batch: Batch, counts: torch.Tensor, sums: Sums) -> torch.Tensor:
        """Return a microbatch's share of the loss of the step, and add it and its terms to the sums."""
        terms = self.objective.sums(model, batch)
        loss = self.objective.combine(terms, counts) / counts[0]
        sums.add(LOSS, loss)
        for name, term in zip(self.reported_terms, terms, strict=True) if self.reported_terms else ():
            sums.add(name, term)
        return loss

    def routed(self, batch: Batch) -> torch.Tensor | None:
        """Return which tokens count for the balance of the experts that this rank runs, see :meth:`Objective.routed`."""
        return self.objective.routed(batch) if self.balance.counts_tokens else None

    @abstractmethod
    def forward_backward(self, batches: list[Batch], counts: torch.Tensor) -> Sums:
        """Run forward and backward of every microbatch of a step. The gradients are reduced when it returns.

        Args:
            batches: the microbatches of this rank, on its device.
            counts: [terms], number of targets of each term of the loss in the whole step, over all ranks; at least 1.

        Returns:
            This rank's shares of the loss, of its terms if there are several, and of the balance loss of experts.
        """

    @abstractmethod
    def evaluate(self, batches: Iterable[Batch]) -> torch.Tensor:
        """Return each term of the loss, summed over the targets of some batches of this rank, fp64 [terms]. No gradient."""

    @abstractmethod
    def logits(self, batch: Batch) -> torch.Tensor:
        """Return logits [batch, sequence, vocabulary] in evaluation mode, without gradient.

        They are a DTensor if the vocabulary is sharded.
        """

    @abstractmethod
    def clip(self, limit: float | None) -> torch.Tensor:
        """Clip the gradient of the whole model, and return its norm before.

        Args:
            limit: the largest norm of a clipped gradient; ``None`` only measures.
        """


class Sequential(Engine):
    """Runs one microbatch after another through one model.

    Args:
        model: the parallelized model.
        objective: what the model is trained to do.
        sync: decides when the units of the model gather and reduce.
        balance: balance of the model's experts.
        progress: called before each microbatch.
    """

    def __init__(
        self, model: nn.Module, objective: Objective, sync: GradSync, balance: Balance, progress: Callable[[], None]
    ) -> None:
        self.model, self.objective, self.sync, self.balance, self.progress = model, objective, sync, balance, progress

    def forward_backward(self, batches: list[Batch], counts: torch.Tensor) -> Sums:
        """See :class:`Engine`."""
        sums = Sums()
        for _, batch in self.sync.microbatches(batches):
            self.progress()
            with self.balance.microbatch(self.routed(batch)):
                self.loss(self.model, batch, counts, sums).backward()
        for name, value in self.balance.losses().items():
            sums.add(name, value)
        return sums

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> torch.Tensor:
        """See :class:`Engine`."""
        total: torch.Tensor | None = None
        with self._evaluating():
            for batch in batches:
                terms = torch.stack(self.objective.sums(self.model, batch)).double()
                total = terms if total is None else total + terms
        assert total is not None
        return total

    @torch.no_grad()
    def logits(self, batch: Batch) -> torch.Tensor:
        """See :class:`Engine`."""
        with self._evaluating():
            return forward_logits(self.model, batch)

    def clip(self, limit: float | None) -> torch.Tensor:
        """See :class:`Engine`."""
        return clip_grad_norm_(self.model.parameters(), limit)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        training = self.model.training
        self.model.eval()
        try:
            with self.sync.forward_only():
                yield
        finally:
            self.model.train(training)

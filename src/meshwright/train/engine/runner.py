"""Runners, which run the microbatches of a step on this rank's part of the model.

The engine defines the order of a step; a runner defines the order of the forwards and backwards in it. :class:`Sequential`
runs one microbatch after another through one model.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from meshwright.data.rows.columns import ROUTED_EXPERTS
from meshwright.distributed.context.sequences import forget_kept
from meshwright.distributed.data.grad_sync import GradSync
from meshwright.distributed.experts.balance import Balance
from meshwright.distributed.experts.router_replay import Replay
from meshwright.distributed.mesh import ParallelMesh
from meshwright.distributed.update.grad_clip import clip_grad_norm_
from meshwright.models.adapters.adapt import adapters_off
from meshwright.models.objective import Batch, Objective
from meshwright.models.token_loss import forward_logits
from meshwright.objectives.call import Pass, evaluate_batch, passes_before
from meshwright.objectives.running import Running, running
from meshwright.plan.result.sharding_plan import ShardingPlan

__all__ = ["Batch", "Runner", "Sequential", "Sums"]

LOSS = "loss"
"""Name of the training loss among the sums."""

SUM, COUNT = "/sum", "/count"
"""What follows the name of a metric of an objective among the sums."""

Values = Callable[[nn.Module, Batch], Mapping[str, torch.Tensor]]
"""Computes some tensors of a batch."""


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


class Runner(ABC):
    """Runs microbatches. All ranks call every method.

    Attributes:
        model: the model, or the stages of this rank.
        objective: what the model is trained to do.
        plan: the plan of the model.
        mesh: the mesh of its layout.
        balance: balance of the experts that this rank runs.
        replay: gives routers the experts that a batch has; ``None``: batches have none.
        tell: is called with each microbatch and what the model gave for it; ``None``: nobody asks.
        teach: returns batches with what a teacher says of them; ``None``: there is none.
    """

    model: nn.Module
    objective: Objective
    balance: Balance
    plan: ShardingPlan | None = None
    mesh: ParallelMesh | None = None
    replay: Replay | None = None
    tell: Callable[[Batch, dict[str, torch.Tensor]], None] | None = None
    teach: Callable[[Iterable[Batch]], list[Batch]] | None = None

    def prepare(self, rows: int, length: int) -> None:  # noqa: B027 - optional
        """Make buffers for training, before its first step, where those of the plan's sequences are not made yet.

        Args:
            rows: number of sequences in a microbatch.
            length: positions of a whole sequence.
        """

    def call(self) -> Running:
        """Return what the functions that are given to an objective know."""
        return Running(self.plan, self.mesh, self.objective.wanted)

    @property
    def reported_terms(self) -> tuple[str, ...]:
        """Names of the terms of the loss, if there are several."""
        names = tuple(self.objective.terms)
        return names if len(names) > 1 else ()

    @property
    def reported(self) -> tuple[str, ...]:
        """Names of all sums that an objective gives: the loss, its terms, its metrics."""
        metrics = (f"{name}{end}" for name in self.objective.metric_names for end in (SUM, COUNT))
        return (LOSS, *self.reported_terms, *metrics)

    def loss(self, model: nn.Module, batch: Batch, counts: torch.Tensor, sums: Sums) -> torch.Tensor:
        """Return a microbatch's share of the loss of the step, and add it, its terms and the metrics to the sums."""
        terms, metrics = evaluate_batch(self.objective, model, batch, replace(self.call(), tell=self.tell))
        loss = self.objective.combine(terms, counts) / counts[0]
        sums.add(LOSS, loss)
        for name, term in zip(self.reported_terms, terms, strict=True) if self.reported_terms else ():
            sums.add(name, term)
        for name in self.objective.metric_names:
            for end, value in zip((SUM, COUNT), metrics[name], strict=True):
                sums.add(f"{name}{end}", value)
        return loss

    def routed(self, batch: Batch) -> torch.Tensor | None:
        """Return which tokens count for the balance of the experts that this rank runs, see :meth:`Objective.routed`."""
        return self.objective.routed(batch) if self.balance.counts_tokens else None

    @contextmanager
    def using(self, batch: Batch) -> Iterator[None]:
        """Inside, the model is called with a batch: routers choose the experts that it has, if it has some. What attentions
        keep of it for each other (masks) goes at the end.
        """
        given = batch.get(ROUTED_EXPERTS)
        assert given is None or self.replay is not None, "a runner of a plan has it"
        try:
            with nullcontext() if given is None or self.replay is None else self.replay.of(given):
                yield
        finally:
            forget_kept(batch.get("position_ids"))

    @contextmanager
    def training(self, batch: Batch) -> Iterator[None]:
        """Inside are a forward and a backward of a microbatch, whose tokens count for the balance of experts."""
        with self.balance.microbatch(self.routed(batch)), self.using(batch):
            yield

    def evaluated(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the terms of the loss of a batch, and then a sum and a count for each metric, fp64 [terms + 2 metrics]."""
        call = replace(self.call(), trains=False)
        terms, metrics = evaluate_batch(self.objective, model, batch, call)
        return torch.stack(
            [*(term.double() for term in terms), *(v for name in self.objective.metric_names for v in metrics[name])]
        )

    @property
    def size_of_evaluation(self) -> int:
        """How many numbers :meth:`evaluated` returns."""
        return len(self.objective.terms) + 2 * len(self.objective.metric_names)

    def prepared(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """Return batches with what the objective needs of a teacher, and of the model before the step (:func:`passes_before`).

        The trainer calls it before :meth:`forward_backward`. Each pass is a forward of all batches in evaluation mode, without
        gradient. Its values are added on the rank that computes the loss.
        """
        sums = (lambda values: values) if self.mesh is None else self.mesh.sum
        batches = batches if self.teach is None else self.teach(batches)
        for one in passes_before(self.objective):
            batches = list(batches)

            def found(model: nn.Module, batch: Batch, one: Pass = one) -> Mapping[str, torch.Tensor]:
                with running(self.call()):
                    return {name: value.detach() for name, value in one.values(model, batch).items()}

            around = nullcontext if one.adapted else partial(adapters_off, self.model)
            one.add(batches, self.forwards(batches, found, around), sums)
        return batches

    @abstractmethod
    def forwards(
        self, batches: Iterable[Batch], values: Values, around: Callable[[], AbstractContextManager[None]]
    ) -> list[Mapping[str, torch.Tensor]]:
        """Return values of each batch, in evaluation mode, without gradient; none on a rank that does not compute the loss.

        Args:
            batches: the batches.
            values: computes those of one.
            around: what each forward runs in.
        """

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
        """Return what :meth:`evaluated` returns, summed over some batches of this rank. No gradient."""

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


class Sequential(Runner):
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
        """See :class:`Runner`."""
        sums = Sums()
        for _, batch in self.sync.microbatches(batches):
            self.progress()
            with self.training(batch):
                self.loss(self.model, batch, counts, sums).backward()
        for name, value in self.balance.losses().items():
            sums.add(name, value)
        return sums

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> torch.Tensor:
        """See :class:`Runner`."""
        total: torch.Tensor | None = None
        with self._evaluating():
            for batch in self.prepared(batches):
                with self.using(batch):
                    values = self.evaluated(self.model, batch)
                total = values if total is None else total + values
        assert total is not None
        return total

    @torch.no_grad()
    def forwards(
        self, batches: Iterable[Batch], values: Values, around: Callable[[], AbstractContextManager[None]]
    ) -> list[Mapping[str, torch.Tensor]]:
        """See :class:`Runner`."""
        found = []
        with self._evaluating(), around():
            for batch in batches:
                with self.using(batch):
                    found.append(values(self.model, batch))
        return found

    @torch.no_grad()
    def logits(self, batch: Batch) -> torch.Tensor:
        """See :class:`Runner`."""
        with self._evaluating():
            return forward_logits(self.model, batch)

    def clip(self, limit: float | None) -> torch.Tensor:
        """See :class:`Runner`."""
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

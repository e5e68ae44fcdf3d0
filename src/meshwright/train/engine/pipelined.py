"""The runner of a pipeline: the microbatches of a step go through the stages of all ranks of `pp`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.distributed.experts.balance import Balance
from meshwright.distributed.pipeline.microbatch_work import Work
from meshwright.distributed.pipeline.scheduled_stages import ScheduledStages
from meshwright.models.objective import Batch, Objective
from meshwright.models.token_loss import forward_arguments, forward_logits
from meshwright.train.engine.runner import Runner, Sums, Values

__all__ = ["Pipelined"]


class Pipelined(Runner):
    """Runs microbatches through the stages of all ranks of `pp`.

    Args:
        stages: the stages of this rank.
        objective: what the model is trained to do.
        balance: balance of the experts of this rank's stages.
    """

    def __init__(self, stages: ScheduledStages, objective: Objective, balance: Balance) -> None:
        self.stages, self.objective, self.balance = stages, objective, balance
        self.model = stages.parts

    def prepare(self, rows: int, length: int) -> None:
        """See :class:`Runner`."""
        self.stages.prepare(rows, length)

    def forward_backward(self, batches: list[Batch], counts: torch.Tensor) -> Sums:
        """See :class:`Runner`."""
        sums = Sums()

        def work(batch: Batch) -> Work:
            around = partial(self.training, batch)
            return Work(self.objective.stage_arguments(batch), lambda model: self.loss(model, batch, counts, sums), around)

        self.stages.forward_backward([work(batch) for batch in batches])
        # Only the last stage knows the loss, and each stage its own routers.
        for name in self.reported:
            sums.values.setdefault(name, torch.zeros((), device=counts.device))
        for name, value in self.balance.losses().items():
            sums.add(name, value)
        values = self.stages.sum(torch.stack([value.double() for value in sums.values.values()]))
        sums.values = dict(zip(sums.values, values, strict=True))
        return sums

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> torch.Tensor:
        """See :class:`Runner`."""
        work = (
            Work(self.objective.stage_arguments(batch), partial(self.evaluated, batch=batch), partial(self.using, batch))
            for batch in self.prepared(batches)
        )
        return self.stages.evaluate(work, self.size_of_evaluation)

    @torch.no_grad()
    def forwards(
        self, batches: Iterable[Batch], values: Values, around: Callable[[], AbstractContextManager[None]]
    ) -> list[Mapping[str, torch.Tensor]]:
        """See :class:`Runner`."""

        def found(batch: Batch, model: nn.Module) -> Any:  # in evaluation, `loss` may return whatever is to be known
            return values(model, batch)

        @contextmanager
        def within(batch: Batch) -> Iterator[None]:
            with around(), self.using(batch):
                yield

        work = (Work(forward_arguments(batch), partial(found, batch), partial(within, batch)) for batch in batches)
        return list(self.stages.forwards(work))  # type: ignore[arg-type]

    @torch.no_grad()
    def logits(self, batch: Batch) -> torch.Tensor:
        """See :class:`Runner`. Ranks without the last stage get zeros."""
        work = Work(forward_arguments(batch), lambda model: forward_logits(model, batch))
        found = list(self.stages.forwards([work]))
        return found[0] if found else torch.zeros((*batch["input_ids"].shape, 1), device=self.stages.device)

    def clip(self, limit: float | None) -> torch.Tensor:
        """See :class:`Runner`."""
        return self.stages.clip(limit)

"""The engine of a pipeline: the microbatches of a step go through the stages of all ranks of `pp`."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from meshwright.distributed.experts.balance import Balance
from meshwright.distributed.pipeline.scheduled_stages import ScheduledStages, Work
from meshwright.models.objective import Batch, Objective
from meshwright.models.token_loss import forward_arguments, forward_logits
from meshwright.plan.axes.pipeline.stage_plan import crossing_shape
from meshwright.train.engine import LOSS, Engine, Sums

__all__ = ["Pipelined"]


class Pipelined(Engine):
    """Runs microbatches through the stages of all ranks of `pp`.

    Args:
        stages: the stages of this rank.
        objective: what the model is trained to do.
        balance: balance of the experts of this rank's stages.
    """

    def __init__(self, stages: ScheduledStages, objective: Objective, balance: Balance) -> None:
        self.stages, self.objective, self.balance = stages, objective, balance
        self.model = stages.parts

    def forward_backward(self, batches: list[Batch], counts: torch.Tensor) -> Sums:
        """See :class:`Engine`."""
        sums, names = Sums(), self.objective.terms

        def loss_of(batch: Batch, model: torch.nn.Module) -> torch.Tensor:
            terms = self.objective.sums(model, batch)
            loss = self.objective.combine(terms, counts) / counts[0].clamp(min=1)
            sums.add(LOSS, loss)
            for name, term in zip(names, terms, strict=True) if len(names) > 1 else ():
                sums.add(name, term)
            return loss

        self.stages.forward_backward(
            [
                Work(
                    partial(_hidden_state, batch),
                    partial(loss_of, batch),
                    partial(self.balance.microbatch, self.objective.routed(batch)),
                )
                for batch in batches
            ]
        )
        # Only the last stage knows the loss, and each stage its own routers.
        for name in (LOSS, *(names if len(names) > 1 else ())):
            sums.values.setdefault(name, torch.zeros((), device=counts.device))
        for name, value in self.balance.losses().items():
            sums.add(name, value)
        values = torch.stack([value.double() for value in sums.values.values()])
        dist.all_reduce(values, group=self.stages.group)
        sums.values = dict(zip(sums.values, values, strict=True))
        return sums

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> torch.Tensor:
        """See :class:`Engine`."""
        total = torch.zeros(len(self.objective.terms), dtype=torch.float64, device=self.stages.device)
        for terms in self._forward(batches, lambda batch, model: torch.stack(self.objective.sums(model, batch))):
            total += terms.double()
        dist.all_reduce(total, group=self.stages.group)
        return total

    @torch.no_grad()
    def logits(self, batch: Batch) -> torch.Tensor:
        """See :class:`Engine`. Ranks without the last stage get zeros."""
        found = list(self._forward([batch], lambda batch, model: forward_logits(model, batch)))
        return found[0] if found else torch.zeros((*batch["input_ids"].shape, 1), device=self.stages.device)

    def clip(self, limit: float | None) -> torch.Tensor:
        """See :class:`Engine`."""
        return self.stages.clip(limit)

    def _forward(
        self, batches: Iterable[Batch], last: Callable[[Batch, torch.nn.Module], torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        """Run forwards in evaluation mode; yield the results of the last stage."""
        plan = self.stages.plan
        cp = plan.layout.size("cp")
        yield from self.stages.evaluate(
            (
                Work(partial(_hidden_state, batch), partial(last, batch)),
                crossing_shape(plan, len(batch["input_ids"]), cp * batch["input_ids"].shape[1]),
            )
            for batch in batches
        )


def _hidden_state(batch: Batch, model: torch.nn.Module) -> torch.Tensor:
    hidden: torch.Tensor = model(**forward_arguments(batch))
    return hidden

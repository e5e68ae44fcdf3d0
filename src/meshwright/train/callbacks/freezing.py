"""Freezes parameters for a part of a run."""

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from meshwright.plan.given.names import match_names
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.train.callbacks.callback import Callback
from meshwright.train.callbacks.training_run import TrainingRun
from meshwright.train.config import RunConfig

__all__ = ["Freezing"]


class Freezing(Callback):
    """Drops the gradients of some parameters in some steps: no update, no decay, and their optimizer state stays as it is.

    The norm of the gradient is that of the others. The gradients are computed all the same; ``parallel.freeze`` freezes for a
    whole run, and saves that.

    Args:
        match: patterns of names of parameters, as of ``parallel.freeze``.
        until: frozen up to this step, and trained after it; ``None``: not at the beginning.
        after: trained up to this step, and frozen after it; ``None``: not at the end.
    """

    def __init__(
        self,
        match: list[str],
        until: Annotated[int, Field(ge=1)] | None = None,
        after: Annotated[int, Field(ge=1)] | None = None,
    ) -> None:
        self.match, self.until, self.after = match, until, after
        self.names: set[str] = set()

    def check(self, config: RunConfig, plan: ShardingPlan) -> Iterable[str]:
        """Each pattern has to match a trained parameter, and some step has to be named."""
        if self.until is None and self.after is None:
            yield "freezes in no step; set until or after"
        names = [row.name for row in plan.parameters if row.trainable]
        for pattern in self.match:
            if not match_names(pattern, names):
                yield f"with.match: {pattern!r} matches no trained parameter; names are such as {', '.join(names[:3])}"

    def on_start(self, run: TrainingRun) -> None:
        """Find the parameters."""
        names = [row.name for row in run.plan.parameters]
        self.names = {name for pattern in self.match for name in match_names(pattern, names)}

    def on_gradients(self, run: TrainingRun) -> None:
        """Drop the gradients."""
        if run.step <= (self.until or 0) or (self.after is not None and run.step > self.after):
            for name, parameter in run.model.named_parameters():
                if name in self.names:
                    parameter.grad = None

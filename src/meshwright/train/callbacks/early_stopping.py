"""Ends a run when its evaluations no longer become better."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from meshwright.errors import number_of
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.train.callbacks.callback import Callback
from meshwright.train.callbacks.improvement import Improvement, never_evaluated
from meshwright.train.callbacks.training_run import TrainingRun
from meshwright.train.config import RunConfig

__all__ = ["EarlyStopping"]


class EarlyStopping(Callback):
    """Asks for the run to end after some evaluations in a row that were not better than the best one before.

    The evaluation before the first step counts as the first.

    Args:
        metric: name of a value of evaluations.
        mode: ``min``: less is better, or ``max``.
        patience: number of evaluations in a row.
        min_delta: least difference that is better.
    """

    def __init__(
        self,
        metric: str = "eval/loss",
        mode: Literal["min", "max"] = "min",
        patience: Annotated[int, Field(ge=1)] = 3,
        min_delta: Annotated[float, Field(ge=0)] = 0.0,
    ) -> None:
        self.improvement, self.patience, self.waited = Improvement(metric, mode, min_delta), patience, 0

    def check(self, config: RunConfig, plan: ShardingPlan) -> Iterable[str]:
        """There have to be evaluations."""
        return never_evaluated(config)

    def on_evaluation(self, run: TrainingRun) -> None:
        """Count the evaluations that were not better."""
        self.waited = 0 if self.improvement.seen(run) else self.waited + 1
        if self.waited >= self.patience:
            run.stop(f"{self.improvement.metric} was not better in {number_of(self.waited, 'evaluation')}")

    def state_dict(self) -> Mapping[str, Any]:
        """Return the best value, and how many evaluations have not been better."""
        return {"best": self.improvement.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        self.improvement.best, self.waited = state["best"], state["waited"]

"""Keeps the checkpoint with the best evaluation (`checkpoint.best`)."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.train.callbacks.callback import Callback
from meshwright.train.callbacks.improvement import Improvement, never_evaluated
from meshwright.train.callbacks.training_run import TrainingRun
from meshwright.train.config import RunConfig

__all__ = ["BestCheckpoint"]


class BestCheckpoint(Callback):
    """Saves a checkpoint after each evaluation that is the best so far, and keeps the last of these.

    The evaluation before the first step does not count: there is nothing to save.

    Args:
        metric: name of a value of evaluations.
        mode: ``min``: less is better, or ``max``.
    """

    def __init__(self, metric: str = "eval/loss", mode: Literal["min", "max"] = "min") -> None:
        self.improvement = Improvement(metric, mode)

    def check(self, config: RunConfig, plan: ShardingPlan) -> Iterable[str]:
        """There have to be evaluations."""
        return never_evaluated(config)

    def on_evaluation(self, run: TrainingRun) -> None:
        """Save what is the best so far."""
        if run.step and self.improvement.seen(run):
            run.say(f"the best {self.improvement.metric} so far: {self.improvement.best:.6g}, after step {run.step}")
            run.save(keep=True)

    def state_dict(self) -> Mapping[str, Any]:
        """Return the best value."""
        return {"best": self.improvement.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the best value."""
        self.improvement.best = state["best"]

"""A value of evaluations that is to become better."""

from meshwright.data.data_config import DataConfig
from meshwright.train.callbacks.training_run import TrainingRun
from meshwright.train.config import RunConfig

__all__ = ["Improvement", "never_evaluated"]


class Improvement:
    """Remembers the best value so far.

    Args:
        metric: its name, such as ``eval/loss``.
        mode: ``min``: less is better, or ``max``.
        by: least difference that counts.

    Attributes:
        best: the best value; ``None``: none yet.
    """

    def __init__(self, metric: str, mode: str, by: float = 0.0) -> None:
        self.metric, self.mode, self.by = metric, mode, by
        self.best: float | None = None

    def seen(self, run: TrainingRun) -> bool:
        """Read the value of an evaluation, and return whether it is the best so far. NaN never is."""
        if self.metric not in run.evaluation:
            raise KeyError(f"an evaluation has no {self.metric}; it has {', '.join(run.evaluation)}")
        value = float(run.evaluation[self.metric])
        sign = 1 if self.mode == "min" else -1
        better = value == value if self.best is None else sign * (self.best - value) > self.by
        if better:
            self.best = value
        return better


def never_evaluated(config: RunConfig) -> list[str]:
    """Return what is wrong with a callback that needs evaluations between steps."""
    data: DataConfig = config.data
    if not data.held_out and not data.eval_files:
        return ["needs evaluations, and nothing is held out (data.eval_fraction, eval_files)"]
    return [] if config.training.eval_every else ["needs evaluations between steps; set training.eval_every"]

"""The interface of a callback: hooks that a run calls at fixed points, and state that its checkpoints keep."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.plan.result.sharding_plan import ShardingPlan
    from meshwright.train.callbacks.training_run import TrainingRun
    from meshwright.train.config import RunConfig

__all__ = ["HOOKS", "Callback"]


class Callback:
    """Code that a run calls at fixed points. One of the user's inherits from it, and overrides the hooks that it needs.

    All ranks make their own, and call its hooks at the same points, callbacks in the order of the configuration. Hooks run
    without gradient. A hook that *may contain collectives* may call what all ranks have to call, such as
    ``run.mesh.sum(...)``, if it calls it on all of them. A hook changes no parameter and draws no random number from torch's
    global generators: an audit names one that does. The metrics of a step are on the device, and a hook that reads one
    (``float(run.metrics["loss"])``) makes the host wait for the device.
    """

    def check(self, config: "RunConfig", plan: "ShardingPlan") -> Iterable[str]:
        """Return what is wrong with this callback in a run, one line each; called before any process starts.

        Args:
            config: the configuration of the run.
            plan: the plan of its model.
        """
        return ()

    def on_start(self, run: "TrainingRun") -> None:
        """Begin, before the first step: the model has its values, also those of a checkpoint. May contain collectives.

        The tensors that :meth:`state_dict` returns have to be there afterwards: a checkpoint is read into them.
        """

    def on_step_start(self, run: "TrainingRun") -> None:
        """Called before each step. May contain collectives."""

    def on_gradients(self, run: "TrainingRun") -> None:
        """Called when all gradients of a step are summed over ranks, before clipping. May contain collectives.

        The gradient of a parameter is a DTensor where the parameter is one. The optimizer leaves a parameter as it is whose
        gradient is ``None``.
        """

    def on_step(self, run: "TrainingRun") -> None:
        """Called after the update of each step; ``run.metrics`` are there, on the device. May contain collectives."""

    def on_evaluation(self, run: "TrainingRun") -> None:
        """Called after each evaluation, whose values are in ``run.evaluation``, equal on all ranks. May contain collectives."""

    def on_save(self, run: "TrainingRun") -> None:
        """Called when the tensors of a checkpoint are written, or in the background being written. May contain collectives."""

    def on_error(self, run: "TrainingRun", error: BaseException) -> None:
        """Called on a rank that fails; nothing is called after it. No collectives: the other ranks may be anywhere."""

    def on_end(self, run: "TrainingRun") -> None:
        """Called when the run is done, or ends because of a signal, after its checkpoint. May contain collectives."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return what a checkpoint keeps: names to tensors, and to values of JSON that are equal on all ranks.

        A DTensor is read on any layout; another tensor is equal on all ranks. Called on all ranks, and when a checkpoint is
        read, where the tensors are read into. No collectives.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state of a checkpoint: the tensors of :meth:`state_dict`, already read into, and its values."""


HOOKS: dict[str, tuple[str, ...]] = {
    "on_start": ("run",),
    "on_step_start": ("run",),
    "on_gradients": ("run",),
    "on_step": ("run",),
    "on_evaluation": ("run",),
    "on_save": ("run",),
    "on_error": ("run", "error"),
    "on_end": ("run",),
}
"""The hooks, in the order of a run, and their arguments."""


def overrides(callback: Callback, method: str) -> bool:
    """Whether a callback has a method of its own."""
    return getattr(type(callback), method) is not getattr(Callback, method)

"""Calls the callbacks of a run. The trainer has one of these, and says in single lines where a hook is due."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape

from meshwright.checkpoint.directory import read_meta
from meshwright.errors import MeshwrightError, StoppedError
from meshwright.objectives.call import at_step, in_part
from meshwright.train.callbacks.callback import HOOKS, overrides
from meshwright.train.callbacks.callback_state import read_states, states
from meshwright.train.callbacks.make_callbacks import make_callbacks
from meshwright.train.callbacks.training_run import TrainingRun

__all__ = ["Callbacks", "due", "in_step"]


def due(step: int, every: int) -> bool:
    """Whether something is due after a step that is done every so many steps; 0: never."""
    return every > 0 and step % every == 0


def in_step(words: str, after: int = 0) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a method of the trainer: what parts of the user raise in it is said with the step.

    Args:
        words: such as ``step {}``.
        after: what is added to the number of steps done.
    """

    def decorated(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def named(trainer: Any, *args: Any) -> Any:
            with at_step(words.format(trainer.step + after)):
                return method(trainer, *args)

        return named

    return decorated


class Callbacks:
    """The callbacks of a run on this rank. All ranks call every method, but :meth:`failed`.

    Args:
        trainer: the trainer, whose model has its values.
        resume: the checkpoint that the run resumes from; ``None``: none.

    Attributes:
        run: what hooks see.
        named: the callbacks with their names.
        finished: the callback that asked for the run to end, and why; empty: none.
    """

    def __init__(self, trainer: Any, resume: Path | None = None) -> None:
        self.run, self._trainer = TrainingRun(trainer), trainer
        self.named = make_callbacks(trainer.config)
        self.finished = ""
        own = {hook: [(name, one) for name, one in self.named if overrides(one, hook)] for hook in HOOKS}
        self._with_hook = {hook: some for hook, some in own.items() if some}
        self._call("on_start")
        if resume is not None:
            self._load(resume)

    def around(self, name: str, hook: str) -> AbstractContextManager[None]:
        """Return what a hook runs in; what it raises is named."""
        return in_part(f"callback {name}", hook)

    @torch.no_grad()
    def _call(self, hook: str, *args: Any) -> None:
        for name, callback in self._with_hook.get(hook, ()):
            self.run.caller = name
            with self.around(name, hook):
                getattr(callback, hook)(self.run, *args)

    # -- in a step ---------------------------------------------------------------------------------------------------------

    def on_step_start(self) -> None:
        """Begin a step."""
        self.run.step, self.run.metrics, self.run.logged = self._trainer.step + 1, {}, {}
        self._call("on_step_start")

    def on_gradients(self) -> None:
        """All gradients are there."""
        self._call("on_gradients")

    def on_step(self, metrics: dict[str, torch.Tensor]) -> None:
        """End a step; metrics that callbacks log are added to its own."""
        self.run.metrics = metrics
        self._call("on_step")
        device = metrics["loss"].device
        for name, value in self.run.logged.items():
            tensor = value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=torch.float64, device=device)
            metrics[name] = tensor.to(device).reshape(())
        self.run.logged = {}

    # -- between steps -----------------------------------------------------------------------------------------------------

    def on_evaluation(self, values: dict[str, float]) -> None:
        """An evaluation has these values; those that callbacks log are added."""
        if not self._with_hook.get("on_evaluation"):
            return
        run = self.run
        run.step, run.evaluation, run.logged, run.measures = self._trainer.step, values, {}, True
        for name, callback in self._with_hook["on_evaluation"]:
            run.caller = name
            with torch.no_grad(), self.around(name, "on_evaluation"):
                callback.on_evaluation(run)
            values |= {key: float(value) for key, value in run.logged.items()}  # so that the next ones see them
            run.logged = {}
        run.measures = False

    @property
    def saves(self) -> bool:
        """Whether a callback asked for a checkpoint of this step."""
        return self.run.saves

    def begin(self, agreement: Any, steps: int) -> int:
        """Return the last step of a run whose ranks agree by this, as :meth:`last_step`."""
        self.run.agreement = agreement
        return self.last_step(steps)

    def last_step(self, steps: int, reason: str = "") -> int:
        """Return the last step: this one, if a callback has asked for the run to end.

        Args:
            steps: the last step otherwise.
            reason: why the ranks have agreed now to end here; empty: they have not.
        """
        if reason:
            self.finished = reason
            self.run.say(f"callback {escape(reason)}: the run ends after step {self._trainer.step} of {steps}")
        return self._trainer.step if self.finished else steps

    def on_save(self, path: Path) -> None:
        """A checkpoint is saved."""
        self.run.step, self.run.checkpoint, self.run.saves = self._trainer.step, path, False
        self._call("on_save")

    def on_end(self) -> None:
        """The run is done."""
        self._call("on_end")

    def failed(self, error: BaseException) -> None:
        """The run ends with an error. What a callback raises now is said, and the error stays what it was."""
        hook, args = ("on_end", ()) if isinstance(error, StoppedError) else ("on_error", (error,))
        try:
            self._call(hook, *args)
        except MeshwrightError as other:
            self.run.say(f"[yellow]{escape(str(other))}[/yellow]")

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors for a checkpoint."""
        return states(self.named)[0]

    def values(self) -> dict[str, Any]:
        """Return the plain values for a checkpoint."""
        return {"state": states(self.named)[1], "kept": self.run.kept, "finished": self.finished}

    def _load(self, checkpoint: Path) -> None:
        meta = read_meta(checkpoint)
        saved = meta.get("callbacks", {"state": {}, "kept": {}, "finished": ""})
        for line in read_states(self.named, checkpoint, saved["state"]):
            self.run.say(f"[yellow]{escape(line)}[/yellow]")
        names = dict(self.named)
        self.run.kept = {name: step for name, step in saved["kept"].items() if name in names}
        now, before = self._trainer.config.model_dump(mode="json"), meta["config"]
        if saved["finished"].partition(": ")[0] in names and now["callbacks"] == before.get("callbacks"):
            self.finished = saved["finished"]

"""Callbacks as a user writes them: one that is right and sees everything, and some with one fault each."""

from pathlib import Path
from typing import Any

import torch

from meshwright import Callback
from meshwright.train.callbacks.training_run import TrainingRun


class Notes(Callback):
    """Writes down each hook; keeps a number, a plain tensor and a sharded one."""

    def __init__(self, path: str, stop: int | None = None, save: int | None = None) -> None:
        self.path, self.stop, self.save = path, stop, save
        self.seen = 0
        self.total = torch.zeros(())

    def note(self, run: TrainingRun, hook: str) -> None:
        with Path(f"{self.path}-{run.rank}").open("a") as file:
            file.write(f"{hook} {run.step}\n")

    def on_start(self, run: TrainingRun) -> None:
        self.sums = {name: torch.zeros_like(p.data) for name, p in run.model.named_parameters()}
        self.note(run, "on_start")

    def on_step_start(self, run: TrainingRun) -> None:
        self.note(run, "on_step_start")

    def on_gradients(self, run: TrainingRun) -> None:
        for name, parameter in run.model.named_parameters():
            if parameter.grad is not None:
                self.sums[name].add_(parameter.grad)
        self.note(run, "on_gradients")

    def on_step(self, run: TrainingRun) -> None:
        self.seen += 1
        self.total = self.total + run.metrics["loss"].detach()
        run.log("mine/total", self.total)
        run.log("mine/seen", self.seen)
        if run.step == self.stop:
            run.stop("it is enough")
        if run.step == self.save:
            run.save(keep=True)
        self.note(run, "on_step")

    def on_evaluation(self, run: TrainingRun) -> None:
        run.log("eval/again", run.evaluate()["eval/loss"])
        self.note(run, "on_evaluation")

    def on_save(self, run: TrainingRun) -> None:
        assert run.checkpoint is not None
        self.note(run, "on_save")

    def on_error(self, run: TrainingRun, error: BaseException) -> None:
        self.note(run, f"on_error {type(error).__name__}")

    def on_end(self, run: TrainingRun) -> None:
        self.note(run, "on_end")

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "total": self.total, **self.sums}

    def load_state_dict(self, state: Any) -> None:
        self.seen, self.total = state["seen"], state["total"]


class Fails(Callback):
    def __init__(self, hook: str = "on_step", step: int = 2) -> None:
        self.hook, self.step = hook, step

    def on_step(self, run: TrainingRun) -> None:
        self.fail(run, "on_step")

    def on_gradients(self, run: TrainingRun) -> None:
        self.fail(run, "on_gradients")

    def on_evaluation(self, run: TrainingRun) -> None:
        self.fail(run, "on_evaluation")

    def fail(self, run: TrainingRun, hook: str) -> None:
        if hook == self.hook and run.step == self.step:
            raise ValueError(f"of its own in {hook}")


class Misspelled(Callback):
    def on_steps(self, run: TrainingRun) -> None: ...


class NoArgument(Callback):
    def on_step(self) -> None: ...  # type: ignore[override]


class KeepsASet(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"names": {1, 2}}


class Logs(Callback):
    """Adds a number of the device to the metrics of each step, and asks for no end."""

    def on_step(self, run: TrainingRun) -> None:
        run.log("mine/product", run.metrics["loss"] * run.metrics["gradient_norm"] + run.skipped)


class Noise(Callback):
    """Draws random numbers."""

    def on_step(self, run: TrainingRun) -> None:
        torch.rand(())


class Moves(Callback):
    """Moves a parameter, in the same way on every layout."""

    def on_step(self, run: TrainingRun) -> None:
        next(iter(run.model.parameters())).data.mul_(0.5)


class ByShard(Callback):
    """Scales each gradient by the largest entry that this rank has of it."""

    def on_gradients(self, run: TrainingRun) -> None:
        for parameter in run.model.parameters():
            if parameter.grad is not None:
                local = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
                local.div_(local.abs().max().clamp(min=1e-12))


class Signs(Callback):
    """Changes gradients, and does so entry by entry: right on every layout."""

    def on_gradients(self, run: TrainingRun) -> None:
        for parameter in run.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(2.0)


class FailsLater(torch.optim.SGD):
    """It steps when it is tried, and fails in the run."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if sum(p.numel() for group in self.param_groups for p in group["params"]) > 60:
            raise ValueError("of its own")
        super().step(closure)

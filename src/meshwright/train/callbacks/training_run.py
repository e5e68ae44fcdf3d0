"""What a hook of a callback sees of a run, and what it may ask for."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.distributed.mesh import ParallelMesh
from meshwright.models.objective import Objective
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.train.config import RunConfig

__all__ = ["TrainingRun"]


class TrainingRun:
    """A run, as hooks see it. Every rank has one.

    Args:
        trainer: the trainer of this rank.

    Attributes:
        step: number of the step that is under way or was done last, counted from 1; 0 before the first.
        metrics: in ``on_step``, the metrics of the step: scalars on the device, the same on all ranks.
        evaluation: in ``on_evaluation``, what was measured: names such as ``eval/loss`` to numbers, the same on all ranks.
        checkpoint: in ``on_save``, the path of the checkpoint.
        agreement: decides what all ranks do after a step; ``None``: nothing ends the run early, as in an audit.
        saves: whether a callback asked for a checkpoint that was not saved yet.
        kept: name of a callback to the step of the checkpoint that it keeps.
        caller: name of the callback whose hook is called.
    """

    def __init__(self, trainer: Any) -> None:  # a Trainer, whose module imports this one
        self._trainer = trainer
        self.step: int = trainer.step
        self.metrics: Mapping[str, torch.Tensor] = {}
        self.evaluation: Mapping[str, float] = {}
        self.checkpoint: Path | None = None
        self.agreement: Any = None
        self.saves = False
        self.kept: dict[str, int] = {}
        self.caller = ""
        self.measures = False
        self.logged: dict[str, torch.Tensor | float] = {}

    # -- what there is -----------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Number of steps of the whole run."""
        return self._trainer.steps

    @property
    def model(self) -> nn.Module:
        """The parallelized model; under `pp`, the stages of this rank under the names of the whole model."""
        return self._trainer.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of this rank's parameters."""
        return self._trainer.optimizer

    @property
    def objective(self) -> Objective:
        """What the model is trained to do."""
        return self._trainer.objective

    @property
    def mesh(self) -> ParallelMesh:
        """The mesh of the layout; ``mesh.sum(tensor)`` adds over the data ranks."""
        return self._trainer.mesh

    @property
    def plan(self) -> ShardingPlan:
        """The plan of the model."""
        return self._trainer.setup.plan

    @property
    def config(self) -> RunConfig:
        """The configuration."""
        return self._trainer.config

    @property
    def directory(self) -> Path:
        """The output directory of the run, which all ranks share."""
        return self._trainer.config.directory

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._trainer.device

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self._trainer.rank

    @property
    def skipped(self) -> torch.Tensor:
        """In ``on_step``, a scalar on the device: 1 if the step was not finite and so changed nothing, otherwise 0."""
        return self._trainer.guard.flag

    # -- what may be asked for ----------------------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """Ask for the run to end as after its last step: it evaluates, saves and exports. Any rank may ask.

        The ranks agree on the step through the store, as they do on a signal: one or two steps later. The same command goes on
        only if this callback is gone, or has other arguments.

        Args:
            reason: printed, and kept in the checkpoint.
        """
        if self.agreement is not None:
            self.agreement.ask_to_finish(self.step, f"{self.caller}: {reason}")

    def save(self, *, keep: bool = False) -> None:
        """Ask for a checkpoint after this step. All ranks have to ask; before the first step there is none.

        Args:
            keep: ``checkpoint.keep`` does not count or remove it. The one that this callback kept before is kept no longer.
        """
        if self.step:
            self.saves = True
            if keep:
                self.kept[self.caller] = self.step

    def log(self, name: str, value: torch.Tensor | float) -> None:
        """Add a number to the metrics of this step or, in ``on_evaluation``, to those of the evaluation.

        It is written with the others (``training.log_every``). All ranks log it, so that all know it.

        Args:
            name: the name, such as ``my/number``.
            value: a number, or a scalar tensor on the device.
        """
        taken = self.evaluation if self.measures else {**self.metrics, **self.logged}
        if name in taken:
            raise ValueError(f"log: {name} is a metric already; its names are {', '.join(taken)}")
        self.logged[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value

    def evaluate(self) -> dict[str, float]:
        """Return the values of an evaluation of the model as it is; none if nothing is held out. All ranks call it."""
        return self._trainer.measure()

    def generate(self, prompts: list[str], tokens: int, *, raw: bool = False) -> list[str]:
        """Continue prompts with the model as it is, with the most likely tokens. All ranks call it, and get the same.

        Args:
            prompts: the texts.
            tokens: largest number of new tokens.
            raw: continue a prompt as it stands, even if the tokenizer has a chat template.
        """
        from meshwright.train.callbacks.continuation import continued

        return continued(self._trainer, prompts, tokens, raw=raw)

    @property
    def say(self) -> Callable[[str], None]:
        """Prints a line in the terminal, on rank 0 only."""
        return self._trainer.recorder.say

"""Writes a trace of some steps by torch's profiler (`profile`)."""

from collections.abc import Iterable
from typing import Annotated

import torch
from pydantic import Field

from meshwright.distributed._torch_compat import memory_history
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.train.callbacks.callback import Callback
from meshwright.train.callbacks.training_run import TrainingRun
from meshwright.train.config import RunConfig

__all__ = ["Profiles"]


class Profiles(Callback):
    """Writes profile/step-N-rank-R.json, which chrome://tracing and Perfetto show, and with a history of the device's memory
    also step-N-rank-R-memory.pickle, for torch's page pytorch.org/memory_viz. The host waits for the device after these steps.

    Args:
        step: the first step of the trace.
        steps: number of steps.
        ranks: ranks that are traced.
        memory: also write a snapshot of the memory, where the device has one.
    """

    def __init__(
        self,
        step: Annotated[int, Field(ge=1)],
        steps: Annotated[int, Field(ge=1)] = 1,
        ranks: list[int] | None = None,
        memory: bool = True,
    ) -> None:
        self.step, self.last, self.ranks, self.memory = step, step + steps - 1, ranks or [0], memory
        self.profiler: torch.profiler.profile | None = None
        self.recording = False

    def check(self, config: RunConfig, plan: ShardingPlan) -> Iterable[str]:
        """Steps and ranks have to be there."""
        steps, ranks = config.training.steps, plan.layout.world_size
        if steps is not None and self.last > steps:
            yield f"step {self.last} is none of the {steps} steps (training.steps)"
        if strange := [rank for rank in self.ranks if not 0 <= rank < ranks]:
            yield f"ranks: {', '.join(map(str, strange))} is none of the {ranks} ranks, 0 to {ranks - 1}"

    def on_start(self, run: TrainingRun) -> None:
        """Say that a step is over, if it is."""
        if run.step >= self.step:
            run.say(f"profile: step {self.step} is done already; there is no trace of it")

    def on_step_start(self, run: TrainingRun) -> None:
        """Begin."""
        if run.step == self.step and run.rank in self.ranks:
            self.recording = self.memory and memory_history.record(run.device.type)
            self.profiler = torch.profiler.profile(record_shapes=True)
            self.profiler.start()

    def on_step(self, run: TrainingRun) -> None:
        """End, and write."""
        if self.profiler is None or run.step != self.last:
            return
        self.profiler.stop()
        folder = run.directory / "profile"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"step-{self.step}-rank-{run.rank}"
        self.profiler.export_chrome_trace(str(folder / f"{name}.json"))
        if self.recording:
            memory_history.write(run.device.type, folder / f"{name}-memory.pickle")
        self.profiler = None
        run.say(f"profile: {folder / name}.json")

    def on_error(self, run: TrainingRun, error: BaseException) -> None:
        """Stop the profiler, which would go on."""
        if self.profiler is not None:
            self.profiler.stop()

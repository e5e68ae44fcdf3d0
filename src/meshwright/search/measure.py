"""Measures the best layouts of a search on this machine: some steps of each, as `meshwright train` runs them.

A trial writes to a directory of its own, and is killed after its last step. So it saves no checkpoint, and leaves nothing.
"""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from meshwright.search.answer import Option

__all__ = ["STEPS", "Trial", "measure", "trial_of"]

STEPS = 20
"""Steps of a trial."""

WARM = 5
"""First steps of a trial that do not count: they allocate, and compile."""

LOOK = 0.1
"""Seconds between two looks at the metrics of a trial."""

MUTED = (
    "training.steps=1000000", "training.epochs=null", "training.log_every=1", "training.eval_every=0", "checkpoint.every=0",
    "checkpoint.every_minutes=null", "checkpoint.best=null", "checkpoint.resume=never", "export=false", "sample.prompts=[]",
    "sample.every=0", "metrics.jsonl=true", "metrics.tensorboard=false", "metrics.wandb=null", "metrics.mlflow=null",
    "metrics.sinks=[]", "callbacks=[]", "profile=null",
)  # fmt: skip
"""What a trial does not do."""


@dataclass(frozen=True)
class Trial:
    """What was measured of an option.

    Attributes:
        option: the option.
        seconds: median of a step; ``None``: it failed.
        problem: why, the last line that it said; empty: it ran.
    """

    option: Option
    seconds: float | None
    problem: str = ""


def measure(options: Sequence[Option], run: Callable[[Option], Trial]) -> list[Trial]:
    """Return the trials of some options, the fastest first; those that failed come last.

    Args:
        options: what is measured.
        run: measures one of them.
    """
    trials = [run(option) for option in options]
    return sorted(trials, key=lambda trial: float("inf") if trial.seconds is None else trial.seconds)


def trial_of(option: Option, command: Sequence[str], steps: int = STEPS) -> Trial:
    """Run some steps of an option.

    Args:
        option: the option.
        command: the command that trains, up to and with the overrides that come before those of the option.
        steps: number of steps.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-try-") as folder:
        metrics, said = Path(folder) / "run" / "metrics.jsonl", Path(folder) / "said"
        given = [*command, *option.overrides, *MUTED, f"output={metrics.parent}"]
        with said.open("wb") as output:
            process = subprocess.Popen(given, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                while process.poll() is None and len(_times(metrics)) < steps:
                    time.sleep(LOOK)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        times = _times(metrics)[:steps]
        if len(times) < steps:
            lines = said.read_text(errors="replace").split("\n")
            return Trial(option, None, next((line.strip() for line in reversed(lines) if line.strip()), "said nothing"))
        return Trial(option, median(times[min(WARM, steps - 1) :]))


def _times(metrics: Path) -> list[float]:
    """Return the seconds of the steps that were written."""
    try:
        lines = metrics.read_text().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        with suppress(ValueError, KeyError):  # the last line may be written just now; other lines are no steps
            found.append(float(json.loads(line)["step_seconds"]))
    return found

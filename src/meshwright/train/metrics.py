"""Where the metrics of a run go: the terminal, a JSONL file, TensorBoard, Weights & Biases, MLflow. Only rank 0 writes them."""

import json
import math
import re
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from meshwright.errors import CheckpointError, ConfigError, MeshwrightError, number_of
from meshwright.files import write_whole
from meshwright.objectives.call import in_part
from meshwright.plan.show.summary import human_bytes
from meshwright.terminal import console
from meshwright.train.config import RunConfig
from meshwright.train.start.run_files import Paths
from meshwright.user_code import find_part, make_part

__all__ = ["Jsonl", "MetricSink", "Recorder", "make_sinks"]

Values = Mapping[str, float | int]


class MetricSink(ABC):
    """A destination of metrics. One of the user's inherits from it; it is made and called on rank 0 alone."""

    def open(self, config: Mapping[str, Any], step: int) -> None:  # noqa: B027 - optional
        """Begin to record.

        Args:
            config: the configuration of the run, as plain values.
            step: the step that the run resumes from; 0: it begins.
        """

    @abstractmethod
    def write(self, step: int, values: Values) -> None:
        """Write the metrics of a step, or of an evaluation after it: name to number. Names have slashes, as in eval/loss."""

    def close(self) -> None:  # noqa: B027 - optional
        """Flush and close."""


class _Users(MetricSink):
    """A sink of the user. What it raises is said once, and then it is left alone: the run goes on."""

    def __init__(self, name: str, sink: MetricSink, say: Callable[[str], None]) -> None:
        self._name, self._sink, self._say, self._broken = name, sink, say, False

    def _call(self, hook: str, *arguments: Any) -> None:
        if self._broken:
            return
        try:
            with in_part(f"sink {self._name}", hook):
                getattr(self._sink, hook)(*arguments)
        except MeshwrightError as error:
            self._broken = True
            self._say(f"[yellow]{escape(str(error))}[/yellow]\nthe run goes on without this sink")

    def open(self, config: Mapping[str, Any], step: int) -> None:
        self._call("open", config, step)

    def write(self, step: int, values: Values) -> None:
        self._call("write", step, values)

    def close(self) -> None:
        self._call("close")


def make_sinks(config: RunConfig) -> list[tuple[str, MetricSink]]:
    """Return the sinks of the user with their names.

    Raises:
        ConfigError: one does not exist, is no class of :class:`MetricSink`, or its arguments are wrong.
    """
    made = []
    for number, part in enumerate(config.metrics.sinks):
        where = f"metrics.sinks.{number}"
        kind = find_part(where, part.use, "sinks")
        if not (isinstance(kind, type) and issubclass(kind, MetricSink)):
            raise ConfigError("part.signature", f"{where}={part.use}: is no class of meshwright.MetricSink")
        if kind.__abstractmethods__:
            raise ConfigError("part.signature", f"{where}={part.use}: lacks `def write(self, step, values)`")
        made.append((part.use, make_part(where, part.use, kind, part.arguments)))
    return made


class Jsonl(MetricSink):
    """A file with one line for each logged step.

    A run that resumes drops the lines of steps after its checkpoint, because it repeats these steps. It moves lines that cannot
    be read to a file beside this one; only a last line that a crash cut off is dropped.

    Args:
        path: the file.
        resumed_step: the step of the checkpoint that the run resumes from; 0: start an empty file.

    Attributes:
        moved: a line about lines that were moved; empty if there are none.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        kept, broken, self.moved = [], [], ""
        content = path.read_bytes() if path.exists() and resumed_step else b""
        for line in content.splitlines(keepends=True):
            try:
                if json.loads(line)["step"] <= resumed_step:
                    kept.append(line.rstrip(b"\r\n") + b"\n")
            except (ValueError, KeyError, TypeError, RecursionError):
                broken.append(line)
        broken = [line for line in broken if line.endswith(b"\n")]
        if broken:
            beside = path.with_name(f"{path.name}.broken")
            with beside.open("ab") as file:
                file.writelines(broken)
            self.moved = f"{path}: {number_of(len(broken), 'line')} cannot be read, now in {beside.name}"
        write_whole(path, b"".join(kept))
        self.file = path.open("a")

    def write(self, step: int, values: Values) -> None:
        """Append a line and flush it, so that others can read it and a kill does not lose it. NaN and infinity become null."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self.file.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
        self.file.flush()

    def close(self) -> None:
        """Close the file."""
        self.file.close()


class _TensorBoard(MetricSink):
    def __init__(self, path: Path, resumed_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(path), purge_step=resumed_step + 1 if resumed_step else None)

    def write(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class _Wandb(MetricSink):
    def __init__(self, project: str, config: RunConfig) -> None:
        import wandb

        # The id of this run at Weights & Biases is kept in a file, so that a resumed run continues the same record there.
        number = kept_id(Path(config.output).expanduser() / "wandb-id")
        settings = config.model_dump(mode="json")
        self.run = wandb.init(project=project, id=number, dir=config.output, config=settings, resume="allow")

    def write(self, step: int, values: Values) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


def kept_id(file: Path) -> str:
    """Return the id in a file, which is written with a new one if it does not exist.

    Raises:
        CheckpointError: the file has something else; another id would begin another record.
    """
    if not file.exists():
        write_whole(file, uuid.uuid4().hex[:12])
    content = file.read_bytes()
    if not re.fullmatch(rb"[0-9a-f]{12}", content):
        raise CheckpointError(
            "run.id", f"{file}: holds {content[:40]!r}, not an id; write the id of the run, or remove the file"
        )
    return content.decode()


class _MLflow(MetricSink):
    def __init__(self, experiment: str, config: RunConfig) -> None:
        import mlflow

        self.mlflow = mlflow
        mlflow.set_experiment(experiment)
        mlflow.start_run(run_name=Path(config.output).name)
        mlflow.log_dict(config.model_dump(mode="json"), "config.json")

    def write(self, step: int, values: Values) -> None:
        self.mlflow.log_metrics({name.replace("/", "."): value for name, value in values.items()}, step=step)

    def close(self) -> None:
        self.mlflow.end_run()


class StepTimes:
    """Estimates the remaining time of a run from the seconds of its last steps.

    The estimate is the mean of their middle half: a single step that waited for a disk, or was compiled, does not change it.

    Args:
        window: number of last steps to use.
    """

    def __init__(self, window: int = 32) -> None:
        self.seconds: deque[float] = deque(maxlen=window)

    def left(self, steps: int, seconds: float) -> float:
        """Record a step that took ``seconds``, and return the seconds that ``steps`` further steps will take."""
        self.seconds.append(seconds)
        ordered = sorted(self.seconds)
        aside = (len(ordered) + 1) // 4
        middle = ordered[aside : len(ordered) - aside]
        return steps * sum(middle) / len(middle)


class Recorder:
    """Writes the metrics of a run to all its sinks, and to the terminal.

    Args:
        config: configuration of the run.
        speaks: whether this is rank 0; the recorder of every other rank writes nothing.
        steps: number of optimizer steps in all; ``None``: ``training.steps``.
        resumed_step: number of optimizer steps done before the run was resumed.
    """

    def __init__(self, config: RunConfig, *, speaks: bool, steps: int | None = None, resumed_step: int = 0) -> None:
        self.speaks = speaks
        self.steps = steps or config.training.steps or 0
        self.every = config.training.log_every
        self.sinks: list[MetricSink] = []
        self.console = console(quiet=not speaks)
        self._progress: Progress | None = None
        self._times = StepTimes()
        if not speaks:
            return
        paths, metrics = Paths(config.directory), config.metrics
        if metrics.jsonl:
            self.sinks.append(lines := Jsonl(paths.metrics, resumed_step))
            if lines.moved:
                self.say(f"[yellow]{escape(lines.moved)}[/yellow]")
        if metrics.tensorboard:
            self.sinks.append(_TensorBoard(paths.tensorboard, resumed_step))
        if metrics.wandb is not None:
            self.sinks.append(_Wandb(metrics.wandb, config))
        if metrics.mlflow is not None:
            self.sinks.append(_MLflow(metrics.mlflow, config))
        for name, sink in make_sinks(config):
            self.sinks.append(users := _Users(name, sink, self.say))
            users.open(config.model_dump(mode="json"), resumed_step)
        if self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self.console)
            self._task = self._progress.add_task("starting", total=self.steps, completed=resumed_step)
            self._progress.start()

    def logs(self, step: int) -> bool:
        """Whether the metrics of a step are written. The answer is the same on all ranks."""
        return step % self.every == 0 or step in (1, self.steps)

    def step(self, step: int, values: dict[str, Any]) -> None:
        """Write the metrics of a logged training step, counted from 1."""
        if not self.speaks:
            return
        line = (
            f"step {step}/{self.steps}  loss {values['loss']:.4f}  {values['tokens_per_second']:,.0f} tokens/s  "
            f"{values['step_seconds'] * 1000:.0f} ms  norm {values['gradient_norm']:.3f}  "
            f"mem {human_bytes(values['memory_bytes'])}"
        ) + (f"  mfu {values['mfu']:.0%}" if "mfu" in values else "")
        left = self._times.left(self.steps - step, values["step_seconds"])
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=line)
        else:
            self.say(f"{line}  left {int(left // 60)}:{int(left % 60):02d}")
        for sink in self.sinks:
            sink.write(step, values)

    def advance(self, step: int) -> None:
        """Advance the progress bar to a step whose metrics are not read."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def event(self, step: int, values: Values, message: str) -> None:
        """Write metrics that are not those of a training step, such as an evaluation's, and print a line about them."""
        if not self.speaks:
            return
        for sink in self.sinks:
            sink.write(step, values)
        self.say(message)

    def say(self, message: Any) -> None:
        """Print a line in the terminal, on rank 0 only."""
        if self.speaks:
            self.console.print(message, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Stop the progress bar, and close all sinks."""
        if self._progress is not None:
            self._progress.stop()
        for sink in self.sinks:
            sink.close()

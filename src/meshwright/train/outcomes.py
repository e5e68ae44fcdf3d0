"""What the host knows of the steps of a run: their metrics, and which of them changed nothing because they were not finite."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.checkpoint.directory import latest
from meshwright.errors import NonFiniteError, number_of
from meshwright.train.config import RunConfig
from meshwright.train.engine.guard import is_finite
from meshwright.train.journal import Journal
from meshwright.train.start.run_files import Paths

__all__ = ["Outcomes"]


class Outcomes:
    """Reads how the steps went. All ranks read the same numbers, at the same points of the run.

    Args:
        config: configuration of the run.
        paths: files of the run.
        write_batch: writes the batch of a step, counted from 0, into a folder.
        say: prints a line.

    Attributes:
        journal: the metrics of steps that were not read yet.
        in_a_row: number of the steps read last that were skipped.
    """

    def __init__(
        self, config: RunConfig, paths: Paths, write_batch: Callable[[int, Path], None], say: Callable[[str], None]
    ) -> None:
        self._config, self._paths, self._write_batch, self._say = config, paths, write_batch, say
        self.journal = Journal()
        self.in_a_row = self._skipped = 0

    def read(self, *, posted: bool = False) -> None:
        """Wait for the steps that were not read yet, and read how they went.

        Args:
            posted: only those that were on their way to the host (:meth:`Journal.post`).

        Raises:
            NonFiniteError: a step was not finite and such steps are not skipped, or too many in a row were skipped.
        """
        for step, values in self.journal.read_posted() if posted else self.journal.read():
            if is_finite(values):
                self.in_a_row = 0
            else:
                self.in_a_row += 1
                self._skipped += 1
                self._not_finite(step, values)

    def summary(self) -> dict[str, Any]:
        """Return :meth:`Journal.summary`, and the number of steps since the last summary that changed nothing."""
        skipped, self._skipped = self._skipped, 0
        return {**self.journal.summary(), "skipped": skipped}

    def _not_finite(self, step: int, values: dict[str, float]) -> None:
        """Save the batch and end the run, or print that the step was skipped."""
        training = self._config.training
        share = training.global_batch_size
        numbers = f"loss {values['loss']}, gradient norm {values['gradient_norm']}"
        failure = f"step {step + 1}: {numbers}; sequences {step * share} to {(step + 1) * share - 1}"
        last, most = latest(self._paths.checkpoints), training.max_skipped
        kept = f"the last good checkpoint is {last}" if last else "no checkpoint was saved before it"
        if training.on_nonfinite == "skip":
            self._say(f"[yellow]{failure}: step skipped (training.on_nonfinite=skip)[/yellow]")
            if most is not None and self.in_a_row >= most:
                many = f"{number_of(self.in_a_row, 'step')} in a row skipped, so that nothing is learned"
                said = f"{failure}; {many}; {kept}. training.max_skipped={most} is the limit"
                raise NonFiniteError("run.nonfinite", said)
            return
        folder = self._paths.root / f"nonfinite-step-{step + 1}"
        self._write_batch(step, folder)
        said = f"{failure}; the batch of each rank is in {folder}; {kept}. training.on_nonfinite=skip leaves such steps out"
        raise NonFiniteError("run.nonfinite", said)

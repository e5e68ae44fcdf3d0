"""Where a run keeps its files, and what one of them says of the model's source."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError

__all__ = ["Paths", "source_facts"]


@dataclass(frozen=True)
class Paths:
    """Where a run keeps its files, under its output directory ``root``."""

    root: Path

    @property
    def checkpoints(self) -> Path:
        """The complete checkpoints, one directory each."""
        return self.root / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer of the run."""
        return self.root / "tokenizer"

    @property
    def tokens(self) -> Path:
        """The tokenized documents."""
        return self.root / "tokens"

    @property
    def source(self) -> Path:
        """Facts about the model that training began with, which an export restores, and the kind of data."""
        return self.root / "source.json"

    @property
    def config(self) -> Path:
        """The complete configuration."""
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        """The metrics, one line for each logged step."""
        return self.root / "metrics.jsonl"

    @property
    def forecast(self) -> Path:
        """The parts of a step in seconds, as forecast and as measured; only of a run whose device is known."""
        return self.root / "forecast.json"

    @property
    def report(self) -> Path:
        """The page about the run (`metrics.html`)."""
        return self.root / "report.html"

    @property
    def tensorboard(self) -> Path:
        """The event files of TensorBoard."""
        return self.root / "tensorboard"

    @property
    def export(self) -> Path:
        """The final model as a Hugging Face directory."""
        return self.root / "export"


def source_facts(paths: Paths) -> dict[str, Any]:
    """Return the facts written when the run was prepared (:func:`meshwright.models.weights.source.facts`), and the kind of
    data.

    Raises:
        CheckpointError: the file is not what was written.
    """
    if not paths.source.is_file():
        return {}
    try:
        values = json.loads(paths.source.read_bytes())
        if not isinstance(values, dict):
            raise ValueError("no mapping")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            "checkpoint.unreadable", f"{paths.source}: cannot be read ({error}); start the run again, which writes it anew"
        ) from error
    return values

"""What a run exports at its end beside its last model: the best checkpoint, and a moving average."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.checkpoint.directory import read_meta
from meshwright.train.callbacks.best_checkpoint import BestCheckpoint
from meshwright.train.callbacks.make_callbacks import make_callbacks
from meshwright.train.callbacks.moving_average import MovingAverage
from meshwright.train.config import RunConfig
from meshwright.train.start.run_files import Paths

__all__ = ["Export", "directories", "exports"]


@dataclass(frozen=True)
class Export:
    """A directory of Hugging Face that a run writes.

    Attributes:
        directory: the directory.
        checkpoint: the checkpoint that it is made of; it may not be there, if the run began from one of another directory.
        average: name of the callback whose averages take the place of the parameters; empty: the parameters.
    """

    directory: Path
    checkpoint: Path
    average: str = ""


def directories(config: RunConfig) -> list[Path]:
    """Return the directories that :func:`exports` names."""
    return [export.directory for export in _exports(config, Path("newest"), {})]


def exports(config: RunConfig, newest: Path) -> list[Export]:
    """Return what a run exports, of its newest checkpoint or of one that a callback keeps."""
    kept = {name: newest.with_name(f"step-{step:08d}") for name, step in read_meta(newest)["callbacks"]["kept"].items()}
    return [*_exports(config, newest, kept)]


def _exports(config: RunConfig, newest: Path, kept: dict[str, Path]) -> Iterator[Export]:
    paths = Paths(config.directory)
    if config.export:
        yield Export(paths.export, newest)
    for name, callback in make_callbacks(config):
        beside = paths.export.with_name(f"export-{name.replace('#', '-')}")
        if isinstance(callback, MovingAverage) and callback.export:
            yield Export(beside, newest, name)
        if isinstance(callback, BestCheckpoint) and config.export:
            yield Export(beside, kept.get(name, newest.with_name("no evaluation")))

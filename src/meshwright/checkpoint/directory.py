"""A run's directory of checkpoints: which are there, which are sound, and where a damaged one goes.

checkpoints/
  step-00000100/            complete
    meta.json               step, layout, parameters, configuration, the model's config, loader; tokenizer/
    .metadata, *.distcp     tensors (DCP)
    SHA256SUMS              of all files
  step-00000200.tmp/        being written, or left by a crash: never read, removed at the next start
  step-00000300.damaged/    set aside: never read, never removed, and not counted
"""

import json
import re
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshwright.checkpoint import checksums
from meshwright.errors import CheckpointError

__all__ = ["FORMAT", "complete", "damage", "damage_in_brief", "latest", "newest", "read_meta", "set_aside"]

_NAME = re.compile(r"step-(\d+)")
FORMAT = 2
WITHOUT_SUMS = 1
"""A format that is read too: the same, before files had checksums."""


def _named(directory: Path) -> list[Path]:
    """Checkpoints by their names, oldest first."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def complete(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return [path for path in _named(directory) if (path / "meta.json").is_file()]


def newest(directory: Path) -> Path | None:
    """The newest checkpoint of a directory, in whatever state."""
    return next(reversed(_named(directory)), None)


def latest(directory: Path) -> Path | None:
    """The newest complete checkpoint of a directory."""
    return next(reversed(complete(directory)), None)


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """What was saved beside the tensors.

    Raises:
        CheckpointError: if it is no complete checkpoint of a format that is read.
    """
    try:
        meta = json.loads((checkpoint / "meta.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{checkpoint}: not a complete checkpoint: {error}") from error
    if not isinstance(meta, dict) or "format" not in meta:
        raise CheckpointError(f"{checkpoint}: not a checkpoint of Meshwright")
    if meta["format"] not in (WITHOUT_SUMS, FORMAT):
        raise CheckpointError(f"{checkpoint}: has format {meta['format']!r}, this version reads {WITHOUT_SUMS} and {FORMAT}")
    return meta


def _sums(checkpoint: Path) -> tuple[dict[str, str], list[str]]:
    """The checkpoint's list of sums, and what is wrong with it."""
    if not (checkpoint / "meta.json").is_file():
        return {}, ["meta.json is missing"]
    try:
        sums = checksums.listed(checkpoint)
    except FileNotFoundError:
        try:
            old = json.loads((checkpoint / "meta.json").read_text()).get("format") == WITHOUT_SUMS
        except (ValueError, AttributeError, RecursionError):
            old = False
        return {}, [] if old else [f"{checksums.NAME} is missing"]
    except (ValueError, OSError) as error:
        return {}, [f"{checksums.NAME} cannot be read: {error}"]
    lacking = sorted({"meta.json", ".metadata"} - sums.keys())
    return sums, [f"{checksums.NAME} has no sum of {name}" for name in lacking]


def damage_in_brief(checkpoint: Path) -> list[str]:
    """What is wrong with a checkpoint, as far as one process can tell at once: all but the bytes of the tensors.

    Returns:
        A line for each file; none for a checkpoint of the format that had no checksums.

    Raises:
        CheckpointError: files that must not be read.
    """
    sums, found = _sums(checkpoint)
    small = {name: digest for name, digest in sums.items() if not name.endswith(".distcp")}
    found += [f"{name} is missing" for name in sums.keys() - small if not (checkpoint / name).is_file()]
    return found + _compared(checkpoint, small)


def damage(checkpoint: Path, rank: int = 0, ranks: int = 1) -> list[str]:
    """What is wrong with a checkpoint: every file is compared, by one of several ranks. Collective over all ranks.

    Args:
        checkpoint: the same on all ranks.
        rank: that of this process.
        ranks: how many share the work; of more than one, all know the whole answer.

    Returns:
        A line for each file, the same on all ranks.

    Raises:
        CheckpointError: on all ranks, files that must not be read.
    """
    sums, found = _sums(checkpoint)
    refused = ""
    try:
        found += _compared(checkpoint, {name: sums[name] for name in checksums.share(checkpoint, sums, rank, ranks)})
    except CheckpointError as error:
        refused = str(error)
    outcomes: list[tuple[list[str], str]] = [(found, refused)]
    if ranks > 1:
        outcomes *= ranks
        dist.all_gather_object(outcomes, (found, refused))
    if told := [text for _, text in outcomes if text]:
        raise CheckpointError(told[0])
    return sorted({line for lines, _ in outcomes for line in lines})


def _compared(checkpoint: Path, sums: dict[str, str]) -> list[str]:
    try:
        return checksums.damage(checkpoint, sums)
    except PermissionError as error:
        raise CheckpointError(f"{error.filename}: must not be read: {error.strerror}") from error


def set_aside(checkpoint: Path) -> Path:
    """Give a damaged checkpoint another name, under which it is neither read, nor counted, nor removed."""
    place, number = checkpoint.with_suffix(".damaged"), 2
    while place.exists():
        place, number = checkpoint.with_suffix(f".damaged-{number}"), number + 1
    try:
        return checkpoint.rename(place)
    except OSError as error:
        raise CheckpointError(f"{checkpoint}: is damaged, and cannot be renamed: {error.strerror or error}") from error

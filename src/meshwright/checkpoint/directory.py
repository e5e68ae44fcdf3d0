"""The directory of a run's checkpoints: which checkpoints exist, which are undamaged, and where a damaged one is moved.

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
from meshwright.errors import CheckpointError, Refusal
from meshwright.paths import mistaken

__all__ = ["FORMAT", "complete", "damage", "damage_in_brief", "latest", "newest", "read_meta", "set_aside"]

_NAME = re.compile(r"step-(\d+)")
FORMAT = 2
WITHOUT_SUMS = 1
"""An earlier format that is read too: the same, but without checksums of files."""


def _named(directory: Path) -> list[Path]:
    """Return checkpoints by their names, oldest first."""
    if not directory.is_dir():
        return []
    checkpoints = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(checkpoints, key=lambda path: int(path.name.removeprefix("step-")))


def complete(directory: Path) -> list[Path]:
    """Return the complete checkpoints of a directory, oldest first."""
    return [path for path in _named(directory) if (path / "meta.json").is_file()]


def newest(directory: Path) -> Path | None:
    """Return the newest checkpoint of a directory, complete or not; ``None`` if there is none."""
    return next(reversed(_named(directory)), None)


def latest(directory: Path) -> Path | None:
    """Return the newest complete checkpoint of a directory; ``None`` if there is none."""
    return next(reversed(complete(directory)), None)


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """Return what was saved besides the tensors.

    Raises:
        CheckpointError: it is no complete checkpoint of a known format.
    """
    try:
        meta = json.loads((checkpoint / "meta.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        last = latest(checkpoint / "checkpoints")
        instead = mistaken(checkpoint, "checkpoint") if last is None else f"; it is a run, whose newest checkpoint is {last}"
        raise CheckpointError("checkpoint.incomplete", f"{checkpoint}: not a complete checkpoint: {error}{instead}") from error
    if not isinstance(meta, dict) or "format" not in meta:
        raise CheckpointError("checkpoint.incomplete", f"{checkpoint}: not a checkpoint of Meshwright")
    if meta["format"] not in (WITHOUT_SUMS, FORMAT):
        raise CheckpointError(
            "checkpoint.format", f"{checkpoint}: has format {meta['format']!r}, this version reads {WITHOUT_SUMS} and {FORMAT}"
        )
    return meta


def _sums(checkpoint: Path) -> tuple[dict[str, str], list[str]]:
    """Return the checksums in a checkpoint's list, and what is wrong with the list.

    Raises:
        OSError: there is a list, but it cannot be read.
    """
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
    except ValueError as error:  # also bytes that are no text
        return {}, [f"{checksums.NAME} cannot be read: {error}"]
    lacking = sorted({"meta.json", ".metadata"} - sums.keys())
    return sums, [f"{checksums.NAME} has no checksum of {name}" for name in lacking]


def damage_in_brief(checkpoint: Path) -> list[str]:
    """Return the damage of a checkpoint that one process can find at once: everything except wrong bytes of the tensors.

    Returns:
        One line for each damaged file; none for a checkpoint of the format without checksums.

    Raises:
        CheckpointError: files cannot be read, so it is unknown whether they are damaged.
    """
    try:
        sums, damages = _sums(checkpoint)
        small = {name: digest for name, digest in sums.items() if not name.endswith(".distcp")}
        damages += [f"{name} is missing" for name in sums.keys() - small if not (checkpoint / name).is_file()]
        return damages + checksums.damage(checkpoint, small)
    except OSError as error:
        raise CheckpointError(_unreadable(checkpoint, error)) from error


def damage(checkpoint: Path, group: dist.ProcessGroup | None = None) -> list[str]:
    """Return the damage of a checkpoint: the checksum of every file is compared, by one of several ranks.

    Args:
        checkpoint: the checkpoint, the same on all ranks.
        group: the ranks that share the work; all of them make this call. ``None``: this process does all of it.

    Returns:
        One line for each damaged file, the same on all ranks.

    Raises:
        CheckpointError: on all ranks, if files cannot be read, so it is unknown whether they are damaged.
    """
    outcome: list[Any] = [_table(checkpoint)]
    if group is not None:
        dist.broadcast_object_list(outcome, src=0, group=group)  # a shared file system may not show the same to all ranks
    sums, sizes, damages, refused = outcome[0]
    rank, ranks = (group.rank(), group.size()) if group is not None else (0, 1)
    try:
        damages = damages + checksums.damage(checkpoint, {name: sums[name] for name in checksums.share(sizes, rank, ranks)})
    except OSError as error:
        refused = _unreadable(checkpoint, error)
    outcomes: list[tuple[list[str], Refusal | None]] = [(damages, refused)] * ranks
    if group is not None:
        dist.all_gather_object(outcomes, (damages, refused), group=group)
    if failures := [text for _, text in outcomes if text]:
        raise CheckpointError(failures[0])
    return sorted({line for lines, _ in outcomes for line in lines})


def _table(checkpoint: Path) -> tuple[dict[str, str], dict[str, int], list[str], Refusal | None]:
    """Return checksums and sizes by file name, what is wrong with the list itself, and why nothing is known, if so."""
    try:
        sums, damages = _sums(checkpoint)
        return sums, checksums.sizes(checkpoint, sums), damages, None
    except OSError as error:
        return {}, {}, [], _unreadable(checkpoint, error)


def _unreadable(checkpoint: Path, error: OSError) -> Refusal:
    return Refusal(
        "checkpoint.unreadable",
        f"{error.filename or checkpoint}: cannot be read: {error.strerror or error}; whether it is damaged is not known",
    )


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, so that it is neither read, nor counted, nor removed; return its new path.

    Raises:
        CheckpointError: it cannot be renamed.
    """
    place, number = checkpoint.with_suffix(".damaged"), 2
    while place.exists():
        place, number = checkpoint.with_suffix(f".damaged-{number}"), number + 1
    try:
        return checkpoint.rename(place)
    except OSError as error:
        raise CheckpointError(
            "checkpoint.damaged", f"{checkpoint}: is damaged, and cannot be renamed: {error.strerror or error}"
        ) from error

"""Chooses the checkpoint that a run resumes from.

A damaged checkpoint is reported, set aside and skipped; if the configuration names it by its path, it is refused.
"""

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshwright.checkpoint.directory import complete, damage, damage_in_brief, latest, newest, read_meta, set_aside
from meshwright.distributed.process_group import from_rank_0
from meshwright.errors import CheckpointError, Refusal, described
from meshwright.paths import no_directory
from meshwright.train.config import RunConfig
from meshwright.train.start.run_files import Paths

__all__ = ["changes", "checkpoint_to_resume", "pass_over_damaged", "verified"]

Say = Callable[[str], None]


def checkpoint_to_resume(config: RunConfig) -> Path | None:
    """Return the checkpoint that ``checkpoint.resume`` selects; ``None``: the run starts anew.

    Raises:
        CheckpointError: the path has no complete checkpoint, or one of an earlier step than the latest in the output directory;
            or it is ``never``, and the output directory has checkpoints.
    """
    last = latest(Paths(config.directory).checkpoints)
    resume = config.checkpoint.resume
    if resume == "auto":
        return last
    if resume == "never":
        if last is not None:
            raise CheckpointError(
                "checkpoint.resume",
                f"checkpoint.resume=never, but {config.output} holds {last.name}; choose another output, or resume=auto",
            )
        return None
    if absent := no_directory("checkpoint.resume", resume, hub=False):
        raise CheckpointError(absent)
    path = Path(resume).expanduser()
    meta = read_meta(path)
    if last is not None and read_meta(last)["step"] > meta["step"]:
        # The next checkpoints would be older than those in the directory: they would be removed, and not resumed from.
        raise CheckpointError(
            "checkpoint.resume",
            f"checkpoint.resume={resume}: {config.output} holds the later {last.name}; choose another output, resume=auto, or "
            f"remove what is later than step {meta['step']}",
        )
    return path


def pass_over_damaged(config: RunConfig, say: Say) -> None:
    """Set damaged checkpoints aside, newest first, until one passes the quick check of one process. Only one process calls it.

    Args:
        config: configuration of the run, whose output directory this process has locked.
        say: called with a line about each checkpoint that is set aside.

    Raises:
        CheckpointError: a damaged checkpoint was asked for by its path, or is the only one.
    """
    resume, directory = config.checkpoint.resume, Paths(config.directory).checkpoints
    if resume != "auto":
        if (path := Path(resume).expanduser()).is_dir():
            if not (path / ".metadata").is_file():
                read_meta(path)  # says what it is instead
            _refuse(path, resume, damage_in_brief(path))
        return
    while (last := newest(directory)) is not None and (damages := damage_in_brief(last)):
        _set_aside(last, damages, say)


def verified(config: RunConfig, checkpoint: Path | None, say: Say) -> Path | None:
    """Return a checkpoint whose files are all as they were written: the given one, or an earlier one.

    Collective over all ranks. The ranks share the reading, and all return the same checkpoint.

    Args:
        config: configuration of the run.
        checkpoint: the same on all ranks; ``None``: there is none to resume from.
        say: called on rank 0 with a line about each checkpoint that is set aside.

    Raises:
        CheckpointError: a damaged checkpoint was asked for by its path, or is the only one; on all ranks.
    """
    if checkpoint is None:
        return None
    # One rank may read a large file for longer than a collective of training may wait.
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=2))
    while checkpoint is not None and (damages := damage(checkpoint, patient)):
        _refuse(checkpoint, config.checkpoint.resume, damages)
        checkpoint = _in_place_of(checkpoint, damages, config, say, patient)
    return checkpoint


def _in_place_of(checkpoint: Path, damages: list[str], config: RunConfig, say: Say, group: dist.ProcessGroup) -> Path | None:
    """Set a damaged checkpoint aside, and return the one to resume from. Collective."""

    def another() -> Path | None:
        _set_aside(checkpoint, damages, say)
        pass_over_damaged(config, say)
        return checkpoint_to_resume(config)

    return from_rank_0(
        another, lambda error: CheckpointError("checkpoint.unreadable", f"{checkpoint}: {described(error)}"), group
    )


def _refuse(checkpoint: Path, resume: str, damages: list[str]) -> None:
    if damages and resume != "auto":
        raise CheckpointError(
            [Refusal("checkpoint.damaged", f"checkpoint.resume={resume}: {checkpoint} is damaged: {line}") for line in damages]
        )


def _set_aside(checkpoint: Path, damages: list[str], say: Say) -> None:
    shown = "; ".join(damages[:4]) + (f"; and {len(damages) - 4} more files" if len(damages) > 4 else "")
    before = [path for path in complete(checkpoint.parent) if path != checkpoint]
    if not before:
        raise CheckpointError(
            "checkpoint.damaged",
            f"{checkpoint} is damaged: {shown}. There is no other checkpoint; choose another output to begin anew",
        )
    place = set_aside(checkpoint)
    say(f"{checkpoint} is damaged: {shown}. It is now {place.name}; the run goes on from {before[-1].name}")


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the settings that decide updates or evaluations, and differ from the configuration of a checkpoint.

    Args:
        before: the configuration in the checkpoint, as plain values.
        now: the configuration of this run, as plain values.

    Returns:
        A line for each such key, such as ``optimizer.lr: 0.0003 in the checkpoint, 0.0001 now``.
    """
    changed = [
        f"{key}: {before[key]} in the checkpoint, {now[key]} now"
        for key in ("callbacks",)
        if key in before and key in now and before[key] != now[key]
    ]
    teachers = [(one.get("teacher") or {}).get("path") for one in (before, now)]
    if None in teachers and any(teachers):
        changed.append(f"teacher.path: {teachers[0] or 'none'} in the checkpoint, {teachers[1] or 'none'} now")
    for section, keys in _DECIDE_UPDATES.items():
        saved, current = before.get(section) or {}, now.get(section) or {}
        for key in keys or sorted(saved.keys() & current.keys()):  # a key that only one of two versions has cannot be compared
            if key in saved and key in current and saved[key] != current[key]:
                changed.append(f"{section}.{key}: {saved[key]} in the checkpoint, {current[key]} now")
    return changed


_DECIDE_UPDATES: dict[str, tuple[str, ...]] = {
    "optimizer": (),
    "schedule": (),
    "training": ("objective", "steps", "epochs", "global_batch_size", "clip_norm"),
    "parallel": ("freeze", "param_dtype", "reduce_dtype"),
    "data": ("eval_files",),
    "checkpoint": ("best",),
    "moe": ("aux_loss", "bias_update_rate"),
    "teacher": ("path", "dtype", "top_k"),
}
"""Section to the keys in it that decide how a step changes the parameters, or what is evaluated; no keys: all keys."""

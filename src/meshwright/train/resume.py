"""Which checkpoint a run goes on from. A damaged one is named, set aside and passed over, or refused where it was asked for."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshwright.checkpoint.directory import complete, damage, damage_in_brief, latest, newest, read_meta, set_aside
from meshwright.errors import CheckpointError, described
from meshwright.train.config import RunConfig
from meshwright.train.setup import Paths

__all__ = ["changes", "checkpoint_to_resume", "pass_over_damaged", "verified"]

Say = Callable[[str], None]


def checkpoint_to_resume(config: RunConfig) -> Path | None:
    """The checkpoint that ``checkpoint.resume`` means.

    Raises:
        CheckpointError: a path without a complete checkpoint, or of an earlier step than the output directory has; or
            ``never`` in a directory that has some.
    """
    last = latest(Paths(config.directory).checkpoints)
    wish = config.checkpoint.resume
    if wish == "auto":
        return last
    if wish == "never":
        if last is not None:
            raise CheckpointError(
                f"checkpoint.resume=never, but {config.output} holds {last.name}; choose another output, or resume=auto"
            )
        return None
    path = Path(wish).expanduser()
    meta = read_meta(path)
    if last is not None and read_meta(last)["step"] > meta["step"]:
        # What is saved from here on would be older than what is there: it would be dropped, and not resumed from.
        raise CheckpointError(
            f"checkpoint.resume={wish}: {config.output} holds the later {last.name}; choose another output, resume=auto, or "
            f"remove what is later than step {meta['step']}"
        )
    return path


def pass_over_damaged(config: RunConfig, say: Say) -> None:
    """Set damaged checkpoints aside, newest first, until one is sound as far as one process sees at once. On one process.

    Args:
        config: of the run, whose output directory this process has for itself.
        say: tells what was set aside.

    Raises:
        CheckpointError: a damaged one that was asked for by its path, or that is the only one.
    """
    wish, directory = config.checkpoint.resume, Paths(config.directory).checkpoints
    if wish != "auto":
        if (path := Path(wish).expanduser()).is_dir():
            _refuse(path, wish, damage_in_brief(path))
        return
    while (last := newest(directory)) is not None and (found := damage_in_brief(last)):
        _set_aside(last, found, say)


def verified(config: RunConfig, checkpoint: Path | None, say: Say) -> Path | None:
    """A checkpoint every file of which is as it was written: the given one, or an earlier one. Collective over all ranks.

    The ranks share the reading, and come to one decision.

    Args:
        config: of the run.
        checkpoint: the same on all ranks; ``None``: there is none to go on from.
        say: tells on rank 0 what was set aside.

    Raises:
        CheckpointError: on all ranks, a damaged one that was asked for by its path, or that is the only one.
    """
    if checkpoint is None:
        return None
    # A large file is read by one rank, for longer than a collective of training may wait.
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=2))
    while checkpoint is not None and (found := damage(checkpoint, patient)):
        _refuse(checkpoint, config.checkpoint.resume, found)
        outcome: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                _set_aside(checkpoint, found, say)
                pass_over_damaged(config, say)
                outcome = [checkpoint_to_resume(config)]
            except CheckpointError as error:
                outcome = [error]
            except Exception as error:  # whatever it was, the others must not wait for it
                outcome = [CheckpointError(f"{checkpoint}: {described(error)}")]
        dist.broadcast_object_list(outcome, src=0, group=patient)
        if isinstance(outcome[0], CheckpointError):
            raise outcome[0]
        checkpoint = outcome[0]
    return checkpoint


def _refuse(checkpoint: Path, wish: str, found: list[str]) -> None:
    if found and wish != "auto":
        raise CheckpointError([f"checkpoint.resume={wish}: {checkpoint} is damaged: {line}" for line in found])


def _set_aside(checkpoint: Path, found: list[str], say: Say) -> None:
    shown = "; ".join(found[:4]) + (f"; and {len(found) - 4} more files" if len(found) > 4 else "")
    before = [path for path in complete(checkpoint.parent) if path != checkpoint]
    if not before:
        raise CheckpointError(
            f"{checkpoint} is damaged: {shown}. There is no other checkpoint; choose another output to begin anew"
        )
    place = set_aside(checkpoint)
    say(f"{checkpoint} is damaged: {shown}. It is now {place.name}; the run goes on from {before[-1].name}")


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What of optimizer, rate and schedule differs from the configuration that a checkpoint was written with.

    Args:
        before: the configuration in the checkpoint.
        now: of this run, both as plain values.

    Returns:
        A line for each key, as ``optimizer.lr: 0.0003 in the checkpoint, 0.0001 now``.
    """
    found = []
    for section, keys in _DECIDE_UPDATES.items():
        held, given = before.get(section) or {}, now.get(section) or {}
        for key in keys or sorted(held.keys() & given.keys()):  # a key that one of two versions knows has no value to compare
            if key in held and key in given and held[key] != given[key]:
                found.append(f"{section}.{key}: {held[key]} in the checkpoint, {given[key]} now")
    return found


_DECIDE_UPDATES: dict[str, tuple[str, ...]] = {
    "optimizer": (),
    "schedule": (),
    "training": ("objective", "steps", "epochs", "global_batch_size", "clip_norm"),
    "parallel": ("freeze", "param_dtype", "reduce_dtype"),
    "moe": ("aux_loss", "bias_update_rate"),
}
"""Sections, and keys of them (none: all), that decide how a step changes the parameters."""

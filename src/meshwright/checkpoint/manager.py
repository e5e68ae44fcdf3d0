"""CheckpointManager: the checkpoints of a run. Each is written under a temporary name, and renamed when it is complete."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from meshwright.checkpoint import checksums, storage
from meshwright.checkpoint.directory import FORMAT, complete, read_meta
from meshwright.checkpoint.staging import HostCopies
from meshwright.errors import CheckpointError, Refusal, described

__all__ = ["CheckpointManager", "check_same_model", "check_writable", "save_checkpoint"]

COSMETIC = {
    "_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "return_dict",
    "output_hidden_states", "output_attentions", "attn_implementation", "_attn_implementation",
    "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop",
}  # fmt: skip
"""Keys of a model's config that change the meaning of no parameter."""


def _plain(value: Any) -> Any:
    """Return a config's value without cosmetic keys in its sections."""
    return {key: _plain(item) for key, item in value.items() if key not in COSMETIC} if isinstance(value, dict) else value


def check_base(checkpoint: Path, source: Mapping[str, Any], files: Sequence[Path]) -> None:
    """Refuse to put an adapter of a checkpoint on another model than the one that it was trained on.

    Args:
        checkpoint: a checkpoint that holds only what is trained.
        source: the facts of its source.
        files: the weights that the run would read now.

    Raises:
        CheckpointError: they are not those that the run began with.
    """
    from meshwright.models.weights.source import fingerprint

    if source.get("base") != fingerprint(list(files)):
        raise CheckpointError(
            "adapter.base_weights",
            f"{checkpoint}: holds an adapter of other weights than those in {files[0].parent} (model.path); the files have "
            "changed, or are those of another model",
        )


def check_same_model(
    checkpoint: Path,
    expected: Mapping[str, tuple[int, ...]],
    model_config: Mapping[str, Any] | None = None,
    limit: int = 12,
) -> None:
    """Refuse a checkpoint of another model.

    Args:
        checkpoint: a complete checkpoint.
        expected: name to global shape of every parameter of the model.
        model_config: the model's config as plain values. Models of equal shapes may differ in heads or positions.
        limit: largest number of names listed for each kind of difference.

    Raises:
        CheckpointError: lists the names and shapes that differ.
    """
    saved = {
        name.removeprefix("model."): shape
        for name, (shape, _) in storage.contents(checkpoint).items()
        if name.startswith("model.")
    }
    absent = [f"{name} {shape}: not in the checkpoint" for name, shape in expected.items() if name not in saved]
    # Other tensors of the checkpoint (buffers) are compared when it is read.
    known_parameters = set(read_meta(checkpoint).get("parameters", saved))
    excess = [f"{name} {saved[name]}: only in the checkpoint" for name in saved if name in known_parameters - set(expected)]
    shapes = [
        f"{name}: {saved[name]} in the checkpoint, {shape} in the model"
        for name, shape in expected.items()
        if name in saved and saved[name] != shape
    ]
    saved_config, current_config = read_meta(checkpoint).get("model_config"), model_config
    settings = []
    if saved_config is not None and current_config is not None:
        settings = [
            f"{key}: {saved_config.get(key)!r} in the checkpoint, {current_config.get(key)!r} in the model"
            # Only keys of both are compared: another release of transformers may have keys of its own.
            for key in sorted((saved_config.keys() & current_config.keys()) - COSMETIC)
            if _plain(saved_config[key]) != _plain(current_config[key])
        ]
    differences = []
    for kind in (absent, excess, shapes, settings):
        differences += kind[:limit] + ([f"... and {len(kind) - limit} more like these"] if len(kind) > limit else [])
    if differences:
        raise CheckpointError(
            "checkpoint.model",
            "\n  ".join([f"{checkpoint} is of another model; nothing was read or overwritten:", *differences]),
        )


def check_writable(directory: Path, needed: int = 0) -> None:
    """Check before training whether a directory can be written and has enough space.

    Args:
        directory: the directory; created if it does not exist.
        needed: number of bytes that checkpoints will take.

    Raises:
        CheckpointError: names the path, and the bytes needed and free.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".write-probe-{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise CheckpointError("checkpoint.unwritten", f"{directory}: cannot be written: {error.strerror or error}") from error
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise CheckpointError(
            "checkpoint.space",
            f"{directory}: checkpoints need {needed / 2**30:.2f} GiB and {free / 2**30:.2f} GiB are free; "
            "free some, choose another output, or keep fewer (checkpoint.keep)",
        )


class CheckpointManager:
    """Saves the checkpoints of a run. Every method is called on all ranks.

    Args:
        directory: directory of the checkpoints.
        keep: number of complete checkpoints to keep; ``None``: all.
        asynchronous: write in the background.
        attached: directory that is copied into each checkpoint (the tokenizer).
    """

    def __init__(self, directory: Path, keep: int | None = 2, asynchronous: bool = False, attached: Path | None = None) -> None:
        self.directory, self.keep, self.asynchronous, self.attached = directory, keep, asynchronous, attached
        self._pending: tuple[Future[None], Path] | None = None
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._group, self._copies = None, HostCopies()
        if asynchronous and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")  # its own, used in parallel with the step's collectives
        if self._rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            for left in directory.glob("step-*.tmp"):
                shutil.rmtree(left)
        _barrier()

    def save(self, step: int, tensors: dict[str, torch.Tensor], meta: Mapping[str, Any]) -> Path:
        """Save a checkpoint, and return its path. With ``asynchronous``, it is completed in the background after this returns.

        Args:
            step: number of optimizer steps done.
            tensors: see :mod:`meshwright.checkpoint.state`.
            meta: plain values to save besides the tensors.

        Raises:
            CheckpointError: on all ranks, if it could not be written; earlier checkpoints stay.
        """
        self.finish()
        final = self.directory / f"step-{step:08d}"
        temporary = final.with_suffix(".tmp")
        content = {"format": FORMAT, "step": step, **meta}
        if self.asynchronous:
            written = storage.write_in_background(temporary, tensors, self._group, self._copies)
            self._pending = (self._commit_when_written(written, temporary, content), temporary)
            return final
        storage.write(temporary, tensors)
        failure: Refusal | None = None
        if self._rank == 0:
            try:
                self._commit(temporary, content)
            except OSError as error:
                failure = Refusal("checkpoint.unwritten", f"{temporary}: not completed: {described(error)}")
        _raise_everywhere(failure)
        return final

    def _commit_when_written(self, written: Future[Any], temporary: Path, content: Mapping[str, Any]) -> Future[None]:
        """Return a future that is done when a checkpoint is complete. When DCP is done on rank 0, it is done on all ranks."""
        complete: Future[None] = Future()

        def commit(done: Future[Any]) -> None:
            try:
                done.result()
                if self._rank == 0:
                    self._commit(temporary, content)
                complete.set_result(None)
            except BaseException as error:  # passed on to the waiting caller
                complete.set_exception(error)

        written.add_done_callback(commit)
        return complete

    def finish(self) -> None:
        """Wait until a save in the background is complete.

        Raises:
            CheckpointError: on all ranks, if it failed on one.
        """
        if self._pending is None:
            return
        complete, temporary = self._pending
        self._pending = None
        failure: Refusal | None = None
        try:
            complete.result()
        except (Exception, CheckpointException) as error:  # any error of the thread is the reason why there is no checkpoint
            failure = Refusal("checkpoint.unwritten", f"{temporary}: not written: {storage.reason(error)}")
        _raise_everywhere(failure)

    def wait_for_save(self, seconds: float = 30.0) -> None:
        """After a failure, wait at most this long for a save in the background, without the other ranks; never raises."""
        if self._pending is not None:
            wait([self._pending[0]], timeout=seconds)

    def _commit(self, temporary: Path, content: Mapping[str, Any]) -> None:
        """On rank 0, make a written checkpoint complete, and remove the oldest ones."""
        _complete(temporary, temporary.with_suffix(""), content, self.attached)
        if self.keep is not None:
            kept = set(content.get("callbacks", {}).get("kept", {}).values())  # these are kept beside the others
            others = [path for path in complete(self.directory) if int(path.name.removeprefix("step-")) not in kept]
            for old in others[: -self.keep]:
                _remove(old)


def save_checkpoint(path: Path, step: int, tensors: dict[str, torch.Tensor], meta: Mapping[str, Any]) -> None:
    """Save one checkpoint at a path, where it appears when it is complete. An earlier one there is replaced. All ranks call it.

    Args:
        path: its directory.
        step: number of optimizer steps done.
        tensors: see :mod:`meshwright.checkpoint.state`.
        meta: plain values to save besides the tensors.

    Raises:
        CheckpointError: on all ranks, if it could not be written, or something else is there.
    """
    final, speaks = path.resolve(), not dist.is_initialized() or dist.get_rank() == 0
    temporary = final.with_name(f".{final.name}.tmp")
    failure: Refusal | None = None
    if speaks:
        try:
            if final.exists() and not (final / "meta.json").is_file():
                said = f"{path}: is there, and is no checkpoint; choose another path"
                raise CheckpointError("checkpoint.unwritten", said)
            json.dumps(meta)
            check_writable(final.parent)
            shutil.rmtree(temporary, ignore_errors=True)
        except CheckpointError as error:
            failure = error.problems[0]
        except (TypeError, ValueError) as error:
            failure = Refusal("checkpoint.unwritten", f"{path}: state: {error}; legal are plain values, as in JSON")
    _raise_everywhere(failure)
    storage.write(temporary, tensors)
    if speaks:
        try:
            _complete(temporary, final, {"format": FORMAT, "step": step, **meta}, None)
        except OSError as error:
            failure = Refusal("checkpoint.unwritten", f"{path}: not completed: {described(error)}")
    _raise_everywhere(failure)


def _complete(temporary: Path, final: Path, content: Mapping[str, Any], attached: Path | None) -> None:
    """Make a written checkpoint complete, with its facts and a copy of a directory, in the place of an earlier one."""
    others = [temporary / "meta.json"]
    if attached is not None:
        copied = Path(shutil.copytree(attached, temporary / attached.name, dirs_exist_ok=True))
        others += [path for path in copied.rglob("*") if path.is_file()]
    with open(temporary / "meta.json", "w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    checksums.append(temporary, {path.relative_to(temporary).as_posix(): checksums.sum_of(path) for path in others})
    if final.exists():
        _remove(final)
    temporary.rename(final)
    _fsync_directory(final.parent)


def _raise_everywhere(failure: Refusal | None) -> None:
    """Raise on all ranks if one failed."""
    failures = [failure]
    if dist.is_initialized():
        failures = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
    reported = [text for text in failures if text]
    if reported:
        raise CheckpointError(failure or reported[0])


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint under a temporary name: if removal is interrupted, the rest must not look complete."""
    doomed = checkpoint.with_suffix(".old.tmp")
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()

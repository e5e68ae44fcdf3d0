"""One worker process of a run, whichever launcher started it."""

import os
import signal
import socket
import sys
import threading
import time
import uuid
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from rich.markup import escape

from meshwright.checkpoint.directory import read_meta
from meshwright.data.store import TokenStore
from meshwright.device import release_memory
from meshwright.distributed.process_group import check_collectives, is_communication, process_group
from meshwright.errors import (
    ConfigError,
    DataError,
    InterruptError,
    MeshwrightError,
    Refusal,
    StoppedError,
    WorkerError,
    described,
)
from meshwright.plan.cost.activation_traffic import kinds_of_collectives
from meshwright.ranks.forked import keep_inherited
from meshwright.ranks.watch import Watch
from meshwright.terminal import console
from meshwright.train.config import RunConfig
from meshwright.train.forecast import Forecast
from meshwright.train.proofs.records import Source
from meshwright.train.proofs.report_or_audit import report_or_audit
from meshwright.train.start.ending import SIGNALS, UNEXPORTED, Agreement, SignalThread, begin, has_begun, leave_to_rank_0, tell
from meshwright.train.start.prepare import introduce, load_run_tokenizer, locked, prepare_run, warn
from meshwright.train.start.resume import changes, checkpoint_to_resume, verified
from meshwright.train.start.run_files import Paths
from meshwright.train.start.setup import make_setup
from meshwright.train.start.teacher_setup import with_teacher
from meshwright.user_code import import_modules

if TYPE_CHECKING:
    from meshwright.train.start.scoring import ScoreJob

__all__ = ["run_worker"]

MARK = ".shared"
"""A file in the output directory, by which every rank checks that it sees the same directory as rank 0."""

ATTEMPTS, SECONDS_BETWEEN = 20, 0.5


def run_worker(
    config: RunConfig,
    device_kind: str,
    prepared: tuple[str, Path | None] | None = None,
    *,
    source: Source | None = None,
    forecast: Forecast | None = None,
    asked: Path | None = None,
    fast: bool = False,
    job: "ScoreJob | None" = None,
) -> None:
    """Train as one rank. Collective over all ranks of the job.

    Args:
        config: configuration of the run.
        device_kind: kind of the device, as in :mod:`meshwright.device`.
        prepared: the token store and the checkpoint to resume from, if the launcher prepared the run; ``None``: rank 0
            prepares it.
        source: where the configuration came from, for the line about the layout's proof, which rank 0 prints if it prepares.
        forecast: the command that makes the forecast of a step; ``None``: none is made.
        asked: a file that the launcher creates to ask the run to end.
        fast: of tokens that are there already, compare only a sample with their digests.
        job: what to do in place of training.

    Raises:
        StoppedError: a signal ended the run.
        MeshwrightError: what the run failed with.
    """
    keep_inherited()
    with ExitStack() as resources:
        device = resources.enter_context(process_group(timedelta(minutes=config.launch.timeout_minutes), device_kind))
        agreement = Agreement(config.checkpoint.every_minutes)
        begun = threading.Event()

        def ask(reason: str) -> None:
            if job is not None:
                if dist.get_rank() == 0:
                    tell(f"{reason}: {job.out} is not written")
                os._exit(128 + signal.Signals[reason])
            if prepared is not None and reason == signal.SIGINT.name and not (has_begun(asked) if asked else begun.is_set()):
                if asked is None:  # else the launcher says so
                    tell("interrupted while the model gets its values, before the first step; nothing is lost")
                os._exit(InterruptError.exit_code)
            agreement.ask_to_end(reason)

        resources.enter_context(SignalThread(SIGNALS, ask, asked, speaks=dist.get_rank() == 0))
        # One process chooses the checkpoint: on a shared file system ranks may see different ones.
        store, resume = prepared or _prepare_on_rank_0(config, resources, source, fast, job)
        resume = verified(config, resume, warn)
        # Only now: waiting while one rank prepares or reads is no hang.
        watch = resources.enter_context(_watch(config, device_kind))
        import_modules(config.imports)  # before the tokenizer, whose class one of them may register
        tokenizer = load_run_tokenizer(config)
        setup = with_teacher(make_setup(config, dist.get_world_size(), tokenizer))
        if dist.get_world_size() > 1:
            teachers = () if setup.teacher is None else kinds_of_collectives(setup.teacher.plan)
            check_collectives({*kinds_of_collectives(setup.plan), *teachers}, device)
        tick = None if watch is None else watch.tick
        if job is not None:
            job.run(setup, TokenStore.open(store), device, tick)
            return
        from meshwright.train.parts import PARTS
        from meshwright.train.trainer import Trainer

        trainer = Trainer(setup, TokenStore.open(store), device, resume, replace(PARTS, forecast=forecast), tick)
        if resume is not None:
            trainer.recorder.say(f"resumed from {escape(str(resume))} at step {trainer.step}")
            for line in changes(read_meta(resume)["config"], config.model_dump(mode="json")):
                trainer.recorder.say(f"[yellow]{escape(line)}[/yellow]")
        trainer.agreement = agreement
        begun.set()
        if asked is not None and trainer.rank == 0:
            begin(asked)
        try:
            trainer.run()
        except RuntimeError as error:
            verdict = watch.verdict() if watch is not None and is_communication(error) else None
            if verdict is None:
                raise
            limit, reason = config.launch.timeout_minutes, str(error).partition("\n")[0]
            raise WorkerError("worker.silent", f"{verdict}; launch.timeout_minutes={limit:g} ended it: {reason}") from error
        speaks = trainer.rank == 0
        del trainer
        release_memory(device)
    if speaks:
        with SignalThread(SIGNALS, _leave_unexported, asked):
            finish_run(config)


def _leave_unexported(reason: str) -> None:
    """End the process on a signal after the last checkpoint is saved. An export appears when it is complete, or not at all."""
    tell(f"{reason}: {UNEXPORTED}")
    os._exit(StoppedError.exit_code)


def _watch(config: RunConfig, device_kind: str) -> AbstractContextManager[Watch | None]:
    """Make the watch that reports where ranks wait for each other; nothing for a single rank, or if the report is off."""
    seconds = config.launch.hang_report_seconds
    if seconds is None or dist.get_world_size() == 1:
        return nullcontext()
    return Watch(seconds, device_kind, _report)


def _report(lines: list[str]) -> None:
    page = console(sys.stderr)
    for line in (*lines, "the run goes on if the ranks do (this report: launch.hang_report_seconds)"):
        page.print(line, highlight=False, soft_wrap=True, markup=False)


def _prepare_on_rank_0(
    config: RunConfig, resources: ExitStack, source: Source | None, fast: bool, job: "ScoreJob | None"
) -> tuple[str, Path | None]:
    """Prepare the run on rank 0, and return the token store and the checkpoint on all ranks. If it fails, all ranks fail."""
    outcome: list[Any] = [None]
    mark = Paths(config.directory).root / MARK
    if dist.get_rank() == 0:
        try:
            resources.enter_context(locked(config))
            noted = None if job is None else job.noted()
            setup, _, store = prepare_run(config, dist.get_world_size(), fast=fast, noted=noted)
            if job is None:
                introduce(setup, config, store)
                report_or_audit(setup, source, None)
            else:
                job.check(setup)
            mark.write_text(uuid.uuid4().hex)
            resources.callback(mark.unlink, missing_ok=True)
            outcome[0] = (str(store.directory), checkpoint_to_resume(config), mark.read_text(), socket.gethostname())
        except MeshwrightError as error:
            outcome[0] = error
        except Exception as error:  # whatever it was, the other ranks must not wait in vain
            outcome[0] = WorkerError("worker.exception", f"rank 0: {described(error, config.directory)}")
    # A download or a large corpus takes longer than a collective of training may.
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=2))
    dist.broadcast_object_list(outcome, src=0, group=patient)
    if isinstance(outcome[0], MeshwrightError):
        if dist.get_rank() != 0:
            leave_to_rank_0(outcome[0])
        raise outcome[0]
    *prepared, written, host = outcome[0]
    _check_shared(config, mark, written, host, patient)
    _check_tokens(prepared[0], fast, patient)
    return tuple(prepared)


def _check_shared(config: RunConfig, mark: Path, written: str, host: str, group: Any) -> None:
    """Check that every rank sees what rank 0 has just written. Collective.

    Raises:
        ConfigError: a rank does not see it: its machine has another directory of that name, or none. Rank 0 raises it, and the
            other ranks end silently.
    """
    seen = _reads(mark, written)
    blind: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(blind, None if seen else f"rank {dist.get_rank()} on {socket.gethostname()}", group=group)
    blind_ranks = [text for text in blind if text is not None]
    if not blind_ranks:
        return
    shown = ", ".join(blind_ranks[:4]) + (f" and {len(blind_ranks) - 4} more" if len(blind_ranks) > 4 else "")
    error = ConfigError(
        "run.output",
        f"output={config.output!r}: {shown} cannot see what rank 0 on {host} wrote to {mark.parent.absolute()}; the directory "
        "of a run must be one that all machines share, under one path",
    )
    if dist.get_rank() != 0:
        leave_to_rank_0(error)
    raise error


def _check_tokens(store: str, fast: bool, group: Any) -> None:
    """Compare the tokens with their digests on each machine but that of rank 0, which has done it. Collective.

    Raises:
        DataError: a machine reads something else. Rank 0 raises it, and the other ranks end silently.
    """
    first = dist.get_rank() != 0 and os.environ.get("LOCAL_RANK") == "0"
    found: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(found, damage_here(store, fast) if first else [], group=group)
    if lines := [Refusal("data.store.damaged", f"rank {rank} {line}") for rank, here in enumerate(found) for line in here]:
        error = DataError(lines)
        if dist.get_rank() != 0:
            leave_to_rank_0(error)
        raise error


def damage_here(store: str, fast: bool) -> list[str]:
    """Return what is wrong with a token store, as this machine reads it."""
    try:
        lines, _ = TokenStore.open(store).damage(fast=fast)
    except DataError as error:
        lines = list(error.problems)
    return [f"on {socket.gethostname()}: {line} (rank 0 reads it well)" for line in lines]


def _reads(mark: Path, written: str) -> bool:
    """Whether the file has this content; waits some seconds for it, because a shared file system may show it late."""
    for _ in range(ATTEMPTS):
        try:
            os.scandir(mark.parent).close()  # makes NFS refresh its cache
            if mark.read_text() == written:
                return True
        except OSError:
            pass
        time.sleep(SECONDS_BETWEEN)
    return False


def finish_run(config: RunConfig) -> None:
    """Export the last checkpoint, and what callbacks have kept, and sample from it, if the configuration asks for it.

    On one rank, without a process group.
    """
    from meshwright.checkpoint.directory import latest
    from meshwright.checkpoint.export import export_checkpoint, generate
    from meshwright.train.callbacks.exports import exports

    paths = Paths(config.directory)
    page = console()
    newest = latest(paths.checkpoints)
    for one in exports(config, newest) if newest is not None else ():
        if not one.checkpoint.is_dir():
            warn(f"{one.directory} is not written: {one.checkpoint.name} was the best, and is not in {paths.checkpoints}")
            continue
        # Exports of this run: nothing else is replaced.
        export_checkpoint(one.checkpoint, one.directory, average=one.average, overwrite=True)
        page.print(f"exported {one.directory}", highlight=False, markup=False)
    if not config.export or newest is None:
        return
    for prompt in config.sample.prompts:
        text = generate(
            paths.export,
            prompt,
            config.sample.max_new_tokens,
            temperature=None,
            trust_remote_code=config.model.trust_remote_code,
            raw=config.sample.raw,
            warn=warn,
        )
        page.print(prompt, style="bold", end="", highlight=False, markup=False)
        page.print(text, highlight=False, markup=False)

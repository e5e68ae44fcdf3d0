"""Says before a run starts whether its layout is proven; with `--audit`, a layout that is not proven is audited first.

Under torchrun and Slurm all ranks exist from the beginning. Rank 0 starts a process that makes the audit, before it has threads
or a process group, because an audit could not be forked from a process that has them. All other ranks wait at the store of the
rendezvous, and read the outcome of the audit there.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch.distributed as dist
from rich.markup import escape

from meshwright import errors
from meshwright.device import CPU, start_method, starting
from meshwright.distributed.process_group import adopt_slurm
from meshwright.errors import MeshwrightError, NotProvenError, WorkerError
from meshwright.ranks.forked import keep_inherited
from meshwright.terminal import console
from meshwright.train.config import RunConfig
from meshwright.train.proofs.records import Source, State, standing_of
from meshwright.train.start.ending import leave_to_rank_0
from meshwright.train.start.setup import RunSetup, make_setup

__all__ = ["Outcome", "Prove", "report_or_audit", "report_or_audit_on_rank_0"]

KEY = "audit"
"""The key of the store under which rank 0 writes the outcome of the audit."""

PATIENCE = timedelta(days=2)
"""How long the other ranks wait for the audit. If rank 0 dies first, its launcher ends them, or their next read fails."""

LOOK = 0.5
"""Seconds between two checks of the store."""

_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS")
"""Environment variables that a launcher sets for its ranks. An audit is not one of these ranks, so they are removed for it."""


class Outcome(Protocol):
    """The outcome of an audit."""

    @property
    def passed(self) -> bool:
        """Whether the layout computes what one process does."""

    @property
    def verdict(self) -> str:
        """The outcome in one line."""


Prove = Callable[[RunSetup], Outcome]
"""Audits the layout of a run and records the verdict. The caller passes it in, because `train` does not import `audit`."""


def report_or_audit(setup: RunSetup, source: Source | None, prove: Prove | None) -> None:
    """Print whether the layout of a run is proven; if it is not, and an audit is asked for, audit it.

    Args:
        setup: the resolved run.
        source: where its configuration came from.
        prove: makes the audit; ``None``: for an unproven layout, only print that it is unproven.

    Raises:
        NotProvenError: the audit failed.
        MeshwrightError: the audit could not be made.
    """
    page = console(soft_wrap=True)  # a command to be copied must stay on one line

    def say(line: str, style: str = "") -> None:
        text = escape(line)
        page.print(f"[{style}]{text}[/]" if style else text, highlight=False)

    standing = standing_of(setup, source, say)
    say(standing.line, {State.FAILED: "bold red", State.UNPROVEN: "yellow"}.get(standing.state, ""))
    if prove is None or standing.state in (State.ALONE, State.PROVEN):
        return
    say("the layout is audited first (--audit)")
    outcome = prove(setup)
    say(outcome.verdict)
    if not outcome.passed:
        raise NotProvenError(
            "audit.failed", "the layout does not compute what one process does; training is not started (--audit)"
        )


# -- ranks that another launcher started --------------------------------------------------------------------------------------


def report_or_audit_on_rank_0(config: RunConfig, source: Source | None, prove: Prove) -> dist.Store | None:
    """On rank 0, do what :func:`report_or_audit` does; the other ranks wait. Call it before the process group is created.

    Returns:
        The store of the rendezvous; ``None`` for a single process. Keep a reference to it until the process group has its own
        store. If rank 0 serves the store, both stores use one server, which stops when the last reference is dropped.

    Raises:
        MeshwrightError: what went wrong, on rank 0; on the other ranks only if rank 0 no longer exists to report it.
    """
    adopt_slurm()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size == 1:
        return None
    audit = _Audit(config, world_size, source, prove) if rank == 0 else None
    timeout = timedelta(minutes=config.launch.timeout_minutes)
    store = dist.PrefixStore("meshwright", next(dist.rendezvous("env://", timeout=timeout))[0])
    if audit is not None:
        error = audit.end()
        store.set(KEY, json.dumps([type(error).__name__, [[line.code, line] for line in error.problems]] if error else None))
        _leave_together(store, rank, world_size)
        if error is not None:
            raise error
    else:
        _wait(store)
        error = _error_from(store.get(KEY))
        _leave_together(store, rank, world_size)
        if error is not None:
            leave_to_rank_0(error)
    return store


def _wait(store: dist.Store) -> None:
    end = time.monotonic() + PATIENCE.total_seconds()
    try:
        while not store.check([KEY]):
            if time.monotonic() > end:
                raise WorkerError("worker.silent", f"rank 0 has not audited the layout within {PATIENCE}")
            time.sleep(LOOK)
    except (dist.DistError, RuntimeError) as error:
        if isinstance(error, WorkerError):
            raise
        raise WorkerError("worker.ended", f"rank 0 ended while it audited the layout: {str(error).splitlines()[0]}") from error


def _error_from(text: bytes) -> MeshwrightError | None:
    content = json.loads(text)
    return getattr(errors, content[0], WorkerError)([errors.Refusal(*pair) for pair in content[1]]) if content else None


def _leave_together(store: dist.Store, rank: int, world_size: int) -> None:
    """On rank 0, wait up to a minute until all ranks have read the outcome, because rank 0 may serve the store."""
    store.add("read", 1)
    end = time.monotonic() + 60
    while rank == 0 and store.add("read", 0) < world_size and time.monotonic() < end:
        time.sleep(LOOK / 10)


class _Audit:
    """The process that makes the audit."""

    def __init__(self, config: RunConfig, world_size: int, source: Source | None, prove: Prove) -> None:
        context: Any = get_context(start_method(CPU))
        self.ours, theirs = context.Pipe(duplex=False)
        arguments = (config, world_size, source, prove, theirs, os.getpid())
        self.process = context.Process(target=_audit_alone, args=arguments)
        with starting(CPU):
            self.process.start()
        theirs.close()

    def end(self) -> MeshwrightError | None:
        """Wait for the process, and return the error that it failed with, or ``None``."""
        try:
            outcome = self.ours.recv()
        except EOFError:
            self.process.join()
            code = self.process.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return WorkerError("worker.ended", f"the audit of the layout ended with {how}")
        self.process.join()
        return outcome


def _audit_alone(
    config: RunConfig, world_size: int, source: Source | None, prove: Prove, results: Connection, parent: int
) -> None:
    """Run the audit in its own process, and send the error, or ``None``, through ``results``."""
    keep_inherited()
    for name in [name for name in os.environ if name in _LAUNCHED or name.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    error: MeshwrightError | None = None
    try:
        report_or_audit(make_setup(config, world_size), source, prove)
    except MeshwrightError as raised:
        error = type(raised)(raised.problems)  # without what cannot be pickled
    except Exception as raised:  # whatever it was, the ranks must not wait in vain
        error = WorkerError("worker.exception", f"the audit of the layout: {type(raised).__name__}: {raised}")
    results.send(error)


def _end_with(parent: int) -> None:
    """End this process when its parent ends, so that the audit of a rank that is killed ends too."""
    while os.getppid() == parent:
        time.sleep(LOOK)
    os._exit(1)

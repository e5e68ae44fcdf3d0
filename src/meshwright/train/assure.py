"""Before a run starts: the line that says whether its layout is proven, and with `--audit` the audit of one that is not.

Under torchrun and Slurm every rank is there from the beginning. Rank 0 has the audit made by a process of its own, forked while
this one has no threads and no process group yet, which an audit could not start from; all others wait at the store of the
rendezvous, and learn there how it went.
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
from rich.console import Console
from rich.markup import escape

from meshwright import errors
from meshwright.distributed.process_group import adopt_slurm
from meshwright.errors import MeshwrightError, NotProvenError, WorkerError
from meshwright.train.config import RunConfig
from meshwright.train.ending import leave_to_rank_0
from meshwright.train.proof import Source, State, standing_of
from meshwright.train.setup import RunSetup, make_setup

__all__ = ["Outcome", "Prove", "assure", "assure_on_rank_0"]

KEY = "audit"
"""In the store: how it went."""

PATIENCE = timedelta(days=2)
"""How long ranks wait for an audit. Rank 0 tells them of its end, good or bad; if it dies, its launcher or its store does."""

LOOK = 0.5
"""Seconds between two looks at the store."""

_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS")
"""What a launcher says to its ranks, and an audit is none of."""


class Outcome(Protocol):
    """Of an audit."""

    @property
    def passed(self) -> bool:
        """Whether the layout computes what one process does."""

    @property
    def verdict(self) -> str:
        """One line."""


Prove = Callable[[RunSetup], Outcome]
"""Audits the layout of a run and keeps its verdict on record. Who starts training gives it: `train` knows no audit."""


def assure(setup: RunSetup, source: Source | None, prove: Prove | None) -> None:
    """Say whether the layout of a run is proven; audit it if it is not, and that is asked for.

    Args:
        setup: the resolved run.
        source: of its configuration.
        prove: ``None``: an unproven layout gets a line, and that is all.

    Raises:
        NotProvenError: the audit failed.
        MeshwrightError: it could not be made.
    """
    console = Console(soft_wrap=True)  # a command that is to be copied stays one line

    def say(line: str, style: str = "") -> None:
        text = escape(line)
        console.print(f"[{style}]{text}[/]" if style else text, highlight=False)

    standing = standing_of(setup, source, say)
    say(standing.line, {State.FAILED: "bold red", State.UNPROVEN: "yellow"}.get(standing.state, ""))
    if prove is None or standing.state in (State.ALONE, State.PROVEN):
        return
    say("the layout is audited first (--audit)")
    outcome = prove(setup)
    say(outcome.verdict)
    if not outcome.passed:
        raise NotProvenError("the layout does not compute what one process does; training is not started (--audit)")


# -- one of the ranks of another launcher -------------------------------------------------------------------------------------


def assure_on_rank_0(config: RunConfig, source: Source | None, prove: Prove) -> dist.Store | None:
    """As :func:`assure`, on rank 0, while the other ranks wait; to be called before the process group is there.

    Returns:
        The store of the rendezvous, to be held until the process group has come to its own: where rank 0 serves it, the two
        share one server, and it ends with the last that holds it.

    Raises:
        MeshwrightError: what went wrong, on rank 0; and on the others if rank 0 is not there any more to say it.
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
        store.set(KEY, json.dumps([type(error).__name__, list(error.problems)] if error else None))
        _leave_together(store, rank, world_size)
        if error is not None:
            raise error
    else:
        _wait(store)
        error = _told(store.get(KEY))
        _leave_together(store, rank, world_size)
        if error is not None:
            leave_to_rank_0(error)
    return store


def _wait(store: dist.Store) -> None:
    end = time.monotonic() + PATIENCE.total_seconds()
    try:
        while not store.check([KEY]):
            if time.monotonic() > end:
                raise WorkerError(f"rank 0 has not audited the layout within {PATIENCE}")
            time.sleep(LOOK)
    except (dist.DistError, RuntimeError) as error:
        if isinstance(error, WorkerError):
            raise
        raise WorkerError(f"rank 0 ended while it audited the layout: {str(error).splitlines()[0]}") from error


def _told(text: bytes) -> MeshwrightError | None:
    content = json.loads(text)
    return getattr(errors, content[0], WorkerError)(content[1]) if content else None


def _leave_together(store: dist.Store, rank: int, world_size: int) -> None:
    """The store may be in the process of rank 0, which must not end before the others have read."""
    store.add("read", 1)
    end = time.monotonic() + 60
    while rank == 0 and store.add("read", 0) < world_size and time.monotonic() < end:
        time.sleep(LOOK / 10)


class _Audit:
    """The process that audits."""

    def __init__(self, config: RunConfig, world_size: int, source: Source | None, prove: Prove) -> None:
        context: Any = get_context("fork")
        self.ours, theirs = context.Pipe(duplex=False)
        arguments = (config, world_size, source, prove, theirs, os.getpid())
        self.process = context.Process(target=_audit_alone, args=arguments)
        self.process.start()
        theirs.close()

    def end(self) -> MeshwrightError | None:
        """Wait for it; what it failed with, or nothing."""
        try:
            told = self.ours.recv()
        except EOFError:
            self.process.join()
            code = self.process.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return WorkerError(f"the audit of the layout ended with {how}")
        self.process.join()
        return told


def _audit_alone(
    config: RunConfig, world_size: int, source: Source | None, prove: Prove, results: Connection, parent: int
) -> None:
    """What that process runs."""
    for name in [name for name in os.environ if name in _LAUNCHED or name.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    error: MeshwrightError | None = None
    try:
        assure(make_setup(config, world_size), source, prove)
    except MeshwrightError as found:
        error = type(found)(found.problems)  # without what does not travel
    except Exception as found:  # whatever it was, the ranks must not wait for it
        error = WorkerError(f"the audit of the layout: {type(found).__name__}: {found}")
    results.send(error)


def _end_with(parent: int) -> None:
    """A rank that is killed takes its audit along."""
    while os.getppid() == parent:
        time.sleep(LOOK)
    os._exit(1)

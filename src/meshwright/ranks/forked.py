"""A worker process of :mod:`meshwright.ranks.pool`: jobs run in the main thread, and a second thread watches that thread."""

import ctypes
import faulthandler
import gc
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.device import backend, claim
from meshwright.distributed import _torch_compat
from meshwright.distributed.process_group import RECORDED, is_communication
from meshwright.errors import MeshwrightError, WorkerError
from meshwright.quiet import keep_bars_apart, quiet
from meshwright.ranks.rank_state import Pace, RankState, look

__all__ = ["BEAT", "JobOutcome", "WorkerPlace", "keep_inherited", "work"]

BEAT = 0.5
"""Seconds between two checks of a worker on itself."""
_KEPT: list[Any] = []
"""Callbacks that C code calls; kept here so that they are not collected."""


@dataclass
class JobOutcome:
    """How the job of one rank ended: with a value, an error, or the death of its process.

    Attributes:
        value: what the job returned.
        error: what it raised, as a ``MeshwrightError``.
        own: whether the job itself raised a ``MeshwrightError``.
        communication: whether a collective failed; another rank may then be the cause, by what it did or did not do.
        dead: whether the process ended.
        trace: the worker's traceback.
        time: time of the failure, on the clock that all processes of a machine share.
        groups: number of process groups that the worker is in by now.
    """

    value: Any = None
    error: MeshwrightError | None = None
    own: bool = False
    communication: bool = False
    dead: bool = False
    trace: str = ""
    time: float = 0.0
    groups: int = 0

    @property
    def words(self) -> str:
        """The ending in words, which follow the rank in a report."""
        if self.error is None:
            return "has returned"
        return str(self.error) if self.dead else f"failed: {str(self.error).partition(chr(10))[0][:160]}"


@dataclass(frozen=True)
class WorkerPlace:
    """A worker's place in its group.

    Attributes:
        rank: its rank.
        world_size: number of ranks.
        kind: kind of device, as in :mod:`meshwright.device`.
        timeout: timeout of every collective.
        folder: a folder that all workers share, for the rendezvous and for Python stacks.
        quiet: whether it is to keep away what other libraries say to programmers; a forked one does as its parent.
    """

    rank: int
    world_size: int
    kind: str
    timeout: timedelta
    folder: Path
    quiet: bool = False

    @property
    def stack_file(self) -> Path:
        """The file to which the process writes its Python stack when it crashes, or on SIGUSR1, even while the GIL is held."""
        return self.folder / f"stack-{self.rank}"


def keep_inherited() -> None:
    """Keep the garbage collector of a forked process from what it has inherited.

    Among the garbage of the parent may be a process group. Its destructor joins threads, which a forked process does not have:
    it would abort ("std::system_error: Invalid argument"), or wait for ever, whenever the collector happens to run.
    """
    gc.freeze()


def work(seat: WorkerPlace, jobs: Connection, watch: Connection) -> None:
    """Join the group, then run one job after another until the parent ends the worker."""
    keep_inherited()
    keep_bars_apart()
    if seat.quiet:
        quiet()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked worker has inherited the parent's handlers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    rank = str(seat.rank)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(seat.world_size), TORCH_FR_BUFFER_SIZE=RECORDED)
    torch.set_num_threads(1)  # the same in every pool, because some kernels sum in another order with more threads
    stack_file = seat.stack_file.open("w")
    faulthandler.enable(stack_file)
    faulthandler.register(signal.SIGUSR1, stack_file, all_threads=False)
    lock, main = threading.Lock(), threading.get_ident()

    def say(state: RankState | None) -> None:
        with lock:
            watch.send(state)

    _on_abort(lambda: say(look(seat.rank, main)))
    threading.Thread(target=_watch, args=(seat, main, watch, say, os.getppid()), daemon=True).start()
    try:
        jobs.send_bytes(_attempt(_join, seat))
        while True:
            jobs.send_bytes(_attempt(_call, seat, jobs.recv_bytes()))
            sys.stdout.flush()
    except (EOFError, OSError):
        os._exit(0)  # the parent is gone


def _join(seat: WorkerPlace) -> None:
    claim(seat.kind, seat.rank)
    # torch warns that in-place operations on a unit's output may break gradients. The audit compares these gradients anyway.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    _torch_compat.mend_gloo()
    dist.init_process_group(
        backend(seat.kind),
        init_method=f"file://{seat.folder / 'store'}",
        rank=seat.rank,
        world_size=seat.world_size,
        timeout=seat.timeout,
    )
    dist.all_reduce(torch.zeros(1))  # with gloo; this is the first entry of the recorder, if it records


def _call(seat: WorkerPlace, job: bytes) -> Any:
    function, args = pickle.loads(job)
    return function(claim(seat.kind, seat.rank), *args)


_CODES = {"same dtype, but got": "worker.dtypes", "without overflow": "worker.overflow"}
"""Words of torch's messages, which have no codes, to the code of a job that failed with one."""


def exception_code(error: BaseException) -> str:
    """Return the code of a job that an exception of somebody else ended."""
    return next((code for words, code in _CODES.items() if words in str(error)), "worker.exception")


def _attempt(function: Callable[..., Any], *args: Any) -> bytes:
    """Call a function, and return its :class:`Ending`, pickled by value: torch's shared memory would end with this process."""
    try:
        ending = JobOutcome(value=function(*args))
    except BaseException as error:
        own = isinstance(error, MeshwrightError)
        ending = JobOutcome(
            error=error
            if isinstance(error, MeshwrightError)
            else WorkerError(exception_code(error), f"{type(error).__name__}: {error}"),
            own=own,
            communication=is_communication(error),
            trace=traceback.format_exc(),
            time=time.monotonic(),
        )
    ending.groups = len(_torch_compat.group_ranks())
    try:
        return pickle.dumps(ending)
    except Exception as error:
        outcome = "result" if ending.error is None else "error"
        reason = WorkerError("worker.lost", f"the {outcome} cannot be pickled: {type(error).__name__}: {error}")
        return pickle.dumps(JobOutcome(error=reason, trace=ending.trace, time=time.monotonic()))


def _watch(seat: WorkerPlace, main: int, watch: Connection, say: Callable[[RankState | None], None], parent: int) -> None:
    """Send ``None`` while the main thread makes progress, and its state when asked. End the process when the parent ends."""
    pace = Pace(main, seat.kind)
    try:
        while os.getppid() == parent:
            if watch.poll(BEAT):
                watch.recv()
                say(look(seat.rank, main))
            if pace.moved():
                say(None)
    except (EOFError, OSError):
        pass
    os._exit(1)


def _on_abort(speak: Callable[[], None]) -> None:
    """Make the process call ``speak`` before it aborts.

    gloo aborts the process of a rank that receives more bytes than it asked for. It does so from one of its own threads, and
    the only record of what the rank asked for is lost. Python's signal handlers run too late: they wait for the main thread.
    """
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: speak())
    _KEPT.append(handler)
    ctypes.CDLL(None).signal(int(signal.SIGABRT), handler)

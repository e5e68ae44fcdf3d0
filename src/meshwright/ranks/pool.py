"""A pool of worker processes that start once and run one function after another on every rank.

The audit runs dozens of small steps, and starting processes costs more than a step. Each worker has a second thread that tells
the parent that its rank makes progress, and on request where the rank is. So a step that hangs ends with a report on all ranks.

Two pipes connect the parent to a worker: ``jobs`` for functions and their outcomes, ``watch`` for the second thread.
"""

import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshwright.device import start_method, starting
from meshwright.distributed.process_group import end_openmp_threads
from meshwright.errors import ConfigError, MeshwrightError, Refusal, UnsupportedError, WorkerError
from meshwright.quiet import is_quiet
from meshwright.ranks.forked import BEAT, JobOutcome, WorkerPlace, work
from meshwright.ranks.hang import HangError, describe, mismatch
from meshwright.ranks.rank_state import RankState, stack_of_text

__all__ = ["Pool"]

GRACE = 3.0
"""Seconds without progress after which ranks that have not failed are assumed to wait for those that have."""
START = 120.0
"""Seconds that starting may take: with accelerators every worker imports torch again."""
MOST_GROUPS = 24
"""Workers in more process groups than this are restarted. Each group has sockets, and threads that wake a hundred times a
second. Groups cannot be destroyed one by one, because torch's caches keep old meshes in use."""
MARGIN = 60.0
"""Seconds by which the timeout of collectives exceeds the pool's patience, so that the report comes before torch's error."""


@dataclass
class _Worker:
    process: BaseProcess
    jobs: Connection
    watch: Connection
    seat: WorkerPlace
    state: RankState | None = None

    def listen(self) -> bool:
        """Read the reports of the worker, and return whether there were any: of progress, or of its state."""
        heard = False
        try:
            while self.watch.poll():
                self.state = self.watch.recv() or self.state
                heard = True
        except (EOFError, OSError):
            pass  # it died, which `ending` finds
        return heard

    def ending(self) -> JobOutcome | None:
        """Return how the job ended; ``None`` while it runs."""
        alive = self.process.is_alive()  # checked first, so that what the worker sent before it died is still read
        try:
            if self.jobs.poll():
                return pickle.loads(self.jobs.recv_bytes())
        except (EOFError, OSError):
            self.process.join(5)
            alive = False
        except Exception as error:
            reason = WorkerError("worker.lost", f"the result cannot be read: {type(error).__name__}: {error}")
            return JobOutcome(error=reason, time=time.monotonic())
        return None if alive else self._death()

    def _death(self) -> JobOutcome:
        code = self.process.exitcode or 0
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        hint = " (the system kills with SIGKILL when memory runs out)" if name == "SIGKILL" else ""
        return JobOutcome(
            error=WorkerError("worker.ended", f"ended with {name}{hint}"),
            communication=name == "SIGABRT",  # gloo aborts a process that receives more bytes than it asked for
            dead=True,
            trace=self.stack(),
            time=time.monotonic(),
        )

    def stack(self) -> str:
        """Return what ``faulthandler`` wrote."""
        return self.seat.stack_file.read_text() if self.seat.stack_file.exists() else ""


class Pool:
    """Processes that form one process group and wait for jobs. They start with the first job, and again after a failure.

    Workers on the CPU are forked, if they can be (:func:`~meshwright.device.start_method`). So the process that makes a pool
    must not be in a process group itself, and the workers inherit what it holds. A job must not start ``multiprocessing``
    children or change the default group; it must return its tensors on the CPU. Close the pool, or use it as a context manager.

    Args:
        world_size: number of processes.
        kind: kind of device, one for each rank; the collectives are those of its backend.
        patience: seconds without progress on any rank after which a job counts as hanging; a job on one process never does.

    Raises:
        ConfigError: ``world_size`` is below 1.
    """

    def __init__(self, world_size: int, kind: str = "cpu", patience: float = 30.0) -> None:
        if world_size < 1:
            raise ConfigError("worker.number", f"a pool of {world_size} processes: legal are 1 or more")
        self.world_size, self.kind, self.patience = world_size, kind, patience
        self._workers: list[_Worker] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers, whatever they do."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join(5)
            worker.jobs.close()
            worker.watch.close()
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(device, *args)`` on every rank of the default process group.

        Args:
            function: a function at the top level of a module.
            args: arguments; every rank gets a copy.

        Returns:
            The results, ordered by rank.

        Raises:
            MeshwrightError: all ranks raised the same error, which is raised unchanged; or some raised one, which gets the rank
                in front.
            WorkerError: a rank raised any other exception, or a worker died. The worker's traceback is a note of the error.
            HangError: ranks wait for each other, or their collectives do not match.
        """
        job = pickle.dumps((function, args))
        try:
            if not all(worker.process.is_alive() for worker in self._workers):
                self.close()
            if not self._workers:
                self._start()
            for worker in self._workers:
                with suppress(OSError):  # the worker has just died, which is found below
                    worker.jobs.send_bytes(job)
            endings = self._gather(self.patience if self.world_size > 1 else None)
            error = self._error(endings)
        except BaseException:
            self.close()
            raise
        if max((ending.groups for ending in endings.values()), default=0) > MOST_GROUPS:
            self.close()
        if error is None:
            return [endings[rank].value for rank in range(self.world_size)]
        if not self._alike(endings):
            self.close()
        raise error

    def _start(self) -> None:
        method = start_method(self.kind)
        if method == "fork":
            if dist.is_initialized():
                raise UnsupportedError(
                    "worker.pool", "a pool of forked workers cannot start in a process that is in a process group"
                )
            import torch._dynamo  # noqa: F401 (FSDP's hooks need it; imported before the fork, every worker has it)

            end_openmp_threads()
        context: Any = get_context(method)
        self._folder = tempfile.TemporaryDirectory(prefix="meshwright-ranks-")
        timeout = timedelta(seconds=self.patience + MARGIN)
        # Ctrl-C reaches every process of a terminal. This process handles it; the workers ignore it, even while they start.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for rank in range(self.world_size):
                folder, anew = Path(self._folder.name), method == "spawn"
                seat = WorkerPlace(rank, self.world_size, self.kind, timeout, folder, anew and is_quiet())
                (jobs, their_jobs), (watch, their_watch) = context.Pipe(), context.Pipe()
                process = context.Process(target=work, args=(seat, their_jobs, their_watch), daemon=True)
                with starting(self.kind):
                    process.start()
                self._workers.append(_Worker(process, jobs, watch, seat))
                their_jobs.close()
                their_watch.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        endings = self._gather(START)
        error = self._error(endings)
        if error is not None and method == "spawn" and any(ending.dead for ending in endings.values()):
            guard = Refusal(
                "worker.main",
                "workers beside a running driver, and on accelerators, import the script that starts them: what it does must "
                'stand below `if __name__ == "__main__":`',
            )
            raise type(error)([*error.problems, guard]) from error
        if error is not None:
            raise error

    def _gather(self, patience: float | None) -> dict[int, JobOutcome]:
        """Wait for the job, and return how it ended on each rank, without ranks that still ran when progress had stopped."""
        endings: dict[int, JobOutcome] = {}
        moved = time.monotonic()
        while len(endings) < self.world_size:
            running = {rank: worker for rank, worker in enumerate(self._workers) if rank not in endings}
            watched = [item for worker in running.values() for item in (worker.jobs, worker.watch, worker.process.sentinel)]
            connection.wait(watched, timeout=BEAT)
            for rank, worker in running.items():
                heard, ending = worker.listen(), worker.ending()
                if ending is not None:
                    endings[rank] = ending
                if heard or ending is not None:
                    moved = time.monotonic()
            now = time.monotonic()
            failed = [ending.time for ending in endings.values() if ending.error]
            died = [ending.time for ending in endings.values() if ending.dead]
            if patience is not None and now > moved + (min(GRACE, patience) if failed else patience):
                break
            if (died and now > min(died) + BEAT) or (failed and now > min(failed) + self.patience):
                break
        return endings

    def _alike(self, endings: dict[int, JobOutcome]) -> bool:
        """Whether all ranks raised the same error, so that no rank waits and their collectives still match."""
        errors = [ending.error for ending in endings.values() if ending.error and not (ending.dead or ending.communication)]
        return len(errors) == self.world_size and len({(type(error), error.problems) for error in errors}) == 1

    def _error(self, endings: dict[int, JobOutcome]) -> MeshwrightError | None:
        """Return the error of a job: the failure that came first, or where the ranks hang; ``None``: all ranks returned."""
        failed = {rank: ending for rank, ending in endings.items() if ending.error}
        if not failed and len(endings) == self.world_size:
            return None
        # Communication fails because another rank failed or did something else. So any other failure is reported before it.
        order = sorted(failed, key=lambda rank: (failed[rank].communication, not failed[rank].dead, failed[rank].time))
        if not order or failed[order[0]].communication:
            states = self._states(endings)
            if not order or not failed[order[0]].dead or mismatch(states):
                return HangError([Refusal("worker.hang", line) for line in describe(states)], states)
        rank, ending = order[0], failed[order[0]]
        assert ending.error is not None
        error = ending.error
        if not (ending.own and self._alike(endings)):
            error = type(error)([line.within(f"rank {rank}{' ' if ending.dead else ': '}") for line in error.problems])
        if ending.trace:
            error.add_note(ending.trace)
        return error

    def _states(self, endings: dict[int, JobOutcome]) -> list[RankState]:
        """Return where every rank is, as it reports itself, or by its Python stack if it does not answer."""
        for worker in self._workers:
            try:
                worker.watch.send("where?")
            except OSError:
                worker.listen()  # dead; it may have reported its state before
        end = time.monotonic() + GRACE
        while (silent := self._silent()) and time.monotonic() < end:
            connection.wait([worker.watch for worker in silent], timeout=BEAT)
            for worker in silent:
                worker.listen()
        for worker in silent:
            os.kill(worker.process.pid or 0, signal.SIGUSR1)
        time.sleep(BEAT if silent else 0)
        states = []
        for worker in self._workers:
            rank, ending = worker.seat.rank, endings.get(worker.seat.rank)
            state = worker.state or RankState(rank, stack=stack_of_text(worker.stack()))
            broken = ending is not None and ending.communication
            states.append(replace(state, ending=ending.words if ending else None, broken=broken))
        return states

    def _silent(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.state is None and worker.process.is_alive()]

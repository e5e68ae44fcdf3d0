"""Processes that have the accelerator, stay alive between jobs, and are in one process group."""

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PATIENCE = 60.0
"""Seconds that a job may take."""


class JobError(AssertionError):
    """What failed on which rank, with its traceback."""


class Workers:
    """Call functions of modules as ``function(device, *args)`` on every rank, and return their results by rank.

    A job that fails, or hangs, ends the workers; the next job starts others.

    Args:
        number: of ranks.
        kind: name of the device.
    """

    def __init__(self, number: int, kind: str) -> None:
        self.number, self.kind = number, kind
        self._running: list[tuple[Any, Connection]] = []

    def __enter__(self) -> "Workers":
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if not self._running:
            self._start()
        for _, pipe in self._running:
            pipe.send_bytes(pickle.dumps((function, args)))
        outcomes = [self._outcome(pipe) for _, pipe in self._running]
        failed = [f"rank {rank}:\n{text}" for rank, (good, text) in enumerate(outcomes) if not good]
        if failed:
            self.close()
            raise JobError("\n".join(failed))
        return [value for _, value in outcomes]

    def close(self) -> None:
        for process, pipe in self._running:
            process.kill()
            process.join(5)
            pipe.close()
        self._running = []

    def _start(self) -> None:
        context = get_context("spawn")  # a forked one would not load the device: its torch is this process's
        folder = Path(tempfile.mkdtemp(prefix="meshwright-accelerator-"))
        for rank in range(self.number):
            pipe, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, self.number, self.kind, folder, theirs), daemon=True)
            process.start()
            theirs.close()
            self._running.append((process, pipe))
        for _, pipe in self._running:
            self._outcome(pipe)

    def _outcome(self, pipe: Connection) -> tuple[bool, Any]:
        try:
            return pickle.loads(pipe.recv_bytes()) if pipe.poll(PATIENCE) else (False, f"no answer after {PATIENCE:g} s")
        except EOFError:
            return False, "the process ended"


def _work(rank: int, number: int, kind: str, folder: Path, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(number))
    device = torch.device(kind, rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group(
        f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=number,
        timeout=timedelta(seconds=PATIENCE),
    )
    outcome: tuple[bool, Any] = (True, None)
    while True:
        pipe.send_bytes(pickle.dumps(outcome))
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        try:
            outcome = (True, function(device, *args))
        except BaseException:
            outcome = (False, traceback.format_exc())

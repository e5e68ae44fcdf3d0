"""Processes that have the accelerator, stay alive between jobs, and are in one process group; and tests that run in them."""

import gc
import inspect
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.accelerator.build import on_path

PATIENCE = 60.0
"""Seconds that a job may take."""


class JobError(AssertionError):
    """What failed on which rank, with its traceback."""


class Workers:
    """Call functions of modules as ``function(device, *args)`` on every rank, and return their results by rank.

    A job that fails, or hangs, ends the workers; the next job starts others.

    Args:
        number: of ranks.
        accelerator: folder of the build.
        kind: name of the device.
    """

    def __init__(self, number: int, accelerator: Path, kind: str = "sim") -> None:
        self.number, self.kind, self.accelerator = number, kind, accelerator
        self._running: list[tuple[Any, Connection]] = []

    def __enter__(self) -> "Workers":
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        __tracebackhide__ = True
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
            with on_path(self.accelerator, ACCELERATOR_NAME=self.kind):
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


def in_workers(number: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function ``(device, **parameters)``: it runs on this number of ranks (1 or 2), each on its device."""

    def test_of(function: Callable[..., None]) -> Callable[..., None]:
        fixture = {1: "one", 2: "two"}[number]

        def test(**given: Any) -> None:
            __tracebackhide__ = True  # what matters is the worker's traceback
            given.pop(fixture).run(_run_test, function.__module__, function.__name__, given)

        parameters = list(inspect.signature(function).parameters.values())[1:]
        own = inspect.Parameter(fixture, inspect.Parameter.KEYWORD_ONLY)
        parameters = [item.replace(kind=own.kind) for item in parameters]
        test.__signature__ = inspect.Signature([*parameters, own])  # type: ignore[attr-defined]
        test.__name__, test.__module__, test.__doc__ = function.__name__, function.__module__, function.__doc__
        test.pytestmark = getattr(function, "pytestmark", [])  # type: ignore[attr-defined]
        test.body = function  # type: ignore[attr-defined]
        return test

    return test_of


def _run_test(device: torch.device, module: str, name: str, given: dict[str, Any]) -> None:
    """Run it from a clean state, and find its reports unread: a test that is not about reports has none."""
    simulated = module_of(device)
    gc.collect()
    simulated.ignore_orders([])
    simulated.synchronize(device)
    simulated.reports.take()
    simulated.reset_counts()
    getattr(import_module(module), name).body(device, **given)
    simulated.synchronize(device)
    left = reports(device)
    assert not left, left


def module_of(device: torch.device) -> Any:
    """The module ``torch.<name>`` of the device."""
    return torch.get_device_module(device)


def reports(device: torch.device) -> list[Any]:
    """Take all reports but waits."""
    return module_of(device).reports.take()


def waits(device: torch.device) -> list[Any]:
    """Take the host's waits."""
    return module_of(device).reports.take("wait")

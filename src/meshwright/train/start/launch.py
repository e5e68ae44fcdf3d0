"""Starts a run: local workers through torch's elastic launcher, or this process as a worker that torchrun or Slurm started."""

import json
import logging
import os
import signal
import socket
import tempfile
import time
import traceback
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright import errors
from meshwright.checkpoint.directory import latest
from meshwright.errors import (
    ConfigError,
    InterruptError,
    MeshwrightError,
    NonFiniteError,
    Refusal,
    StoppedError,
    WorkerError,
    described,
    during,
    number_of,
)
from meshwright.quiet import quiet
from meshwright.train.config import RunConfig
from meshwright.train.proofs.records import Source
from meshwright.train.proofs.report_or_audit import Prove, report_or_audit, report_or_audit_on_rank_0
from meshwright.train.start.ending import SIGNALS, UNEXPORTED, has_begun, leave_to_rank_0, tell, wishes_to_end
from meshwright.train.start.processes import adapted, device_kind, launched_processes, local_processes
from meshwright.train.start.run_files import Paths

if TYPE_CHECKING:
    from meshwright.train.forecast import Forecast
    from meshwright.train.start.scoring import ScoreJob

__all__ = ["launch"]

ASKED = "asked-to-end"
"""Name of the file that asks local workers to end; it holds the name of the signal."""
MONITOR_SECONDS = 0.1
"""Seconds between two checks of the launcher on its workers."""


def launch(
    config: RunConfig,
    *,
    debug: bool = False,
    source: Source | None = None,
    prove: Prove | None = None,
    forecast: "Forecast | None" = None,
    nproc: int | None = None,
    fast: bool = False,
    job: "ScoreJob | None" = None,
) -> None:
    """Run a configuration to its end.

    Args:
        config: configuration of the run.
        debug: whether to show tracebacks and torch's own reports.
        source: where the configuration came from, for the command that audits it.
        prove: audits a layout that is not proven before the run starts; ``None``: only print that it is unproven, and start.
        forecast: the command that makes the forecast of a step; ``None``: none is made.
        nproc: number of processes that the command asks for; if another launcher started this process, it must have started as
            many on this machine.
        fast: of tokens that are there already, compare only a sample with their digests.
        job: what to do in place of training.

    Raises:
        NotProvenError: the audit failed; nothing was trained.
        MeshwrightError: what the run failed with. An error on one rank stops all ranks, and names the rank.
    """
    from meshwright.distributed.process_group import distributed_environment
    from meshwright.train.start.prepare import introduce, locked, prepare_run
    from meshwright.train.start.resume import checkpoint_to_resume

    if distributed_environment():
        from meshwright.train.start.worker import run_worker

        local = launched_processes(config)
        if nproc not in (None, local):
            raise ConfigError(
                "run.processes", f"--nproc={nproc}: the launcher started {number_of(local, 'process')} here; leave it out"
            )

        def work() -> None:
            kind = device_kind(config, local, launched=True)
            own, lines = adapted(config, kind)
            if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
                _tell(lines)
            store = report_or_audit_on_rank_0(own, source, prove) if prove is not None else None
            run_worker(own, kind, source=source, forecast=forecast, fast=fast, job=job)
            del store

        _as_one_of_many(work, debug, config.directory)
        return
    processes = local_processes(config)
    kind = device_kind(config, processes)
    config, lines = adapted(config, kind)
    _tell(lines)
    _check_port(config.launch.port)
    with _files_named(config.directory), locked(config):
        setup, _, store = prepare_run(config, processes, fast=fast, noted=None if job is None else job.noted())
        if job is None:
            introduce(setup, config, store)
            with during("the layout is audited"):
                report_or_audit(setup, source, prove)
        else:
            job.check(setup)
        prepared = (str(store.directory), checkpoint_to_resume(config))
        del setup, store
        if processes == 1:
            from meshwright.train.start.worker import run_worker

            run_worker(config, kind, prepared, forecast=forecast, job=job)
        else:
            with during("the workers start"):
                _launch_local(config, processes, kind, prepared, forecast, debug, job)


def _tell(lines: list[str]) -> None:
    for line in lines:
        tell(line)


@contextmanager
def _files_named(near: Path) -> Iterator[None]:
    """Add the directory ``near`` to operating system errors inside that name no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.strerror is None or error.filename is not None:
            raise
        raise WorkerError("worker.exception", described(error, near)) from error


def _check_port(port: int) -> None:
    if port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(
                "run.port",
                f"launch.port={port}: {(error.strerror or str(error)).lower()}; choose another, or 0 for any that is free",
            ) from error


def _as_one_of_many(work: Any, debug: bool, near: Path) -> None:
    """Run ``work`` as a worker of another launcher, and add the rank to the error of this rank."""
    try:
        work()
    except MeshwrightError as error:
        rank = os.environ.get("RANK", "0")
        if rank == "0":
            raise
        if isinstance(error, NonFiniteError | StoppedError):  # all ranks have this error, and rank 0 reports it
            leave_to_rank_0(error)
        raise type(error)([line.within(f"rank {rank}: ") for line in error.problems]) from error
    except Exception as error:
        if debug:
            raise
        raise WorkerError("worker.exception", f"rank {os.environ.get('RANK', '0')}: {described(error, near)}") from error


def _launch_local(
    config: RunConfig,
    processes: int,
    kind: str,
    prepared: tuple[str, Path | None],
    forecast: "Forecast | None",
    debug: bool,
    job: "ScoreJob | None",
) -> None:
    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from meshwright.device import start_method, starting
    from meshwright.distributed.process_group import end_openmp_threads

    if not debug:
        logging.raiseExceptions = False  # a line of torch's log that a signal cuts is nothing to be told of
        for name in (
            "torch.distributed.elastic",
            "torch.distributed.launcher",
            "torch.distributed.elastic.multiprocessing",
        ):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the threads of tokenizers do not survive a fork
    method = start_method(kind)
    if kind == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    if method == "fork":
        import torch._dynamo  # noqa: F401 (FSDP's hooks need it; imported before the fork, every worker has it)

        end_openmp_threads()
    with tempfile.TemporaryDirectory(prefix="meshwright-") as reports:
        settings = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"localhost:{config.launch.port}",
            max_restarts=0,
            monitor_interval=MONITOR_SECONDS,
            start_method=method,
            local_addr="localhost",
            # The other signals ask a run to end, and are passed on to its workers; what is no run has nothing to save.
            signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT" if job else "SIGHUP,SIGQUIT",
        )
        asked = Path(reports) / ASKED
        interrupted: list[int] = []
        try:
            with starting(kind), nullcontext() if job else wishes_to_end(asked, interrupted):
                elastic_launch(settings, _worker_entry)(config, kind, prepared, forecast, reports, debug, os.getpid(), job)
        except ChildFailedError as error:
            if interrupted and not has_begun(asked):  # the workers, which got the signal too, ended before the launcher
                raise KeyboardInterrupt from None
            raise _first_failure(Path(reports), error) from None
        except SignalException as error:
            if error.sigval is signal.SIGINT and not has_begun(asked):
                raise KeyboardInterrupt from None
            if error.sigval is signal.SIGINT:
                raise InterruptError("run.interrupted", _ended_at_once(config)) from None
            raise WorkerError("worker.ended", f"ended by {error.sigval.name}") from None


def _ended_at_once(config: RunConfig) -> str:
    """What a second Ctrl-C leaves of a run."""
    last = latest(Paths(config.directory).checkpoints)
    kept = "the run has no checkpoint" if last is None else f"the last complete checkpoint is {last}"
    return f"SIGINT a second time: ended in the middle of a step; {kept}"


def _worker_entry(
    config: RunConfig,
    kind: str,
    prepared: tuple[str, Path | None],
    forecast: "Forecast | None",
    reports: str,
    debug: bool,
    launcher: int,
    job: "ScoreJob | None",
) -> None:
    """Run a local worker, and write its failure to a file for the launcher, which reports for all workers."""
    # A forked worker has inherited the launcher's handlers.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    # torch lets the kernel send SIGINT to a worker whose launcher dies. One before this line may have had no effect.
    if os.getppid() != launcher:
        os._exit(1)
    if not debug:
        quiet()  # a spawned worker has not inherited it
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    from meshwright.train.start.worker import run_worker

    try:
        run_worker(config, kind, prepared, forecast=forecast, asked=Path(reports) / ASKED, job=job)
    except BaseException as error:
        failed = (
            error if isinstance(error, MeshwrightError) else WorkerError("worker.exception", described(error, config.directory))
        )
        report = {
            "time": time.time(),
            "type": type(error).__name__,
            "problems": [[problem.code, problem] for problem in failed.problems],
        }
        path = Path(reports, f"rank-{os.environ['RANK']}.json")
        path.with_suffix(".tmp").write_text(json.dumps(report))
        path.with_suffix(".tmp").rename(path)
        if debug:
            traceback.print_exc()
        # If a peer was killed, this failure only follows from that. The launcher sees one dead worker at a time, so wait here
        # until it has seen the peer.
        time.sleep(10 * MONITOR_SECONDS)
        # Exit without cleaning up, which could wait for peers that are in a collective.
        os._exit(error.exit_code if isinstance(error, StoppedError) else 1)


def _first_failure(reports: Path, failed: Any) -> MeshwrightError:
    """Return the failure that came first, with its rank. Later failures are mostly peers that lost a connection."""
    failures = {int(path.stem.removeprefix("rank-")): json.loads(path.read_text()) for path in reports.glob("rank-*.json")}
    silent = {rank: failure for rank, failure in failed.failures.items() if rank not in failures}
    if not failures and any(failure.exitcode == StoppedError.exit_code for failure in silent.values()):
        return StoppedError("run.stopped", UNEXPORTED)
    killed = {rank: failure for rank, failure in silent.items() if failure.exitcode not in (0, -signal.SIGTERM)}
    if killed:
        rank, failure = min(killed.items(), key=lambda item: item[1].timestamp)
        name = signal.Signals(-failure.exitcode).name if failure.exitcode < 0 else f"exit code {failure.exitcode}"
        hint = " (the system kills with SIGKILL when memory runs out)" if name == "SIGKILL" else ""
        first = min((report["time"] for report in failures.values()), default=float("inf"))
        if failure.timestamp <= first + 1:
            return WorkerError("worker.ended", f"rank {rank} ended with {name}{hint}")
    if not failures:
        return WorkerError("worker.ended", str(failed))
    rank, report = min(failures.items(), key=lambda item: item[1]["time"])
    kind = getattr(errors, report["type"], WorkerError)
    alike = [other for other, item in failures.items() if item["problems"] == report["problems"]]
    prefix = "" if len(alike) > 1 else f"rank {rank}: "
    return kind([Refusal(code, f"{prefix}{line}") for code, line in report["problems"]])

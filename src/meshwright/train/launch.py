"""Starts a run: its own local workers through torch's elastic launcher, or this process as one of torchrun's or Slurm's."""

import json
import logging
import os
import signal
import socket
import tempfile
import time
import traceback
import uuid
from pathlib import Path
from typing import Any

from rich.console import Console

from meshwright import errors
from meshwright.errors import ConfigError, MeshwrightError, NonFiniteError, WorkerError
from meshwright.train.assure import Prove, assure, assure_on_rank_0
from meshwright.train.config import RunConfig
from meshwright.train.proof import Source

__all__ = ["device_kind", "launch", "local_processes"]

MONITOR_SECONDS = 0.1
"""Between two looks of the launcher at its workers."""


def local_processes(config: RunConfig) -> int:
    """Workers to start on this machine: as configured, or one for each GPU, or one."""
    return config.launch.nproc or (1 if config.launch.device == "cpu" else max(1, _gpus()))


def device_kind(config: RunConfig, processes: int, *, launched: bool = False) -> str:
    """``cuda`` or ``cpu`` for the workers of this machine.

    Args:
        config: of the run.
        processes: workers on this machine.
        launched: another launcher started them. It may have given each a GPU of its own, the only one that it sees.

    Raises:
        ConfigError: fewer GPUs than processes, where GPUs are asked for or another launcher shares them out.
    """
    wish, gpus = config.launch.device, _gpus()
    if wish == "cpu" or (wish == "auto" and gpus == 0):
        return "cpu"
    if gpus >= processes or (launched and gpus == 1):
        return "cuda"
    if wish == "auto" and not launched:
        return "cpu"
    legal = f"legal launch.nproc: 1 to {gpus}" if gpus else "there is no GPU on this machine"
    raise ConfigError(f"launch.device={wish}: {processes} processes and {gpus} GPUs here; {legal}, or launch.device=cpu")


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def launch(config: RunConfig, *, debug: bool = False, source: Source | None = None, prove: Prove | None = None) -> None:
    """Run a configuration to its end.

    Args:
        config: of the run.
        debug: let tracebacks and torch's own reports through.
        source: of the configuration, for the command that audits it.
        prove: audits a layout that is not proven before it is started; ``None``: it gets a line, and is started.

    Raises:
        NotProvenError: that audit failed; nothing was trained.
        MeshwrightError: what the run failed with. An error on one rank stops all, and names the rank.
    """
    from meshwright.distributed.process_group import distributed_environment
    from meshwright.plan.explain import explain
    from meshwright.train.prepare import checkpoint_to_resume, describe_data, locked, prepare_run

    if distributed_environment():
        from meshwright.train.worker import run_worker

        local = _local_world_size(config)

        def work() -> None:
            kind = device_kind(config, local, launched=True)
            store = assure_on_rank_0(config, source, prove) if prove is not None else None
            run_worker(config, kind, source=source)
            del store

        _as_one_of_many(work, debug)
        return
    processes = local_processes(config)
    kind = device_kind(config, processes)
    _check_port(config.launch.port)
    with locked(config):
        setup, _, store = prepare_run(config, processes)
        Console().print(explain(setup.plan, parameters=False))
        Console().print(describe_data(config, store), highlight=False, markup=False, soft_wrap=True)
        assure(setup, source, prove)
        prepared = (str(store.directory), checkpoint_to_resume(config))
        del setup, store
        if processes == 1:
            from meshwright.train.worker import run_worker

            run_worker(config, kind, prepared)
        else:
            _launch_local(config, processes, kind, prepared, debug)


def _local_world_size(config: RunConfig) -> int:
    """Workers that another launcher started on this machine.

    Raises:
        ConfigError: if the configuration asks for another number.
    """
    slurm = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")  # such as 8(x2)
    text = os.environ.get("LOCAL_WORLD_SIZE") or slurm.split("(")[0].split(",")[0] or str(config.launch.nproc or 1)
    local = int(text)
    if config.launch.nproc is not None and local != config.launch.nproc:
        raise ConfigError(f"launch.nproc={config.launch.nproc}: the launcher started {local} processes here; leave it out")
    return local


def _check_port(port: int) -> None:
    if port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(
                f"launch.port={port}: {(error.strerror or str(error)).lower()}; choose another, or 0 for any that is free"
            ) from error


def _as_one_of_many(work: Any, debug: bool) -> None:
    """Run as a worker of another launcher: the error of this rank goes to the terminal with its rank."""
    from meshwright.train.worker import leave_to_rank_0

    try:
        work()
    except MeshwrightError as error:
        rank = os.environ.get("RANK", "0")
        if rank == "0":
            raise
        if isinstance(error, NonFiniteError):  # seen by all ranks alike, and rank 0 says it
            leave_to_rank_0(error)
        raise type(error)([f"rank {rank}: {line}" for line in error.problems]) from error
    except Exception as error:
        if debug:
            raise
        raise WorkerError(f"rank {os.environ.get('RANK', '0')}: {type(error).__name__}: {error}") from error


def _launch_local(config: RunConfig, processes: int, kind: str, prepared: tuple[str, Path | None], debug: bool) -> None:
    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from meshwright.distributed.process_group import end_openmp_threads

    if not debug:
        for name in (
            "torch.distributed.elastic",
            "torch.distributed.launcher",
            "torch.distributed.elastic.multiprocessing",
        ):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork
    if kind == "cpu":
        import torch._dynamo  # noqa: F401 (FSDP's hooks need it; every forked worker has it then)

        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
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
            # Forked workers start with everything imported. CUDA does not survive a fork, so with GPUs they start afresh.
            start_method="fork" if kind == "cpu" else "spawn",
            local_addr="localhost",
        )
        try:
            elastic_launch(settings, _worker_entry)(config, kind, prepared, reports, debug)
        except ChildFailedError as error:
            raise _first_failure(Path(reports), error) from None
        except SignalException as error:
            if error.sigval is signal.SIGINT:
                raise KeyboardInterrupt from None
            raise WorkerError(f"ended by {error.sigval.name}") from None


def _worker_entry(config: RunConfig, kind: str, prepared: tuple[str, Path | None], reports: str, debug: bool) -> None:
    """What a local worker runs. A failure is written down for the launcher, which speaks for all."""
    # The launcher's own handlers came along in the fork; a worker that waits in a collective has to die at once.
    # torch also has SIGINT sent to it when the launcher dies.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    from meshwright.train.worker import run_worker

    try:
        run_worker(config, kind, prepared)
    except BaseException as error:
        problems = list(error.problems) if isinstance(error, MeshwrightError) else [f"{type(error).__name__}: {error}"]
        report = {
            "time": time.time(),
            "type": type(error).__name__,
            "problems": problems,
        }
        path = Path(reports, f"rank-{os.environ['RANK']}.json")
        path.with_suffix(".tmp").write_text(json.dumps(report))
        path.with_suffix(".tmp").rename(path)
        if debug:
            traceback.print_exc()
        # If a peer was killed, this is only its echo: the launcher, which sees one dead worker at a time, is to see the peer.
        time.sleep(10 * MONITOR_SECONDS)
        os._exit(1)  # peers may wait in a collective; nothing here is worth waiting for


def _first_failure(reports: Path, failed: Any) -> MeshwrightError:
    """The failure that came first, with its rank: later ones are mostly peers that lost a connection."""
    found = {int(path.stem.removeprefix("rank-")): json.loads(path.read_text()) for path in reports.glob("rank-*.json")}
    silent = {rank: failure for rank, failure in failed.failures.items() if rank not in found}
    killed = {rank: failure for rank, failure in silent.items() if failure.exitcode not in (0, -signal.SIGTERM)}
    if killed:
        rank, failure = min(killed.items(), key=lambda item: item[1].timestamp)
        name = signal.Signals(-failure.exitcode).name if failure.exitcode < 0 else f"exit code {failure.exitcode}"
        hint = " (the system kills with SIGKILL when memory runs out)" if name == "SIGKILL" else ""
        first = min((report["time"] for report in found.values()), default=float("inf"))
        if failure.timestamp <= first + 1:
            return WorkerError(f"rank {rank} ended with {name}{hint}")
    if not found:
        return WorkerError(str(failed))
    rank, report = min(found.items(), key=lambda item: item[1]["time"])
    kind = getattr(errors, report["type"], WorkerError)
    alike = [other for other, item in found.items() if item["problems"] == report["problems"]]
    prefix = "" if len(alike) > 1 else f"rank {rank}: "
    return kind([f"{prefix}{line}" for line in report["problems"]])

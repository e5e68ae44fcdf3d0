"""Gloo groups run their collectives in one thread: two corrupt the heap (docs/upstream.md)."""

import hashlib
import socket
import subprocess
import sys
import tempfile
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor

from meshwright.distributed import _torch_compat
from meshwright.distributed._torch_compat import process_groups
from meshwright.distributed.fsdp2 import FSDP2Manager
from meshwright.distributed.mesh import adopt_mesh, build_mesh
from meshwright.distributed.process_group import process_group
from meshwright.layout import Layout
from tests.harness import TIMEOUT, run_ranks


def options_of(group: dist.ProcessGroup | None = None):
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu")).options


def test_every_group_of_a_mesh_has_one_thread_and_the_timeout_of_the_default_group() -> None:
    def on_rank(rank: int) -> None:
        mesh = build_mesh(Layout(dp_replicate=2), "cpu")
        for group in (None, mesh["dp_replicate"].get_group(), mesh["dp_shard"].get_group(), mesh["dp_cp"].get_group()):
            assert options_of(group)._threads == 1
            assert options_of(group)._timeout == TIMEOUT
        # Several collectives in flight come to their ends in order.
        pieces = [distribute_tensor(torch.arange(8.0) + index, mesh["dp_shard"]).full_tensor() for index in range(20)]
        assert all(torch.equal(piece, torch.arange(8.0) + index) for index, piece in enumerate(pieces))

    run_ranks(on_rank, 4)


def test_a_group_whose_maker_chose_a_timeout_keeps_it() -> None:
    def on_rank(rank: int) -> None:
        group = dist.new_group([0, 1], timeout=timedelta(hours=3))
        mesh = adopt_mesh(DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp_shard_cp",)))
        assert options_of(group)._timeout == timedelta(hours=3)
        assert options_of(mesh["dp_cp"].get_group())._timeout in (TIMEOUT, timedelta(hours=3))

    run_ranks(on_rank, 2)


def test_whoever_starts_the_process_group_it_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_train(rank: int) -> None:
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        with process_group(timedelta(seconds=7), "cpu"):
            assert options_of()._threads == 1
            assert options_of()._timeout == timedelta(seconds=7)

    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]

    def of_the_manager(rank: int) -> None:
        for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        FSDP2Manager()
        assert options_of()._threads == 1
        dist.barrier()  # rank 0 serves the store

    run_ranks(of_train, 1, group=False)
    run_ranks(of_the_manager, 2, group=False)


def test_a_mesh_does_not_take_a_default_group_with_two_threads() -> None:
    def on_rank(rank: int, folder: str) -> None:
        gloo = dist.ProcessGroupGloo
        gloo.__init__ = getattr(gloo.__init__, "_meshwright", gloo.__init__)  # as before another test's groups were made
        store = dist.FileStore(f"{folder}/store", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=11))
        assert options_of()._threads == 2  # as torch makes it, for a loop of the user's own
        mesh = build_mesh(Layout(), "cpu")
        for name in ("dp", "dp_shard_cp", "dp_cp"):
            group = mesh[name].get_group()
            assert group is mesh["dp_shard"].get_group()
            assert options_of(group)._threads == 1
            assert options_of(group)._timeout == timedelta(seconds=11)
        assert mesh.sum(torch.ones(1), "dp").item() == 2
        dist.barrier()

    with tempfile.TemporaryDirectory() as folder:
        run_ranks(on_rank, 2, folder, group=False)


def test_what_torch_honours_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_rank(rank: int) -> None:
        _torch_compat.mend_gloo()
        _torch_compat.mend_gloo()
        gloo = dist.ProcessGroupGloo
        for named, devices in (("", 1), ("lo", 1), ("lo,lo", 2)):
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
            options = gloo(dist.HashStore(), 0, 1, timedelta(seconds=3)).options
            assert (len(options._devices), options._threads, options._timeout) == (devices, 1, timedelta(seconds=3))
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
        with pytest.raises(RuntimeError, match="no-such-interface"):
            gloo(dist.HashStore(), 0, 1, timedelta(seconds=3))
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
        assert gloo(dist.HashStore(), 0, 1).options._timeout == dist.distributed_c10d.default_pg_timeout
        given = gloo._Options()
        given._devices, given._timeout = [gloo.create_device(interface="lo")], timedelta(seconds=5)
        assert gloo(dist.HashStore(), 0, 1, given).options._timeout == timedelta(seconds=5)
        assert given._threads == 1
        assert isinstance(gloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=9)), gloo)

    run_ranks(on_rank, 1, group=False)


ENDS = """
import os, sys, tempfile
import torch
import torch.distributed as dist
from meshwright.distributed.mesh import build_mesh
from meshwright.layout import Layout

def rank_of_two(rank, path):
    global mesh, total  # they are freed after the interpreter began to end
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    mesh = build_mesh(Layout(), "cpu")
    mesh.sum(torch.zeros(()))
    for thread in set(map(int, os.listdir("/proc/self/task"))) - {os.getpid()}:
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))  # they run when nobody else wants the core
    total = mesh.sum(torch.ones(()))
    dist.destroy_process_group()
    sys.exit(0)

def fork(function, *args):
    process = os.fork()
    if process == 0:
        function(*args)
    return process

def compute():
    while os.getppid() == parent:
        pass
    os._exit(0)

parent, codes = os.getpid(), []
busy = [fork(compute) for _ in range(os.cpu_count())]
for _ in range(60):
    with tempfile.TemporaryDirectory() as folder:
        ranks = [fork(rank_of_two, rank, folder + "/store") for rank in range(2)]
        codes += [os.waitpid(process, 0)[1] for process in ranks]
print(codes)
assert not any(codes)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="nothing tells which threads run")
def test_a_process_waits_for_threads_that_run_but_not_for_long() -> None:
    # Without the interpreter's lock, as threads of gloo run.
    def compute(rounds: int) -> threading.Thread:
        thread = threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha512", b"word", b"salt", rounds), daemon=True)
        thread.start()
        return thread

    short = compute(50_000)
    process_groups._wait_for_threads(60)
    assert not short.is_alive()
    long = compute(3_000_000)
    process_groups._wait_for_threads(0.1)
    assert long.is_alive()
    long.join()


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are slowed down by Linux's scheduler")
def test_a_process_ends_well_while_a_thread_of_gloo_still_holds_a_tensor() -> None:
    subprocess.run([sys.executable, "-c", ENDS], check=True, timeout=300)

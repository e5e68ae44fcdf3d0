"""The pool of worker processes, and the report of ranks that hang.

Jobs are functions of this module, for the workers find them by name. This process itself never computes a gradient or joins
a process group: workers are forked from it.
"""

import ctypes
import dataclasses
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from meshwright.errors import ConfigError, LayoutError, MeshwrightError, UnsupportedError, WorkerError
from meshwright.ranks.hang import HangError, describe, disagreement
from meshwright.ranks.pool import Pool
from meshwright.ranks.rank_state import Collective, Frame, RankState, stack_of_text

PATIENCE = 2.0


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    with Pool(2, patience=PATIENCE) as pool:
        yield pool


# Jobs


def who(device: torch.device, *args: object) -> tuple[object, ...]:
    return (dist.get_rank(), dist.get_world_size(), os.getpid(), str(device), *args)


def total(device: torch.device, value: torch.Tensor) -> torch.Tensor:
    value = value.to(device) * (dist.get_rank() + 1)
    dist.all_reduce(value)
    return value.cpu()


def mesh_total(device: torch.device, first: int, second: int) -> list[float]:
    mesh = init_device_mesh("cpu", (first, second), mesh_dim_names=("dp_shard", "tp"))
    found = []
    for axis in ("dp_shard", "tp"):
        value = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(value, group=mesh.get_group(axis))
        found.append(value.item())
    return found


def threads(device: torch.device) -> int:
    torch.set_num_threads(2)
    product = torch.ones(1000, 1000, requires_grad=True)
    torch.relu(product @ product).sum().backward()
    return torch.get_num_threads()


def refuse(device: torch.device, ranks: tuple[int, ...], words: str = "tp=3: legal are 1, 2") -> None:
    if dist.get_rank() in ranks:
        raise LayoutError([words, "cp=5: legal is 1"])


def stumble(device: torch.device, everywhere: bool) -> None:
    if everywhere or dist.get_rank() == 1:
        raise KeyError("no such layer")
    dist.all_reduce(torch.ones(4))


def die(device: torch.device, how: str) -> None:
    if dist.get_rank() == 1:
        {"kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "exit": lambda: os._exit(7), "abort": os.abort}[how]()
    dist.all_reduce(torch.ones(4))


def unpicklable(device: torch.device) -> object:
    return threading.Lock() if dist.get_rank() == 1 else None


def another_kind(device: torch.device) -> None:
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 0:
        dist.all_gather_into_tensor(torch.ones(2, 3, 5), torch.ones(1, 3, 5))
    else:
        dist.all_reduce(torch.ones(7))


def another_size(device: torch.device, larger: int) -> None:
    dist.all_reduce(torch.ones(8 if dist.get_rank() == larger else 4))


def another_group(device: torch.device, all_wait: bool) -> None:
    """Rank 1 of four is in the other of its two groups; so is rank 2 where all are to wait, in a circle."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    astray = dist.get_rank() in ((1, 2) if all_wait else (1,))
    dist.all_reduce(torch.ones(3), group=mesh.get_group("dp_shard" if astray else "tp"))


def sleep(device: torch.device) -> None:
    dist.all_reduce(torch.ones(2))
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.all_reduce(torch.ones(2))


def hold_the_gil(device: torch.device) -> None:
    if dist.get_rank() == 1:
        ctypes.PyDLL(None).sleep(60)
    dist.all_reduce(torch.ones(2))


def leave_early(device: torch.device) -> None:
    if dist.get_rank() == 0:
        dist.barrier()


def message_to_nobody(device: torch.device) -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.ones(4), 1)


def slow(device: torch.device, how: str) -> None:
    """Longer than patience: collectives, of which the recorder tells, or messages and work, of which it does not."""
    for _ in range(4):
        if how == "collectives":
            time.sleep(PATIENCE / 3)
            dist.all_reduce(torch.ones(1))
        elif dist.get_rank() == 0:
            end = time.thread_time() + PATIENCE / 3
            while time.thread_time() < end:
                torch.ones(300, 300) @ torch.ones(300, 300)
            dist.send(torch.ones(1), 1)
        else:
            dist.recv(torch.ones(1), 0)


def orphan(path: str) -> None:
    """A parent that dies without a word while its workers wait."""
    tempfile.tempdir = os.path.dirname(path)
    found = pids(Pool(2))
    with open(path, "wb") as file:
        pickle.dump(found, file)
    os._exit(0)


# Work that ends well


def test_results_come_by_rank_and_processes_are_used_again(pair: Pool) -> None:
    first, second = pair.run(who, "a"), pair.run(who, "b")
    assert [item[:2] + item[3:] for item in first] == [(0, 2, "cpu", "a"), (1, 2, "cpu", "a")]
    assert [item[2] for item in first] == [item[2] for item in second]
    assert len({os.getpid(), *(item[2] for item in first)}) == 3
    given = torch.ones(3)
    assert all(torch.equal(item, 3 * given) for item in pair.run(total, given))
    assert torch.equal(given, torch.ones(3))


def test_jobs_make_groups_of_their_own_one_after_another() -> None:
    with Pool(4) as pool:
        assert pool.run(mesh_total, 2, 2) == [[2.0, 1.0], [4.0, 1.0], [2.0, 5.0], [4.0, 5.0]]
        assert pool.run(mesh_total, 1, 4) == [[float(rank), 6.0] for rank in range(4)]
        assert pool.run(mesh_total, 2, 2)[3] == [4.0, 5.0]


def test_a_pool_of_one() -> None:
    with Pool(1, patience=0.5) as pool:
        assert pool.run(who)[0][:2] == (0, 1)
        assert pool.run(total, torch.ones(2))[0].tolist() == [1, 1]
        with pytest.raises(LayoutError, match=r"^tp=3"):
            pool.run(refuse, (0,))


@pytest.mark.gpu
def test_a_pool_on_gpus() -> None:
    with Pool(torch.cuda.device_count(), "cuda") as pool:
        assert [item[3] for item in pool.run(who)] == [f"cuda:{rank}" for rank in range(pool.world_size)]
        count = sum(range(1, pool.world_size + 1))
        assert all(item.tolist() == [count] for item in pool.run(total, torch.ones(1)))


def test_workers_compute_in_threads_although_their_parent_did() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.relu(torch.ones(1000, 1000) @ torch.ones(1000, 1000))
        with Pool(1, patience=20) as pool:
            assert pool.run(threads) == [2]
    finally:
        torch.set_num_threads(before)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["collectives", "messages"])
def test_what_counts_as_progress(pair: Pool, how: str) -> None:
    assert pair.run(slow, how) == [None, None]


def test_workers_start_afresh_when_they_hold_many_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.ranks.pool.MOST_GROUPS", 2)
    with Pool(2) as pool:
        found = []
        for _ in range(3):
            found.append(pids(pool))
            pool.run(mesh_total, 2, 1)  # one new group: the first axis is the default group
    assert [found[0] == found[1], found[1] == found[2]] == [True, False]


def test_workers_end_with_their_parent(tmp_path) -> None:
    pid = os.fork()
    if pid == 0:
        orphan(str(tmp_path / "pids"))
    os.waitpid(pid, 0)
    workers = pickle.loads((tmp_path / "pids").read_bytes())
    end = time.monotonic() + 10
    while (alive := [item for item in workers if _runs(item)]) and time.monotonic() < end:
        time.sleep(0.1)
    assert not alive


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_sizes_that_are_no_pool() -> None:
    with pytest.raises(ConfigError, match="a pool of 0 processes"):
        Pool(0)
    with Pool(1, "tpu") as pool, pytest.raises(UnsupportedError, match="workers on tpu: there is none on this machine"):
        pool.run(abs)


# Work that raises, or dies


def pids(pool: Pool) -> list[int]:
    return [item[2] for item in pool.run(who)]


def test_a_refusal_by_all_ranks_is_itself_and_keeps_the_processes(pair: Pool) -> None:
    before = pids(pair)
    with pytest.raises(LayoutError) as caught:
        pair.run(refuse, (0, 1))
    assert caught.value.problems == ("tp=3: legal are 1, 2", "cp=5: legal is 1")
    with pytest.raises(WorkerError, match=r"^rank \d: KeyError: 'no such layer'") as other:
        pair.run(stumble, True)
    assert "in stumble" in other.value.__notes__[0]
    assert pids(pair) == before


def test_a_refusal_by_one_rank_names_it(pair: Pool) -> None:
    before = pids(pair)
    with pytest.raises(LayoutError) as caught:
        pair.run(refuse, (1,))
    assert caught.value.problems == ("rank 1: tp=3: legal are 1, 2", "rank 1: cp=5: legal is 1")
    assert not set(pids(pair)) & set(before)


def test_an_error_on_one_rank_while_another_waits(pair: Pool) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"^rank 1: KeyError: 'no such layer'") as caught:
        pair.run(stumble, False)
    assert type(caught.value) is WorkerError
    assert "in stumble" in caught.value.__notes__[0]
    assert time.monotonic() - began < 6
    assert len(pair.run(who)) == 2


@pytest.mark.parametrize(("how", "words"), [("kill", "SIGKILL (the system"), ("exit", "exit code 7"), ("abort", "SIGABRT")])
def test_a_worker_that_dies(pair: Pool, how: str, words: str) -> None:
    with pytest.raises(WorkerError) as caught:
        pair.run(die, how)
    assert type(caught.value) is WorkerError
    assert str(caught.value).startswith(f"rank 1 ended with {words}")


def test_a_worker_that_died_while_it_had_nothing_to_do(pair: Pool) -> None:
    before = pids(pair)
    os.kill(before[0], signal.SIGKILL)
    time.sleep(0.2)
    assert not set(pids(pair)) & set(before)


def test_a_result_that_cannot_be_pickled(pair: Pool) -> None:
    with pytest.raises(WorkerError, match=r"^rank 1: the result cannot be pickled: TypeError: .*lock"):
        pair.run(unpicklable)


# Work that hangs


def hang(pool: Pool, job: object, *args: object) -> list[str]:
    with pytest.raises(HangError) as caught:
        pool.run(job, *args)
    assert len(caught.value.states) == pool.world_size
    return list(caught.value.problems)


def test_another_kind(pair: Pool) -> None:
    verdict, zero, one = hang(pair, another_kind)
    assert verdict == (
        "ranks disagree about collective 3 of the default group (ranks 0, 1): "
        "rank 0 all_gather 1 x 3 x 5 float32, rank 1 all_reduce 7 float32"
    )
    assert zero.startswith("rank 0 waits in all_gather number 3 of the default group (ranks 0, 1), 1 x 3 x 5 float32, ")
    assert "in torch's all_gather_into_tensor, called from test_pool.py:" in zero
    assert zero.endswith(" another_kind")
    assert "number 3 of the default group (ranks 0, 1), 7 float32, called from test_pool.py:" in one


@pytest.mark.parametrize("larger", [0, 1])
def test_another_size(pair: Pool, larger: int) -> None:
    """gloo aborts the process of the rank with the smaller tensor."""
    verdict, *lines = hang(pair, another_size, larger)
    assert verdict.startswith("ranks disagree about collective 2 of the default group (ranks 0, 1): ")
    assert f"rank {larger} all_reduce 8 float32" in verdict
    assert f"rank {1 - larger} all_reduce 4 float32" in verdict
    assert lines[1 - larger].startswith(f"rank {1 - larger} ended with SIGABRT")


@pytest.mark.thorough
def test_another_group() -> None:
    with Pool(4, patience=PATIENCE) as pool:
        verdict, *lines = hang(pool, another_group, False)
        assert verdict == "rank 3 never entered all_reduce number 1 of dp_shard (ranks 1, 3), in which rank 1 waits"
        assert lines[0].startswith(
            "rank 0 waits in all_reduce number 1 of tp (ranks 0, 1), 3 float32, called from test_pool.py:"
        )
        assert lines[1].startswith("rank 1 waits in all_reduce number 1 of dp_shard (ranks 1, 3)")
        assert lines[3].startswith("rank 3 has returned; its last collective was all_reduce number 1 of tp (ranks 2, 3)")
        verdict, *lines = hang(pool, another_group, True)
        assert re.match(r"rank \d never entered .*, in which rank \d waits; it waits in all_reduce number 1 of", verdict)
        assert all("waits in all_reduce number 1 of" in line for line in lines)


def test_a_rank_that_sleeps(pair: Pool) -> None:
    verdict, zero, one = hang(pair, sleep)
    words = "all_reduce number 3 of the default group (ranks 0, 1)"
    assert verdict == f"rank 1 never entered {words}, in which rank 0 waits"
    assert zero.startswith(f"rank 0 waits in {words}, 2 float32, called from test_pool.py:")
    assert one.startswith("rank 1 is in no collective; it is at test_pool.py:")
    assert " sleep; its last collective was all_reduce number 2 of " in one


def test_a_rank_that_cannot_answer(pair: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.ranks.pool.GRACE", 1.0)
    verdict, zero, one = hang(pair, hold_the_gil)
    assert verdict == "no rank goes on, and rank 1 did not answer"
    assert zero.startswith("rank 0 waits in all_reduce number 2")
    assert one.startswith("rank 1 is at test_pool.py:")
    assert one.endswith(" hold_the_gil")


def test_a_rank_that_returned(pair: Pool) -> None:
    verdict, zero, one = hang(pair, leave_early)
    assert verdict == "rank 1 never entered barrier number 2 of the default group (ranks 0, 1), in which rank 0 waits"
    assert zero.startswith("rank 0 waits in barrier number 2")
    assert one.startswith("rank 1 has returned")


def test_a_message_that_nobody_sends(pair: Pool) -> None:
    """gloo records no messages; the Python stack still tells."""
    verdict, zero, one = hang(pair, message_to_nobody)
    assert "no recorded collective tells why" in verdict
    assert zero.startswith("rank 0 is in no collective; it is in torch's recv, called from test_pool.py:")
    assert one.startswith("rank 1 has returned")


# What the ranks disagree about, from hand-made entries


def entry(number: int, **changes: object) -> Collective:
    base = Collective("all_gather", number, "5", "mesh_dp_shard", (0, 1), ((3, 4),), ("float32",), True, number)
    return dataclasses.replace(base, **changes)


WAITING = {"finished": False}


def test_the_first_difference_is_named() -> None:
    states = [
        RankState(0, (entry(1), entry(2, **WAITING))),
        RankState(1, (entry(1), entry(2, kind="reduce_scatter", shapes=((8,), (2,)), **WAITING))),
    ]
    assert disagreement(states) == (
        "ranks disagree about collective 2 of dp_shard (ranks 0, 1): rank 0 all_gather 3 x 4 float32, "
        "rank 1 reduce_scatter 8 float32 and 1 more"
    )


def test_shapes_of_equal_size_agree_and_dtypes_count() -> None:
    first = RankState(0, (entry(1), entry(2, **WAITING)))
    assert disagreement([first, RankState(1, (entry(1), entry(2, shapes=((12,),), **WAITING)))]) is None
    assert "bfloat16" in (disagreement([first, RankState(1, (entry(1), entry(2, dtypes=("bfloat16",))))]) or "")


def test_all_to_all_may_be_uneven() -> None:
    first, second = entry(1, kind="all_to_all", **WAITING), entry(1, kind="all_to_all", shapes=((5,),), **WAITING)
    assert disagreement([RankState(0, (first,)), RankState(1, (second,))]) is None


def test_the_rank_that_waits_nowhere_is_blamed() -> None:
    """Rank 0 waits for rank 1 in dp_shard, and rank 1 for rank 3 in tp, which is the one that does something else."""
    other = entry(1, group="6", description="mesh_tp", ranks=(1, 3), finished=False, time=9)
    elsewhere = entry(1, group="7", ranks=(2, 3))
    states = [RankState(0, (entry(1), entry(2, **WAITING))), RankState(1, (entry(1), other)), RankState(3, (elsewhere,))]
    assert disagreement(states) == "rank 3 never entered all_gather number 1 of tp (ranks 1, 3), in which rank 1 waits"


def test_two_ranks_that_wait_for_each_other() -> None:
    other = entry(1, group="6", description="mesh_tp", finished=False, time=9)
    states = [RankState(0, (entry(1), entry(2, **WAITING))), RankState(1, (entry(1), other))]
    assert disagreement(states) == (
        "rank 1 never entered all_gather number 2 of dp_shard (ranks 0, 1), in which rank 0 waits; "
        "it waits in all_gather number 1 of tp (ranks 0, 1)"
    )


def test_groups_of_one_name_and_other_ranks_are_not_compared() -> None:
    states = [RankState(0, (entry(1, ranks=(0, 2)),)), RankState(1, (entry(1, kind="broadcast", ranks=(1, 3)),))]
    assert disagreement(states) is None


def test_a_collective_that_failed_was_entered() -> None:
    """The recorder calls it finished; the rank that is not there left it waiting until its time was out."""
    states = [RankState(0, (entry(1), entry(2)), ending="failed: timed out", broken=True), RankState(1, (entry(1),))]
    assert (disagreement(states) or "").startswith("rank 1 never entered all_gather number 2 of dp_shard")
    assert disagreement([dataclasses.replace(states[0], ending="has returned", broken=False), states[1]]) is None


def test_lines_without_records() -> None:
    stack = (Frame("/x/run.py", 3, "step"), Frame("/x/main.py", 9, "main"))
    assert describe([RankState(0, stack=stack), RankState(1)])[1:] == [
        "rank 0 is at run.py:3 step <- main.py:9 main",
        "rank 1 is at an unknown place",
    ]


def test_a_stack_is_reduced_to_the_way_into_torch() -> None:
    where = os.path.dirname(torch.__file__)
    text = f"""Current thread 0x1 (most recent call first):
  File "{where}/distributed/c10d_logger.py", line 83 in wrapper
  File "{where}/distributed/distributed_c10d.py", line 30 in all_reduce
  File "/home/me/step.py", line 12 in sync
  File "{where}/nn/modules/module.py", line 1776 in _call_impl
  File "{os.path.dirname(os.__file__)}/contextlib.py", line 81 in inner
  File "/home/me/step.py", line 40 in train
"""
    assert [frame.function for frame in stack_of_text(text)] == ["all_reduce", "sync", "train"]


def test_a_report_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(HangError(["a", "b"], [RankState(0)])))
    assert isinstance(error, MeshwrightError)
    assert (error.problems, error.states, error.exit_code) == (("a", "b"), (RankState(0),), 1)


def seen(device: torch.device) -> tuple[str, int]:
    return (os.environ["CUDA_VISIBLE_DEVICES"], os.getppid())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("runs", [False, True])
def test_workers_on_the_cpu_beside_a_driver(monkeypatch: pytest.MonkeyPatch, runs: bool) -> None:
    """A driver does not survive a fork, and torch asks it about tensors of the CPU: there, workers are new processes."""
    monkeypatch.setattr("meshwright.device._driver_runs", lambda: runs)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with Pool(2) as pool:
        assert pool.run(seen) == [("", os.getpid())] * 2
        assert [type(worker.process).__name__ for worker in pool._workers] == [["Fork", "Spawn"][runs] + "Process"] * 2
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


def run_script(script: Path) -> "subprocess.CompletedProcess[str]":
    here, environment = Path(__file__).parents[2], {**os.environ, "PYTHONPATH": "."}
    return subprocess.run([sys.executable, script], cwd=here, env=environment, capture_output=True, text=True)


@pytest.mark.thorough
def test_a_script_without_a_guard_is_told_of_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from meshwright import device\nfrom meshwright.ranks.pool import Pool\nfrom tests.ranks.test_pool import who\n"
        "device._driver_runs = lambda: True\nwith Pool(1) as pool:\n    pool.run(who)\n"
    )
    ended = run_script(script)
    assert "must stand below `if __name__" in ended.stderr
    assert "ended with exit code 1" in ended.stderr


def says(_: object) -> None:
    from tqdm import tqdm

    list(tqdm([1]))
    warnings.warn("a name will change", FutureWarning, stacklevel=1)


def test_workers_that_are_started_anew_are_as_quiet_as_the_process_that_starts_them(tmp_path: Path) -> None:
    """Nothing of other libraries, and nothing of Python about semaphores that leaked with a worker that was ended."""
    script = tmp_path / "script.py"
    script.write_text(
        "from meshwright import device\nfrom meshwright.quiet import quiet\nfrom meshwright.ranks.pool import Pool\n"
        "from tests.ranks.test_pool import says\nif __name__ == '__main__':\n    quiet()\n"
        "    device._driver_runs = lambda: True\n    with Pool(1) as pool:\n        pool.run(says)\n"
    )
    ended = run_script(script)
    assert ended.returncode == 0, ended.stderr
    assert "100%" in ended.stderr
    assert "warn" not in ended.stderr.lower(), ended.stderr

"""Which device workers take, and what another launcher's numbers mean; all of it before a process starts."""

import re
from datetime import timedelta

import pytest

from meshwright.distributed.process_group import _first_host, adopt_slurm, distributed_environment, process_group
from meshwright.errors import ConfigError
from meshwright.train.start.launch import launch
from meshwright.train.start.processes import device_kind, launched_processes, local_processes, planned_processes


def has(monkeypatch: pytest.MonkeyPatch, number: int, kind: str = "cuda") -> None:
    monkeypatch.setattr("meshwright.device.count", lambda: number)
    monkeypatch.setattr("meshwright.device.accelerator", lambda: kind if number else None)


@pytest.mark.parametrize(
    ("wish", "gpus", "processes", "expected"),
    [
        ("auto", 0, 2, "cpu"),
        ("auto", 1, 2, "cpu"),  # the quickstart's two processes on a machine with one GPU
        ("auto", 2, 2, "cuda"),
        ("cpu", 8, 2, "cpu"),
        ("cuda", 8, 8, "cuda"),
    ],
)
def test_device(tiny, monkeypatch: pytest.MonkeyPatch, wish: str, gpus: int, processes: int, expected: str) -> None:
    has(monkeypatch, gpus)
    assert device_kind(tiny(f"launch.device={wish}"), processes) == expected


def test_more_processes_than_gpus_are_refused_where_gpus_are_asked_for(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, 4)
    with pytest.raises(
        ConfigError, match=r"launch\.device=cuda: 8 processes and 4 accelerators .*; legal launch\.nproc: 1 to 4"
    ):
        device_kind(tiny("launch.device=cuda"), 8)
    has(monkeypatch, 0)
    with pytest.raises(ConfigError, match=r"device=cuda: there is no accelerator on this machine; legal here: auto, cpu"):
        device_kind(tiny("launch.device=cuda"), 1)


def test_another_launcher_may_give_each_task_its_own_gpu(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, 1)
    assert device_kind(tiny(), 8, launched=True) == "cuda"
    has(monkeypatch, 4)
    with pytest.raises(ConfigError, match=r"8 processes and 4 accelerators \(cuda\) here.*or launch\.device=cpu"):
        device_kind(tiny(), 8, launched=True)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "8(x2)")
    assert launched_processes(tiny()) == 8


def test_processes_of_this_machine(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, 4)
    assert local_processes(tiny()) == 4
    assert local_processes(tiny("launch.nproc=3")) == 3
    assert local_processes(tiny("launch.device=cpu")) == 1


def test_the_number_of_another_launcher_wins_over_that_of_the_file(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert launched_processes(tiny()) == launched_processes(tiny("launch.nproc=2")) == 4
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match="--nproc=2: the launcher started 4 processes here; leave it out"):
        launch(tiny("launch.nproc=2"), nproc=2)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("SLURM_STEP_NUM_TASKS", "abc"),
        ("SLURM_STEP_NUM_TASKS", "0"),
        ("SLURM_STEP_NUM_TASKS", "-3"),
        ("SLURM_PROCID", "2.5"),
        ("SLURM_LOCALID", "one"),
        ("SLURM_JOB_ID", "12_3"),
        ("SLURM_STEP_ID", "batch"),
        ("SLURM_STEP_NODELIST", "["),
    ],
)
def test_variables_of_slurm_that_are_no_numbers(monkeypatch: pytest.MonkeyPatch, variable: str, text: str) -> None:
    legal = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "gpu[1-2]"}
    for name in SLURM:
        monkeypatch.delenv(name, raising=False)
    for name, value in {**legal, variable: text}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"{variable}='{re.escape(text)}'"):
        adopt_slurm()


@pytest.mark.parametrize(
    ("variable", "text"), [("RANK", "abc"), ("WORLD_SIZE", "none"), ("RANK", "2"), ("MASTER_PORT", "0"), ("MASTER_ADDR", "")]
)
def test_variables_of_torchrun_that_torch_would_stop_at(monkeypatch: pytest.MonkeyPatch, variable: str, text: str) -> None:
    legal = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in {**legal, variable: text}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=variable), process_group(timedelta(seconds=5), "cpu"):
        pass


@pytest.mark.parametrize("text", ["abc", "0", "x4", "4x"])
def test_tasks_per_node_that_are_no_number(tiny, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", text)
    with pytest.raises(ConfigError, match=f"SLURM_STEP_TASKS_PER_NODE='{text}'"):
        launched_processes(tiny())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    with pytest.raises(ConfigError, match=f"LOCAL_WORLD_SIZE='{text}'"):
        launched_processes(tiny())


def test_a_plan_is_for_the_ranks_that_the_file_names(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, 4)
    assert planned_processes(tiny()) == 4
    assert planned_processes(tiny("launch.nproc=2")) == 2
    assert planned_processes(tiny("layout.dp_replicate=8", "layout.dp_shard=8")) == 64
    assert planned_processes(tiny("layout.dp_replicate=8", "layout.dp_shard=8", "launch.nproc=8")) == 64
    assert planned_processes(tiny("layout.dp_shard=3", "launch.nproc=2")) == 2  # which is refused, as by train


SLURM = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")


def test_a_batch_script_is_one_process_and_a_step_is_many(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SLURM:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert not distributed_environment()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    assert distributed_environment()
    with pytest.raises(ConfigError, match="SLURM_STEP_NODELIST is not set"):
        adopt_slurm()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("localhost", "localhost"),
        ("gpu17,gpu18", "gpu17"),
        ("gpu[017-020,031],login1", "gpu017"),
        ("node[9]", "node9"),
        ("rack2-[3-4]", "rack2-3"),
        ("a-1-[07,09]-ib", "a-1-07-ib"),
    ],
)
def test_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert _first_host(nodes) == first

"""Started by torchrun, by Slurm, and as a command of its own: real processes."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.train.config import load_config
from meshwright.train.start import worker
from meshwright.train.start.worker import MARK
from tests.cli.conftest import Command, Outcome
from tests.cli.failing import MESSAGE, fail
from tests.train.runs import checkpoints, losses, train

ROOT = Path(__file__).parents[2]
PYTHON = [sys.executable, "-m"]
TORCHRUN = [*PYTHON, "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> list[float]:
    """The losses of the run on two ranks."""
    from tests.train.runs import tiny_run

    return train(tiny_run(tmp_path_factory.mktemp("expected"), corpus), 2)


def run(command: list[str]) -> tuple[int, str, str]:
    environment = {**ENVIRONMENT, "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}
    found = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    return found.returncode, found.stdout, found.stderr


@pytest.mark.command
def test_the_package_is_the_command() -> None:
    code, out, error = run([sys.executable, "-m", "meshwright", "plan", "no-such-file.yaml"])
    assert (code, out) == (2, "")
    assert error.startswith("error: no-such-file.yaml")


@pytest.mark.sampled(1)
@pytest.mark.command
def test_own_launcher(config: str, expected: list[float]) -> None:
    """The console script: a plan, a line a step, an export, a sample; nothing on stderr."""
    command = [str(Path(sys.executable).with_name("meshwright")), "train", config, "--nproc", "2", "export=true"]
    code, out, error = run([*command, "sample.prompts=['abc']"])
    assert (code, error) == (0, "")
    output = load_config(config).output
    assert losses(load_config(config)) == expected
    lines = out.splitlines()
    assert "Plan: LlamaForCausalLM, 2 ranks (dp_shard=2)" in lines[0]
    assert sum(line.startswith("step ") for line in lines) == 6
    assert lines[-2] == f"exported {output}/export"
    assert lines[-1].startswith("abc")


@pytest.mark.thorough
@pytest.mark.command
def test_torchrun(config: str, expected: list[float]) -> None:
    code, out, error = run([*TORCHRUN, "meshwright.cli.main", "train", config])
    assert code == 0, error
    assert out.count("Plan: ") == 1
    assert out.count("step 6/6") == 1
    assert losses(load_config(config)) == expected


@pytest.mark.thorough
@pytest.mark.command
def test_torchrun_with_a_failing_rank(config: str) -> None:
    begun = time.monotonic()
    code, _, error = run([*TORCHRUN, "tests.cli.failing", "raise", "1", "train", config, "checkpoint.every=1"])
    assert code != 0
    assert time.monotonic() - begun < 40
    assert f"error: rank 1: ValueError: {MESSAGE}" in error
    assert "in train_step" not in error  # no traceback of ours; torchrun's own report follows
    assert checkpoints(load_config(config)) == ["step-00000001"]


# -- ranks that something else started: its variables, in forks -------------------------------------------------------------


def free_port() -> int:
    """One of those that a Slurm job may get."""
    for port in random.sample(range(20000, 40000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise AssertionError("no port is free")


def torchrun(port: int, rank: int) -> dict[str, object]:
    return {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": port}


def slurm(port: int, rank: int) -> dict[str, object]:
    """The port is made of the number of the job."""
    return {
        "SLURM_STEP_NUM_TASKS": 2,
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
        "SLURM_JOB_ID": 3_000_000 + port - 20000,
        "SLURM_STEP_NODELIST": "localhost",
    }


Variables = Callable[[int, int], dict[str, object]]
both = pytest.mark.parametrize("variables", [torchrun, slurm])


def two_ranks(start: Callable[..., Command], variables: Variables, *arguments: object, **keywords: object) -> list[Outcome]:
    port = free_port()
    ranks = [start("train", *arguments, environment=variables(port, rank), **keywords) for rank in range(2)]
    return [rank.end() for rank in ranks]


@pytest.mark.thorough
@both
def test_ranks_of_others(start: Callable[..., Command], config: str, expected: list[float], variables: Variables) -> None:
    first, second = two_ranks(start, variables, config)
    assert (first.code, second.code) == (0, 0), (first, second)
    assert first.out.count("Plan: ") == 1
    assert first.out.count("step 6/6") == 1
    assert second.out == first.error == second.error == ""
    assert losses(load_config(config)) == expected


@both
def test_a_directory_that_machines_do_not_share_is_named(
    start: Callable[..., Command], config: str, tmp_path: Path, variables: Variables
) -> None:
    """Each rank has a home of its own, and in the second one an earlier run of that name."""
    port, homes = free_port(), [tmp_path / "home-0", tmp_path / "home-1"]
    (homes[1] / "run").mkdir(parents=True)
    (homes[1] / "run" / MARK).write_text("of another run")

    def quick() -> None:
        worker.SECONDS_BETWEEN = 0.01

    ranks = [
        start("train", config, "output=~/run", environment={**variables(port, rank), "HOME": homes[rank]}, before=quick)
        for rank in range(2)
    ]
    first, second = [rank.end() for rank in ranks]
    assert (first.code, second.code) == (2, 2), (first, second)
    assert first.error.startswith("error: output='~/run': rank 1 on ")
    assert f"cannot see what rank 0 on {socket.gethostname()} wrote to {homes[0]}/run" in first.error
    assert first.error.count("\n") == 1
    assert second.error == ""
    assert not (homes[0] / "run" / MARK).exists()


def test_the_number_in_the_file_does_not_stop_another_launcher(start: Callable[..., Command], config: str) -> None:
    first, second = two_ranks(start, torchrun, config, "launch.nproc=5", "training.steps=1")
    assert (first.code, second.code) == (0, 0), (first, second)
    assert "2 ranks (dp_shard=2)" in first.out


@both
def test_a_failing_rank_of_others(start: Callable[..., Command], config: str, variables: Variables) -> None:
    """Each says what it knows, and ends."""
    first, second = two_ranks(start, variables, config, before=fail("raise", 1))
    assert second.error == f"error: rank 1: ValueError: {MESSAGE} [worker.exception]\n"
    assert first.error.startswith("error: rank 0: ")
    assert first.code == second.code == 1
    assert max(first.seconds, second.seconds) < 30


@pytest.mark.sampled(1)
@both
@pytest.mark.parametrize(
    ("overrides", "code", "messages", "part"),
    [
        (("layout.dp_replicate=3",), 2, 2, "2 ranks cannot be divided by dp_replicate=3"),
        (("optimizer.lr=1e20", "training.clip_norm=null"), 3, 1, "step 2: loss nan"),
        (("data.long_documents=error",), 2, 1, "64 of 80 rows are longer than data.sequence_length=32"),
    ],
    ids=["layout", "loss", "data"],
)
def test_what_concerns_all_is_said_once(
    start: Callable[..., Command],
    config: str,
    variables: Variables,
    overrides: tuple[str, ...],
    code: int,
    messages: int,
    part: str,
) -> None:
    first, second = two_ranks(start, variables, config, *overrides)
    assert (first.code, second.code) == (code, code)
    assert first.error.count("error: ") == messages
    assert part in first.error
    assert second.error == ""
    assert second.seconds > first.seconds  # or a launcher would stop the first before it has spoken

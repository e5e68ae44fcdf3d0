"""A rank that fails while the other waits in a collective: the job ends soon, and says which rank and why."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.train.config import load_config
from tests.cli.conftest import Outcome, all_gone
from tests.cli.failing import MESSAGE, fail, in_the_schedule
from tests.train.runs import checkpoints, losses

Meshwright = Callable[..., Outcome]
WISH = "the run ends after this step or the next, with a checkpoint; a second signal ends it now"


def check(found: Outcome, code: int, *parts: str) -> None:
    assert found.code == code, found
    assert found.seconds < 30
    assert "Traceback" not in found.error + found.out
    assert found.error.count("error: ") == 1, found.error
    assert found.error.startswith("error: "), found.error
    for part in parts:
        assert part in found.error


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("how", "rank", "code", "parts"),
    [
        ("raise", 1, 1, (f"rank 1: ValueError: {MESSAGE}",)),
        ("raise", 0, 1, (f"rank 0: ValueError: {MESSAGE}",)),
        ("raise ours", 1, 2, (f"rank 1: {MESSAGE}",)),
        ("kill", 1, 1, ("rank 1 ended with SIGKILL", "memory runs out")),
        ("exit", 1, 1, ("rank 1 ended with exit code 7",)),
    ],
)
def test_a_rank_fails(meshwright: Meshwright, config: str, how: str, rank: int, code: int, parts: tuple[str, ...]) -> None:
    found = meshwright("train", config, "--nproc", 2, "checkpoint.every=1", before=fail(how, rank))
    check(found, code, *parts)
    run = load_config(config)
    assert len(losses(run)) == 1
    assert checkpoints(run) == ["step-00000001"]
    # The run goes on from there.
    again = meshwright("train", config, "--nproc", 2)
    assert again.code == 0, again
    assert "resumed from" in again.out
    assert len(losses(run)) == 6


@pytest.mark.thorough
def test_a_rank_that_crashes_in_native_code(meshwright: Meshwright, config: str) -> None:
    """Its last stack is shown: it may never come back."""
    found = meshwright("train", config, "--nproc", 2, before=fail("abort", 1))
    assert found.code == 1
    assert found.error.startswith("Fatal Python error: Aborted")
    assert found.error.splitlines()[-1] == "error: rank 1 ended with SIGABRT [worker.ended]"


@pytest.mark.thorough
def test_debug_shows_the_traceback(meshwright: Meshwright, config: str) -> None:
    found = meshwright("train", config, "--nproc", 2, "--debug", before=fail("raise", 1))
    assert found.code == 1
    assert "in train_step" in found.error
    assert f"error: rank 1: ValueError: {MESSAGE}" in found.error


def test_a_rank_that_hangs(meshwright: Meshwright, config: str) -> None:
    """The others give up after launch.timeout_minutes."""
    found = meshwright("train", config, "--nproc", 2, "launch.timeout_minutes=0.05", before=fail("sleep", 1))
    check(found, 1, "rank 0: ", "imed out")


STAGES = ("layout.pp=2", "layout.dp_shard=1", "training.microbatch_size=2", "data.packing=pad", "--nproc", 2)


def test_a_rank_is_killed_in_the_middle_of_a_schedule(meshwright: Meshwright, config: str) -> None:
    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    found = meshwright("train", config, *STAGES, "checkpoint.every=1", before=in_the_schedule(1, kill))
    check(found, 1, "rank 1 ended with SIGKILL")
    assert checkpoints(load_config(config)) == ["step-00000001"]


def test_a_hang_names_the_stage_and_the_microbatch(meshwright: Meshwright, config: str) -> None:
    wait = ("launch.hang_report_seconds=2", "launch.timeout_minutes=0.15")
    found = meshwright("train", config, *STAGES, *wait, before=in_the_schedule(1, lambda: time.sleep(60)))
    assert found.code == 1
    assert found.seconds < 40
    assert "no progress for 2 s in step 2" in found.error, found.error
    lines = found.error.splitlines()
    assert any(line.startswith("rank 0 ") and "(step 2, stage 0, " in line for line in lines), found.error
    assert any(line.startswith("rank 1 ") and line.endswith("(step 2, stage 1, forward of microbatch 2)") for line in lines)


def test_one_process(meshwright: Meshwright, config: str) -> None:
    check(meshwright("train", config, before=fail("raise", 0)), 1, f"ValueError: {MESSAGE}", "--debug for the traceback")
    check(meshwright("train", config, before=fail("raise ours", 0)), 2, MESSAGE)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("signal", "code", "message"),
    [
        (
            "interrupt",
            130,
            f"SIGINT: {WISH}\nSIGINT a second time: ended in the middle of a step; the run has no checkpoint\n",
        ),
        ("terminate", 1, f"SIGTERM: {WISH}\nerror: ended by SIGTERM [worker.ended]\n"),
        ("kill", -9, ""),
    ],
)
def test_signals_to_the_launcher(meshwright: Meshwright, config: str, signal: str, code: int, message: str) -> None:
    """Control-C and what a scheduler sends, twice, in a step that hangs, and no chance to do anything: the workers end too."""
    found = meshwright("train", config, "--nproc", 2, before=fail(f"{signal} the launcher", 1))
    assert (found.code, found.error) == (code, message)
    assert found.seconds < 30
    all_gone(found)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_nan_stops_with_the_step_and_the_batch(meshwright: Meshwright, config: str, ranks: int) -> None:
    """A learning rate that no model survives."""
    wild = ("optimizer.lr=1e20", "training.clip_norm=null", "checkpoint.every=1", "schedule.kind=constant")
    found = meshwright("train", config, *wild, "--nproc", ranks)
    run = load_config(config)
    folder = Path(run.output, "nonfinite-step-2")
    check(found, 3, "step 2: loss nan", "sequences 8 to 15", str(folder), "training.on_nonfinite=skip")
    assert sorted(path.name for path in folder.iterdir()) == [f"batch-rank-{rank}.safetensors" for rank in range(ranks)]
    assert checkpoints(run) == ["step-00000001"]


def test_nan_is_skipped(meshwright: Meshwright, config: str) -> None:
    wild = ("optimizer.lr=1e20", "training.clip_norm=null", "training.on_nonfinite=skip")
    found = meshwright("train", config, *wild, "--nproc", 2)
    assert found.code == 0, found
    assert found.error == ""
    assert "step skipped (training.on_nonfinite=skip)" in found.out
    assert losses(load_config(config))[2:] == [None] * 4

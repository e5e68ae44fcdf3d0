"""What all ranks do after a step: decided by one, known to all before it is due."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.train.config import RunConfig
from meshwright.train.start.ending import Agreement, SignalThread
from tests.harness import run_ranks
from tests.train.runs import checkpoints, train


def _steps(rank: int, asker: int | None, minutes: float | None, launched: bool = False) -> list[tuple[int, bool, str]]:
    """Ten steps that end together, as those of a run do, of ranks that begin them at different times.

    `launched`: as on an accelerator, the host goes on without the other ranks; that of rank 0 is slow.
    """
    agreement, found = Agreement(minutes), []
    draw = random.Random(rank)
    for step in range(1, 11):
        time.sleep(draw.uniform(0, 0.01))
        if rank == asker and step == 4:
            agreement.ask_to_end("SIGTERM")
        if not launched:
            dist.all_reduce(torch.zeros(1))
        elif rank == 0:
            time.sleep(0.02)
        verdict = agreement.after(step)
        if verdict.save or verdict.end:
            found.append((step, verdict.save, verdict.end))
            agreement.saved()
        if verdict.end:
            break
    return found


def test_all_ranks_end_after_the_same_step() -> None:
    for asker in (0, 2):
        outcomes = run_ranks(_steps, 3, asker, None)
        assert outcomes[0] == outcomes[1] == outcomes[2]
        ((step, _, end),) = outcomes[0]
        assert (step in (5, 6), end) == (True, "SIGTERM")


def test_all_ranks_end_after_the_same_step_where_hosts_run_ahead() -> None:
    for asker in (0, 2):
        outcomes = run_ranks(_steps, 3, asker, None, True)
        assert outcomes[0] == outcomes[1] == outcomes[2]
        ((step, _, end),) = outcomes[0]
        assert (step in (4, 5, 6), end) == (True, "SIGTERM")


def test_all_ranks_save_after_the_same_steps_by_the_clock_of_one() -> None:
    outcomes = run_ranks(_steps, 3, None, 0.02 / 60)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert 1 <= len(outcomes[0]) < 9
    assert all(save and not end for _, save, end in outcomes[0])
    assert run_ranks(_steps, 3, None, None) == [[], [], []]


@pytest.mark.thorough
def test_a_checkpoint_by_the_clock(tiny: Callable[..., RunConfig]) -> None:
    """From the second step on: the clock is looked at after the first."""
    config = tiny("checkpoint.every_minutes=1e-6", "checkpoint.keep=null")
    train(config, 2)
    assert checkpoints(config) == [f"step-0000000{step}" for step in range(2, 7)]
    config = tiny("checkpoint.keep=null", name="half an hour")
    train(config, 2)
    assert checkpoints(config) == ["step-00000006"]


def _attended(rank: int, file: Path) -> tuple[list[str], str]:
    asked: list[str] = []
    with SignalThread((signal.SIGUSR1,), asked.append):
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)  # at once: the same one, by another way
        time.sleep(0.3)
    by_file: list[str] = []
    with SignalThread((signal.SIGUSR1,), by_file.append, file):
        file.write_text("SIGTERM")
        time.sleep(1)
    return asked, by_file[0]


def test_a_wish_is_passed_on_once_whichever_way_it_comes(tmp_path: Path) -> None:
    assert run_ranks(_attended, 1, tmp_path / "asked", group=False) == [(["SIGUSR1"], "SIGTERM")]

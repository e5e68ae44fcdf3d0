"""A rank that does not come: the report names it, and where the others wait. It ends nothing."""

import os
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from meshwright.train.config import load_config
from tests.cli.conftest import Outcome
from tests.cli.failing import fail
from tests.train.runs import losses

Meshwright = Callable[..., Outcome]
REPORT = ("--nproc", 2, "launch.hang_report_seconds=2")


def stopped() -> None:
    """This process stands still, its threads too, and goes on when the report was made."""
    subprocess.Popen(["sh", "-c", f"sleep 14; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def asleep() -> None:
    time.sleep(14)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "verdict", "where"),
    [
        (stopped, "rank 1 did not answer", "rank 1 does not answer: it is stopped, or its machine cannot be reached"),
        (asleep, "rank 1 never entered ", "test_hang.py:"),
    ],
)
def test_a_rank_that_comes_late(meshwright: Meshwright, config: str, how: Callable[[], None], verdict: str, where: str) -> None:
    found = meshwright("train", config, *REPORT, before=_in_the_second_step(1, how))
    assert found.code == 0, found
    assert len(losses(load_config(config))) == 6
    first, *lines = found.error.splitlines()
    assert first.startswith("no progress for 2 s in step 2: "), found.error
    assert verdict in first
    assert [line for line in lines if line.startswith("rank 0 waits in all")], found.error
    assert [line for line in lines if line.startswith("rank 1 ") and where in line], found.error
    assert lines[-1] == "the run goes on if the ranks do (this report: launch.hang_report_seconds)"


@pytest.mark.thorough
def test_the_error_that_ends_it_names_the_rank_that_did_not_come(meshwright: Meshwright, config: str) -> None:
    found = meshwright("train", config, *REPORT, "launch.timeout_minutes=0.25", before=fail("sleep", 1))
    assert found.code == 1
    last = found.error.splitlines()[-1]
    assert last.startswith("error: rank 0: no progress for 2 s in step 2: rank 1 never entered "), found.error
    assert "launch.timeout_minutes=0.25 ended it" in last


@pytest.mark.thorough
def test_no_report_of_a_run_that_goes_on(meshwright: Meshwright, config: str) -> None:
    """Both ranks compute for longer than the report waits, or one does while the other waits for it, a little at a time."""
    found = meshwright("train", config, "--nproc", 2, "launch.hang_report_seconds=1.5", before=_slow)
    assert (found.code, found.error) == (0, ""), found


def _in_the_second_step(rank: int, do: Callable[[], None]) -> Callable[[], None]:
    def patch() -> None:
        from meshwright.train.trainer import Trainer

        plain = Trainer.train_step

        def train_step(self: Trainer) -> None:
            if self.step == 1 and self.rank == rank:
                do()
            plain(self)

        Trainer.train_step = train_step

    return patch


def _slow() -> None:
    from meshwright.train.trainer import Trainer

    plain = Trainer.train_step

    def train_step(self: Trainer) -> None:
        end = time.monotonic() + (4 if self.step == 1 else 0.5)
        while time.monotonic() < end:
            sum(range(1000))
        plain(self)

    Trainer.train_step = train_step

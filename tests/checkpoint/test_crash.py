"""Killed or failing in the middle of a save: what was saved before stays, and the run goes on from it."""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint import manager
from meshwright.checkpoint.directory import latest
from meshwright.checkpoint.manager import CheckpointManager
from meshwright.errors import CheckpointError
from meshwright.train.config import RunConfig
from meshwright.train.start.prepare import prepare_run
from meshwright.train.start.run_files import Paths
from tests.harness import RankError, run_ranks
from tests.train.runs import checkpoints, losses, rows, tiny_run, train, trainer_on_rank

Tiny = Callable[..., RunConfig]
OVERRIDES = ("checkpoint.every=3", "checkpoint.keep=1")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> list[float]:
    return train(tiny_run(tmp_path_factory.mktemp("whole"), corpus, *OVERRIDES), 2)


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _on_call(number: int, function: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, but its ``number``-th call, counted from 1, does something else."""
    calls = 0

    def counted(*args: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        return instead(*args, **keywords) if calls == number else function(*args, **keywords)

    return counted


def _half_of_the_tensors() -> None:
    """DCP writes each tensor with torch.save: all of the first checkpoint, and some of the second."""
    plain, saves = torch.save, CheckpointManager.save

    def save(self: CheckpointManager, step: int, *args: Any) -> Path:
        if step == 6:
            torch.save = _on_call(9, plain, _die)
        return saves(self, step, *args)

    CheckpointManager.save = save


def _before_the_table_of_contents() -> None:
    CheckpointManager._commit = _on_call(2, CheckpointManager._commit, _die)


def _before_the_rename() -> None:
    """Rank 0 has written meta.json and dies; its peer waits for it."""
    Path.rename = _on_call(_renames_before(), Path.rename, _die)


def _renames_before() -> int:
    # DCP renames its own .metadata, then a checkpoint is renamed: twice for each of two checkpoints.
    return 4


def _while_the_old_one_is_removed() -> None:
    """The new checkpoint is complete; the old one is half gone."""

    def half(path: Path, **_: Any) -> None:
        (path / ".metadata").unlink()
        _die()

    manager.shutil.rmtree = _on_call(1, manager.shutil.rmtree, half)


KILLS = {
    function.__name__.strip("_"): function
    for function in (
        _half_of_the_tensors, _before_the_table_of_contents, _before_the_rename, _while_the_old_one_is_removed
    )
}  # fmt: skip


def _train_and_die(rank: int, config: RunConfig, store: Path, kill: str) -> None:
    KILLS[kill]()
    trainer_on_rank(config, store).run()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["waiting", "in the background"])
@pytest.mark.parametrize("kill", KILLS)
def test_killed_during_a_save(tiny: Tiny, uninterrupted: list[float], kill: str, asynchronous: bool) -> None:
    config = tiny(*OVERRIDES, f"checkpoint.asynchronous={asynchronous}")
    _, _, store = prepare_run(config, 2)
    with pytest.raises(RankError, match=f"exit code -{signal.SIGKILL.value}"):
        run_ranks(_train_and_die, 2, config, store.directory, kill)
    paths = Paths(config.directory)
    last = latest(paths.checkpoints)
    left = checkpoints(config)
    if kill == "while_the_old_one_is_removed":
        assert left == ["step-00000003.old.tmp", "step-00000006"]
    else:
        assert left == ["step-00000003", "step-00000006.tmp"]
        assert (paths.checkpoints / left[1] / "meta.json").exists() == (kill == "before_the_rename")
    assert last is not None
    assert [row["step"] for row in rows(config) if "loss" in row] == [1, 2, 3, 4, 5, 6]

    assert train(config, 2) == uninterrupted
    assert checkpoints(config) == ["step-00000006"]
    assert [row["step"] for row in rows(config) if "loss" in row] == [1, 2, 3, 4, 5, 6]


def _no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _fill_the_disk(rank: int, config: RunConfig, store: Path) -> str:
    trainer = trainer_on_rank(config, store)
    saves = CheckpointManager.save

    def save(self: CheckpointManager, step: int, *args: Any) -> Path:
        if step == 6 and rank == 1:
            torch.save = _no_space
        return saves(self, step, *args)

    CheckpointManager.save = save
    try:
        trainer.run()
    except CheckpointError as error:
        return str(error)
    return "no error"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["waiting", "in the background"])
def test_disk_full_in_the_middle_of_a_save(tiny: Tiny, asynchronous: bool) -> None:
    """One rank cannot write: all ranks stop with its reason, and the checkpoint before stays."""
    config = tiny(*OVERRIDES, f"checkpoint.asynchronous={asynchronous}")
    _, _, store = prepare_run(config, 2)
    messages = run_ranks(_fill_the_disk, 2, config, store.directory)
    for message in messages:
        assert "step-00000006.tmp: not written: " in message
        assert "No space left on device" in message
        assert "Traceback" not in message
    assert checkpoints(config) == ["step-00000003", "step-00000006.tmp"]
    assert len(losses(config)) == 6

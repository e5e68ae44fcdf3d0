"""`plan`, `audit` and `train --audit`: whether a layout is proven, as commands say it and act on it."""

import json
import os
import shlex
import signal
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from meshwright.train.config import load_config
from meshwright.train.proofs import records as proof
from meshwright.train.proofs import report_or_audit as audits
from tests.audit import plants
from tests.cli.conftest import Command
from tests.cli.test_audit import plant
from tests.cli.test_launchers import TORCHRUN, Variables, both, free_port, run, torchrun, two_ranks
from tests.train.runs import checkpoints

TODAY = f"{datetime.now():%Y-%m-%d}"
PROVEN = (
    f"proven: LlamaForCausalLM on dp_shard, by your audit of {TODAY} (float64, 3 steps, dp_shard=2, the worst gradient off by "
)
SMALL = ("training.steps=1", "data.eval_fraction=0")


@pytest.fixture(autouse=True)
def no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks inherit it: nothing is proven but by an audit."""
    monkeypatch.setattr(proof, "shipped_matrix", lambda: {"versions": {}, "date": "", "cells": []})


def unwrapped(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]


@pytest.mark.thorough
def test_the_line_gives_the_command_and_its_audit_changes_the_line(meshwright, config: str, records: Path) -> None:
    first = meshwright("plan", config, "-n", 2, *SMALL)
    (line,) = [line for line in unwrapped(first.out) if line.startswith("unproven: ")]
    command = shlex.split(line.partition("prove it: ")[2])
    assert command == ["meshwright", "audit", config, *SMALL, "--nproc", "2"]
    audit = meshwright(*command[1:])
    assert audit.code == 0, audit.error
    (file,) = records.iterdir()
    kept = json.loads(file.read_text())
    assert kept["passed"] is True
    assert kept["verdict"] == audit.out.splitlines()[-1]
    assert kept["claim"]["axes"] == ["dp_shard"]
    for world_size in (2, 4):  # with two microbatches, and with one
        second = meshwright("plan", config, "-n", world_size, *SMALL, "model.config.hidden_size=64")
        assert any(line.startswith(PROVEN) for line in unwrapped(second.out)), second.out
    assert "unproven: " in meshwright("plan", config, "-n", 2, *SMALL, "layout.tp=2").out
    assert "one process: nothing to prove" in meshwright("plan", config, "-n", 1).out
    assert "prove" not in meshwright("plan", config, "-n", 2, "--json").out


@pytest.mark.thorough
def test_training_starts_after_an_audit_that_passes_and_at_once_where_it_is_on_record(meshwright, config: str) -> None:
    first = meshwright("train", config, "--nproc", 2, "--audit", *SMALL)
    assert first.code == 0, first.error
    lines = unwrapped(first.out)
    order = ["unproven: ", "the layout is audited first (--audit)", "PASS: LlamaForCausalLM", "step 1/1"]
    found = [next(index for index, line in enumerate(lines) if line.startswith(words)) for words in order]
    assert found == sorted(found)
    second = meshwright("train", config, "--nproc", 2, "--audit", *SMALL, f"output={config}.again")
    assert second.code == 0, second.error
    assert any(line.startswith(PROVEN) for line in unwrapped(second.out))
    assert "PASS: " not in second.out
    assert "step 1/1" in second.out


@pytest.mark.thorough
def test_training_does_not_start_after_an_audit_that_fails(meshwright, config: str, records: Path) -> None:
    refused = meshwright("train", config, "--nproc", 2, "--audit", *SMALL, before=plant(plants.divided_twice))
    assert refused.code == 1
    assert "FAIL: the gradient of all 9 parameters of unit model.layers.1 is 0.5 times that" in refused.out
    assert refused.error == (
        "error: the layout does not compute what one process does; training is not started (--audit) [audit.failed]\n"
    )
    assert "step 1/1" not in refused.out
    assert not (Path(load_config(config).output) / "checkpoints").exists()
    # Without --audit the run starts, and the verdict on record is not to be overlooked.
    started = meshwright("train", config, "--nproc", 2, *SMALL)
    assert started.code == 0, started.error
    words = f"FAIL: your audit of {TODAY} (float64, 3 steps, dp_shard=2) found LlamaForCausalLM on dp_shard wrong: the gradient"
    assert any(line.startswith(words) for line in unwrapped(started.out))
    assert "step 1/1" in started.out
    assert len(list(records.iterdir())) == 1
    # The bug is gone; with --audit it is tried again.
    mended = meshwright("train", config, "--nproc", 2, "--audit", *SMALL, f"output={config}.again")
    assert mended.code == 0, mended.error
    assert "PASS: " in mended.out


def test_a_damaged_record_stops_nothing(meshwright, config: str, records: Path) -> None:
    assert meshwright("audit", config, "--nproc", 2, *SMALL, "--steps", 1).code == 0
    (file,) = records.iterdir()
    file.write_text("{")
    outcome = meshwright("plan", config, "-n", 2, *SMALL)
    assert outcome.code == 0, outcome.error
    assert f"a recorded audit is ignored: {file}: JSONDecodeError" in outcome.out
    assert "unproven: " in outcome.out


def test_a_cache_that_cannot_be_written_stops_no_audit(meshwright, config: str, records: Path) -> None:
    records.parent.parent.mkdir(exist_ok=True)
    records.parent.write_text("a file where a directory should be")
    outcome = meshwright("audit", config, "--nproc", 2, *SMALL, "--steps", 1)
    assert outcome.code == 0, outcome.error
    assert "the verdict of the audit could not be recorded: " in outcome.out
    assert outcome.out.splitlines()[-1].startswith("PASS: ")


# -- ranks of another launcher ------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@both
def test_rank_0_audits_for_all_ranks_of_others(start: Callable[..., Command], config: str, variables: Variables) -> None:
    first, second = two_ranks(start, variables, config, "--audit", *SMALL)
    assert (first.code, second.code) == (0, 0), (first, second)
    assert first.out.count("PASS: LlamaForCausalLM, 2 ranks (dp_shard=2), float64") == 1
    assert first.out.count("step 1/1") == 1
    assert any(line.startswith(PROVEN) for line in unwrapped(first.out))
    assert second.out == first.error == second.error == ""
    assert checkpoints(load_config(config)) == ["step-00000001"]


@pytest.mark.thorough
def test_an_audit_that_fails_ends_all_ranks_of_others(start: Callable[..., Command], config: str) -> None:
    arguments = (config, "--audit", *SMALL)
    first, second = two_ranks(start, torchrun, *arguments, before=plant(plants.divided_twice))
    assert (first.code, second.code) == (1, 1), (first, second)
    assert "FAIL: the gradient of all 9 parameters of unit model.layers.1 is 0.5 times that" in first.out
    assert first.error.startswith("error: the layout does not compute what one process does")
    assert second.error == second.out == ""
    assert max(first.seconds, second.seconds) < 50


def test_a_configuration_that_is_refused_ends_all_ranks_of_others(start: Callable[..., Command], config: str) -> None:
    first, second = two_ranks(start, torchrun, config, "--audit", "layout.dp_replicate=3")
    assert (first.code, second.code) == (2, 2)
    assert "ranks cannot be divided by dp_replicate=3" in first.error
    assert second.error == ""


def dies() -> None:
    """The audit's process is killed, as by the system where memory runs out."""

    def killed(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    audits.report_or_audit = killed  # type: ignore[assignment]


def test_an_audit_that_is_killed_ends_all_ranks_of_others(start: Callable[..., Command], config: str) -> None:
    first, second = two_ranks(start, torchrun, config, "--audit", before=dies)
    assert (first.code, second.code) == (1, 1)
    assert first.error == "error: the audit of the layout ended with SIGKILL [worker.ended]\n"
    assert second.error == ""


def is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.thorough
def test_ranks_whose_rank_0_dies_end(start: Callable[..., Command], config: str) -> None:
    """With it goes the store that they wait at, and its audit."""

    def sleeps() -> None:
        audits.report_or_audit = lambda *_: time.sleep(60)  # type: ignore[assignment]

    port = free_port()
    first, second = (start("train", config, "--audit", environment=torchrun(port, rank), before=sleeps) for rank in range(2))
    time.sleep(4)
    os.kill(first.process, signal.SIGKILL)
    ended = second.end()
    assert ended.code == 1
    assert ended.error.strip().splitlines()[-1].startswith("error: rank 1: rank 0 ended while it audited the layout: ")
    assert first.end().code == -signal.SIGKILL
    end = time.monotonic() + 10
    while (alive := is_alive(first.process)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not alive  # its audit ends with it


@pytest.mark.thorough
@pytest.mark.command
def test_torchrun_audits_once(config: str) -> None:
    # A layout that the matrix of the package does not have: the prefetching is set.
    code, out, error = run(
        [*TORCHRUN, "meshwright.cli.main", "train", config, "--audit", *SMALL, "parallel.prefetch_forward=1"]
    )
    assert code == 0, error
    assert out.count("PASS: LlamaForCausalLM, 2 ranks (dp_shard=2), float64") == 1
    assert out.count("step 1/1") == 1

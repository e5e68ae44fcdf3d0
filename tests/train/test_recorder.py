"""The line in the terminal, on a terminal and without one; and the sinks that are extras, where they are installed."""

import io

import pytest
from rich.console import Console

from meshwright.train.metrics import Recorder

STEP = {
    "loss": 2.5, "tokens_per_second": 1234.0, "step_seconds": 0.5, "gradient_norm": 0.25, "memory_bytes": 3 * 2**20,
    "learning_rate": 0.1, "tokens": 100, "epoch": 0, "skipped": 0,
}  # fmt: skip


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_line(tiny, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    config = tiny("metrics.jsonl=false")
    shown = io.StringIO()
    monkeypatch.setattr("meshwright.train.metrics.console", lambda **_: Console(file=shown, force_terminal=terminal, width=160))
    config.directory.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(config, speaks=True)
    for step in (1, 2, 3):
        recorder.step(step, STEP)
    recorder.event(3, {"eval/loss": 2.0}, "held-out loss")
    recorder.close()
    text = shown.getvalue()
    for part in ("step 3/6", "loss 2.5000", "1,234 tokens/s", "500 ms", "norm 0.250", "mem 3.0 MiB", "held-out loss"):
        assert part in text
    assert ("\x1b[" in text) is terminal  # a live line is redrawn; a log is not
    if not terminal:
        assert "left 0:01" in text


def left(tiny, capsys: pytest.CaptureFixture[str], seconds: list[float], name: str) -> int:
    """The estimate after the last of these steps, in seconds."""
    config = tiny("metrics.jsonl=false", "training.steps=1000", name=name)
    config.directory.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(config, speaks=True)
    for step, took in enumerate(seconds, start=1):
        recorder.step(step, {**STEP, "step_seconds": took})
    minutes, rest = capsys.readouterr().out.split("left ")[-1].split(":")
    return 60 * int(minutes) + int(rest)


def test_the_time_that_is_left_is_not_that_of_one_step(tiny, capsys: pytest.CaptureFixture[str]) -> None:
    steady = left(tiny, capsys, [1.0] * 20, "steady")
    assert steady == 980
    assert left(tiny, capsys, [30.0, *[1.0] * 19], "compiled") == steady  # the first step
    assert left(tiny, capsys, [*[1.0] * 19, 30.0], "waited") == steady
    assert left(tiny, capsys, [0.5, 1.5] * 10, "two kinds") == steady
    assert left(tiny, capsys, [*[4.0] * 20, *[1.0] * 60], "faster from here") == 920


def test_only_rank_0_speaks(tiny, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny()
    recorder = Recorder(config, speaks=False)
    recorder.step(1, STEP)
    recorder.event(1, {"eval/loss": 2.0}, "held-out loss")
    recorder.say("anything")
    recorder.close()
    assert capsys.readouterr().out == ""
    assert not config.directory.exists()


def test_wandb_and_mlflow_where_they_are_installed(tiny, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    pytest.importorskip("wandb", reason="the extra [wandb] is not installed")
    mlflow = pytest.importorskip("mlflow", reason="the extra [mlflow] is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    config = tiny("metrics.wandb=project", "metrics.mlflow=experiment")
    config.directory.mkdir(parents=True, exist_ok=True)
    for resumed in (0, 2):
        recorder = Recorder(config, speaks=True, resumed_step=resumed)
        recorder.step(resumed + 1, STEP)
        recorder.close()
    found = mlflow.search_runs(experiment_names=["experiment"], output_format="list")
    assert {run.data.metrics["loss"] for run in found} == {2.5}
    assert len(list((config.directory / "wandb").glob("offline-run-*"))) == 2
    assert len({path.name.split("-")[-1] for path in (config.directory / "wandb").glob("offline-run-*")}) == 1  # one id

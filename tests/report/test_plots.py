"""Metrics are read as a run writes them, and drawn; what is missing is said."""

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.errors import ConfigError
from meshwright.report.run_metrics import Series, read_metrics

STEPS = range(1, 11)


def run_in(folder: Path, name: str, *lines: dict[str, Any], steps: range = STEPS) -> Path:
    run = folder / name
    run.mkdir()
    trained = [
        {
            "step": step,
            "loss": 5 - step / 10,
            "gradient_norm": 1.0,
            "tokens_per_second": 100.0,
            "memory_bytes": 2**30,
            "tokens": 64,
        }
        for step in steps
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*trained, *lines]))
    return run


def plotted(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plot", *arguments])
    if result.exception:
        raise result.exception
    return result.output


def test_of_a_step_that_repeats_the_last_value_counts(tmp_path: Path) -> None:
    run = run_in(tmp_path, "a", {"step": 4, "loss": 9.0}, {"step": 2, "eval/loss": 3.0}, {"step": 5, "loss": None})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "loss"')  # a line that a crash cut off
    found = read_metrics(run)
    assert found.series["loss"].steps == tuple(STEPS)
    assert found.series["loss"].values[3] == 9.0
    assert found.series["loss"].values[4] == 4.5  # null is no value
    assert found.series["eval/loss"] == Series((2,), (3.0,))
    assert found.unread == 1
    assert read_metrics(run / "metrics.jsonl") == found


def test_tokens_add_up_over_steps_that_have_no_line(tmp_path: Path) -> None:
    run = tmp_path / "a"
    run.mkdir()
    lines = [{"step": 1, "tokens": 10}, {"step": 5, "tokens": 20}, {"step": 10, "tokens": 30}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_metrics(run).tokens_at([0, 1, 3, 5, 10, 12]) == [0, 10, 50, 90, 240, 300]


def test_runs_are_drawn_as_svg_and_png(tmp_path: Path) -> None:
    runs = [str(run_in(tmp_path, "first", {"step": 10, "eval/loss": 4.2})), str(run_in(tmp_path, "second", steps=range(5, 15)))]
    out = tmp_path / "runs.svg"
    assert plotted(*runs, "--out", str(out)) == f"{out}\n"
    text = out.read_text()
    drawing = ElementTree.fromstring(text)
    words = {element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")}
    assert {
        "loss, nats",
        "norm of the gradient",
        "tokens a second",
        "memory, GiB",
        "first",
        "second",
        "first, eval/loss",
    } <= words
    assert "optimizer step" in words
    plotted(*runs, "--out", str(out))
    assert out.read_text() == text  # the same metrics, the same bytes
    plotted(*runs, "--out", str(out), "--by", "tokens")
    assert "tokens" in {
        element.text for element in ElementTree.fromstring(out.read_text()).iter("{http://www.w3.org/2000/svg}text")
    }
    plotted(*runs, "--out", str(tmp_path / "runs.png"))
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")


def test_what_a_run_does_not_have_is_left_out_and_said(tmp_path: Path) -> None:
    run = tmp_path / "few"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    output = plotted(str(run), "--out", str(tmp_path / "few.svg"))
    assert "gradient_norm: not in the metrics of few; left out" in output
    assert "norm of the gradient" not in (tmp_path / "few.svg").read_text()


@pytest.mark.parametrize(
    ("more", "words", "code"),
    [
        (["--out", "x.pdf"], "legal are names that end with .svg or .png", "cli.file"),
        (["--out", "x.svg", "--by", "hours"], "legal are step, tokens", "cli.by"),
        (["absent", "--out", "x.svg"], "absent: metrics.jsonl: No such file", "cli.metrics"),
        (["empty.jsonl", "--out", "x.svg"], "has no line of metrics", "cli.metrics"),
        (["other.jsonl", "--out", "x.svg"], "no run has one of loss, gradient_norm", "cli.metrics"),
        (["loss.jsonl", "--out", "x.svg", "--by", "tokens"], "has no metric `tokens`", "cli.metrics"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], words: str, code: str
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"empty": "no json\n", "other": '{"step": 1, "other": 2}\n', "loss": '{"step": 1, "loss": 2}\n'}
    for name, content in files.items():
        (tmp_path / f"{name}.jsonl").write_text(content)
    with pytest.raises(ConfigError) as raised:
        plotted(*([] if more[0] != "--out" else ["loss.jsonl"]), *more)
    assert words in str(raised.value)
    assert raised.value.codes == (code,)


def test_without_matplotlib_it_is_said_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'meshwright\[plots\]'"):
        plotted(str(run_in(tmp_path, "a")), "--out", str(tmp_path / "a.svg"))

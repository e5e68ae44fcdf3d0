"""A run from Python: the same as by the commands, with objects in place of names, and tables for a notebook."""

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import meshwright as mw
from meshwright.errors import CheckpointError, ConfigError
from meshwright.objectives import given
from tests.harness import refuses
from tests.train.runs import write_config, write_corpus

Batch = dict[str, torch.Tensor]


class Focal(mw.Objective):
    """Less weight for tokens that are likely already."""

    def __init__(self, gamma: float = 2.0) -> None:
        self.gamma = gamma

    def sums(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        log_probs = given.log_probs(model, batch)
        return (-(((1 - log_probs.exp()) ** self.gamma) * log_probs).sum(),)


class Forgetful(Focal):
    def __init__(self, factor: float) -> None:
        super().__init__(factor * 2)


class Counts(HTMLParser):
    """Counts tags, and keeps the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.open, self.words = 0, ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.open += 1

    def handle_endtag(self, tag: str) -> None:
        self.open -= 1

    def handle_data(self, data: str) -> None:
        self.words += f" {data}"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    return write_config(folder, write_corpus(folder / "corpus.jsonl"))


def test_a_run_is_planned_audited_trained_and_read(config: Path) -> None:
    run = mw.Run(config, {"training.steps": 2, "layout": {"tp": 2}}, objective=Focal(1.5))
    view = run.plan(world_size=2, gpu="h100")
    assert view.verdict is not None
    assert view.verdict.fits
    page = Counts(view._repr_html_())
    assert page.open == 0
    assert page.tags["table"] >= 5
    assert "model.layers.*.self_attn.q_proj" in page.words
    assert "fits into NVIDIA H100" in re.sub(r"\s+", " ", page.words)
    assert "Plan: LlamaForCausalLM, 2 ranks (tp=2)" in str(view)
    report = run.audit(2, steps=1)
    assert report.passed
    assert "PASS" in Counts(report._repr_html_()).words
    lines = run.train(nproc=2)
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    model = run.model()
    assert isinstance(model, LlamaForCausalLM)
    kept = json.loads((Path(run.config.output) / "checkpoints" / "step-00000002" / "meta.json").read_text())
    assert kept["config"]["training"]["objective"] == {"use": "tests.test_from_python:Focal", "with": {"gamma": 1.5}}


class Last(mw.Callback):
    """Writes the step that was the last."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_end(self, run: Any) -> None:
        Path(self.path).write_text(str(run.step))


class Numbers(mw.MetricSink):
    """Writes the losses."""

    def __init__(self, path: str) -> None:
        self.path = path

    def open(self, config: Any, step: int) -> None:
        pass

    def write(self, step: int, values: Any) -> None:
        if "loss" in values:
            Path(self.path).write_text(f"{values['loss']}")

    def close(self) -> None:
        pass


def texts() -> list[dict[str, str]]:
    return [{"text": f"row {number} of {number % 7} words, {'more ' * (number % 5)}"} for number in range(60)]


def test_callbacks_sinks_and_rows_are_objects_too(tmp_path: Path) -> None:
    content = mw.Run(write_config(tmp_path, write_corpus(tmp_path / "corpus.jsonl"))).config.model_dump(mode="json")
    content["data"]["files"] = []
    last, numbers = tmp_path / "last", tmp_path / "numbers"
    run = mw.Run(
        content,
        {"training.steps": 2},
        source=texts,
        callbacks=[Last(str(last))],
        sinks=[Numbers(str(numbers))],
    )
    lines = run.train(nproc=1)
    assert last.read_text() == "2"
    assert float(numbers.read_text()) == next(line["loss"] for line in reversed(lines) if "loss" in line)


def test_a_mapping_is_a_configuration_too(config: Path) -> None:
    content = mw.Run(config).config.model_dump(mode="json")
    assert mw.Run(content, ["optimizer.lr=0.5"]).config.optimizer.lr == 0.5


def local() -> Any:
    class Local(Focal):
        pass

    return Local()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Forgetful(1.0), "does not keep its arguments factor as attributes"),
        (local, "has no name that another process can import"),
        (lambda: Focal(torch.ones(2)), "is no plain value"),  # type: ignore[arg-type]
    ],
)
def test_an_object_that_others_cannot_make_is_refused_by_name(config: Path, make: Callable[[], Any], words: str) -> None:
    with refuses(ConfigError, "config.part") as caught:
        mw.Run(config, objective=make())
    assert words in str(caught.value)


def test_a_model_that_was_not_trained_is_refused(tmp_path: Path) -> None:
    run = mw.Run(write_config(tmp_path, write_corpus(tmp_path / "corpus.jsonl")))
    with refuses(CheckpointError, "checkpoint.incomplete"):
        run.model()

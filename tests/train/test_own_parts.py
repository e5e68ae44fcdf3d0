"""Optimizers and schedules of the user: found, checked before anything starts, used, saved and resumed."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.errors import ConfigError, MeshwrightError, PartError
from meshwright.train.config import OptimizerConfig, RunConfig, ScheduleConfig
from meshwright.train.learning_rate import learning_rate
from meshwright.train.metrics import MetricSink, Recorder, make_sinks
from meshwright.train.optimizer import check_parts
from tests.harness import RankError, refuses
from tests.train.runs import tiny_run, train, write_corpus

HERE = "tests.train.test_own_parts:"


def halved(step: int, steps: int, floor: float = 0.0) -> float:
    return max(floor, 0.5 ** (step / steps))


def negative(step: int, steps: int) -> float:
    return -1.0


class NoRate(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


class Counts(torch.optim.SGD):
    """Its state has a number that is no tensor."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["steps"] = 1


class CountsInItsGroups(torch.optim.SGD):
    """It keeps a number where no checkpoint looks, as Prodigy and schedule-free ones do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


class Fails(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise ValueError("of its own")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "words.jsonl")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("use", "arguments"),
    [
        ("torch.optim:SGD", "{momentum: 0.9}"),
        ("torch.optim:Adagrad", "{initial_accumulator_value: 0.1}"),
        ("torch.optim:NAdam", "{}"),
    ],
)
def test_a_run_that_resumes_goes_on_as_one_that_did_not_end(tmp_path: Path, corpus: Path, use: str, arguments: str) -> None:
    sets = (f"optimizer={{use: '{use}', with: {arguments}, lr: 0.05}}", f"schedule.use={HERE}halved", "training.steps=4")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    at_once = train(tiny_run(whole, corpus, *sets, f"output={whole}/out"), 2)
    two = tiny_run(parts, corpus, *sets, "checkpoint.every=2", f"output={parts}/out")
    train(two, 2)
    for later in (Path(two.output) / "checkpoints").glob("*4"):
        later.rename(tmp_path / "gone")
    again = train(two, 2)
    assert again == at_once


def test_the_state_of_another_optimizer_is_not_dropped_in_silence(tmp_path: Path, corpus: Path) -> None:
    train(tiny_run(tmp_path, corpus, "training.steps=2"))
    other = tiny_run(
        tmp_path, corpus, "training.steps=3", "optimizer={use: 'torch.optim:SGD', with: {momentum: 0.9}, lr: 0.01}"
    )
    with pytest.raises(RankError, match="or with another optimizer"):
        train(other)


def test_a_schedule_of_the_user(corpus: Path, tmp_path: Path) -> None:
    schedule = ScheduleConfig(use=f"{HERE}halved", arguments={"floor": 0.9})
    assert learning_rate(0, 10, 2.0, schedule) == 2.0
    assert learning_rate(9, 10, 2.0, schedule) == 1.8


def test_schedules() -> None:
    def rates(steps: int, **keys: Any) -> list[float]:
        return [round(learning_rate(step, steps, 1.0, ScheduleConfig(**keys)), 6) for step in range(steps)]

    assert rates(8, kind="wsd", warmup_steps=2, decay_steps=4, final_ratio=0.2) == [0.5, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]
    assert rates(4, kind="inverse_sqrt", warmup_steps=1, final_ratio=0.6) == [1, 1, round(math.sqrt(0.5), 6), 0.6]
    assert rates(5, kind="polynomial", power=2.0, final_ratio=0) == [1, 0.5625, 0.25, 0.0625, 0]
    assert rates(3, kind="linear", final_ratio=0.5) == [1, 0.75, 0.5]


@pytest.mark.parametrize(
    ("sections", "kind", "code", "words"),
    [
        ({"optimizer": {"use": f"{HERE}NoRate"}}, ConfigError, "part.signature", "takes no lr"),
        ({"optimizer": {"use": f"{HERE}halved"}}, ConfigError, "part.signature", "no class of torch.optim.Optimizer"),
        ({"optimizer": {"use": f"{HERE}Counts"}}, PartError, "part.returned", "steps (int)"),
        ({"optimizer": {"use": f"{HERE}CountsInItsGroups"}}, PartError, "part.returned", "changes k in its param_groups"),
        ({"optimizer": {"use": f"{HERE}Fails"}}, PartError, "part.raised", "of its own"),
        (
            {"optimizer": {"use": "torch.optim:SGD", "with": {"momentun": 1}}},
            ConfigError,
            "config.part.arguments",
            "'momentum'",
        ),
        ({"optimizer": {"use": "torch.optim:Rprop"}}, ConfigError, "config.value", "the legal value is 0"),
        (
            {"optimizer": {"use": "torch.optim:Rprop", "weight_decay": 0, "groups": [{"match": "a", "weight_decay": 0.1}]}},
            ConfigError,
            "config.value",
            "'a': weight_decay=0.1: torch.optim:Rprop takes no weight_decay",
        ),
        ({"schedule": {"use": f"{HERE}negative"}}, PartError, "part.returned", "returned -1.0"),
        ({"schedule": {"use": f"{HERE}nothing"}}, ConfigError, "config.part", "no 'nothing'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    sections: dict[str, Any], kind: type[MeshwrightError], code: str, words: str
) -> None:
    base = {"output": "out", "model": {"config": {"model_type": "llama"}}, "data": {"files": ["none"], "sequence_length": 8}}
    config = RunConfig.model_validate({**base, "training": {"steps": 4, "global_batch_size": 1}, **sections})
    with refuses(kind, code) as caught:
        check_parts(config, 4)
    assert words in str(caught.value)


class Broken(MetricSink):
    """A sink that fails at the second step."""

    def write(self, step: int, values: Any) -> None:
        if step == 2:
            raise OSError("disk of the sink is full")


class NoWrite(MetricSink):
    """It lacks a method."""


def test_a_sink_that_fails_does_not_end_the_run(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_run(tmp_path, corpus, f"metrics.sinks=['{HERE}Broken']", "training.steps=3", "metrics.jsonl=false")
    recorder = Recorder(config, speaks=True)
    for step in (1, 2, 3):
        recorder.event(step, {"eval/loss": 1.0}, "evaluated")
    recorder.close()
    said = capsys.readouterr().out
    assert said.count("evaluated") == 3
    assert "disk of the sink is full" in said
    assert said.count("goes on without") == 1


@pytest.mark.parametrize("name", ["NoWrite", "halved"])
def test_a_sink_that_is_none_is_refused(tmp_path: Path, corpus: Path, name: str) -> None:
    with refuses(ConfigError, "part.signature"):
        make_sinks(tiny_run(tmp_path, corpus, f"metrics.sinks=['{HERE}{name}']"))


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        (OptimizerConfig, {"with": {"momentum": 1}}),
        (OptimizerConfig, {"use": "torch.optim:SGD", "betas": (0.5, 0.6)}),
        (ScheduleConfig, {"use": "my:schedule", "warmup_steps": 3}),
        (ScheduleConfig, {"decay_steps": 3}),
        (ScheduleConfig, {"kind": "cosine", "power": 2.0}),
    ],
)
def test_keys_that_do_not_belong_together(section: type[OptimizerConfig | ScheduleConfig], keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="leave"):
        section.model_validate(keys)

"""The callbacks that Meshwright ships: what each computes, on layouts and after a resume, and what a run exports of it."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshwright.checkpoint import storage
from meshwright.checkpoint.export import MARK, export_checkpoint, generate
from meshwright.errors import CheckpointError, ConfigError
from meshwright.train.config import RunConfig
from meshwright.train.start.prepare import prepare_run
from meshwright.train.start.worker import finish_run
from tests.diffusion_gemma import RUN
from tests.harness import refuses, run_ranks
from tests.train.runs import checkpoints, eval_losses, losses, rows, train, trainer_on_rank
from tests.train.test_pretrained import saved

Tiny = Callable[..., RunConfig]
EACH = ("checkpoint.every=1", "checkpoint.keep=null", "schedule.kind=constant")
LAYOUTS = {
    "shard 2": (2, ()),
    "tp 2": (2, ("layout.dp_shard=1", "layout.tp=2")),
    "cp 2": (2, ("layout.dp_shard=1", "layout.cp=2")),
    "pp 2": (2, ("layout.dp_shard=1", "layout.pp=2")),
    "pp 2 x shard 2": (4, ("layout.pp=2",)),
}


def tensors(config: RunConfig, step: int, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint whose names begin so, by the rest of their names."""
    place = config.directory / "checkpoints" / f"step-{step:08d}"
    found = {name: of for name, of in storage.contents(place).items() if name.startswith(prefix)}
    read = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in found.items()}
    storage.read(place, read)
    return {name.removeprefix(prefix): value for name, value in read.items()}


EMA = "callbacks=[{use: ema, with: {decay: 0.75, evaluate: true, export: true}}]"


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> RunConfig:
    """A run of four steps on two ranks that shard the model."""
    from tests.train.runs import tiny_run

    config = tiny_run(tmp_path_factory.mktemp("ema"), corpus, EMA, *EACH, "training.steps=4")
    train(config, 2)
    return config


def test_the_average_is_that_of_the_parameters_after_each_step(averaged: RunConfig) -> None:
    average = tensors(averaged, 1, "callback.ema.")
    assert average.keys() == tensors(averaged, 1, "model.").keys()
    for step in (2, 3, 4):
        parameters = tensors(averaged, step, "model.")
        average = {name: 0.75 * average[name] + 0.25 * parameters[name] for name in average}
    for name, value in tensors(averaged, 4, "callback.ema.").items():
        torch.testing.assert_close(value, average[name], rtol=1e-6, atol=1e-7)
        assert not torch.equal(value, parameters[name])


@pytest.mark.parametrize(
    "name",
    ["one rank", pytest.param("tp 2", marks=pytest.mark.thorough), pytest.param("pp 2 x shard 2", marks=pytest.mark.thorough)],
)
def test_another_layout_goes_on_with_the_same_average(averaged: RunConfig, tiny: Tiny, name: str) -> None:
    ranks, layout = LAYOUTS.get(name, (1, ()))
    first = averaged.directory / "checkpoints" / "step-00000002"
    config = tiny(EMA, *EACH, *layout, "training.steps=4", f"checkpoint.resume={first}")
    train(config, ranks)
    own = tensors(config, 4, "callback.ema.")
    for name_, value in tensors(averaged, 4, "callback.ema.").items():
        torch.testing.assert_close(own[name_], value, rtol=1e-4, atol=1e-5)
    assert rows(config)[-1]["eval/ema_loss"] == pytest.approx(rows(averaged)[-1]["eval/ema_loss"], rel=1e-5)
    assert losses(config) == pytest.approx(
        losses(averaged)[2:], rel=1e-4
    )  # the evaluation of the average leaves the model alone


def test_the_average_is_exported_and_was_evaluated(averaged: RunConfig, tiny: Tiny, tmp_path: Path) -> None:
    finish_run(averaged)
    exported = load_file(averaged.directory / "export-ema" / "model.safetensors")
    for name, value in tensors(averaged, 4, "callback.ema.").items():
        assert torch.equal(exported[name], value), name
    assert not (averaged.directory / "export").exists()
    again = tiny(f"model={{path: '{averaged.directory / 'export-ema'}'}}", "tokenizer={}", "training.steps=1")
    train(again)
    assert eval_losses(again)[0] == pytest.approx(rows(averaged)[-1]["eval/ema_loss"], rel=1e-5)
    assert eval_losses(again)[0] != pytest.approx(eval_losses(averaged)[-1], rel=1e-3)
    with refuses(CheckpointError, "export.ema"):
        export_checkpoint(again.directory / "checkpoints" / "step-00000001", tmp_path / "none", average="ema")


@pytest.mark.thorough
def test_the_average_of_an_adapter_is_that_of_what_is_trained(tiny: Tiny, tmp_path: Path) -> None:
    saved(tmp_path / "model")
    config = tiny(f"model={{path: '{tmp_path}/model'}}", "adapter={rank: 4, alpha: 8}", EMA, "training.steps=2")
    train(config, 2)
    average = tensors(config, 2, "callback.ema.")
    assert average
    assert average.keys() == tensors(config, 2, "model.").keys()
    finish_run(config)
    merged = load_file(config.directory / "export-ema" / "model.safetensors")
    base = load_file(tmp_path / "model" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    factors = [next(average[key] for key in average if f"{name}.lora_{letter}." in key) for letter in "BA"]
    torch.testing.assert_close(merged[f"{name}.weight"], base[f"{name}.weight"] + 2 * factors[0] @ factors[1])


def test_it_stops_when_evaluations_are_not_better_and_goes_on_counting(tiny: Tiny) -> None:
    sets = (
        "callbacks=[{use: early_stopping, with: {mode: max, patience: 3}}]",
        "training.eval_every=1",
        "schedule.kind=constant",
    )
    assert len(train(tiny(*sets, "training.steps=2"))) == 2
    config = tiny(*sets, "training.steps=8")
    assert len(train(config)) == 5  # the third in a row is that of step 3, and the ranks agree in two steps
    evaluations = eval_losses(config)
    assert evaluations == sorted(evaluations, reverse=True)


def test_the_best_checkpoint_stays_and_is_exported(tiny: Tiny, capfd: pytest.CaptureFixture[str]) -> None:
    sets = (
        "checkpoint.best={mode: max}",
        "training.eval_every=1",
        "checkpoint.keep=1",
        "export=true",
        "schedule.kind=constant",
    )
    config = tiny(*sets, "training.steps=3", "sample={prompts: ['[ab]'], every: 2, max_new_tokens: 3}")
    train(config, 2)
    said = capfd.readouterr().out
    assert said.count("samples after step") == 1
    assert "samples after step 2:\n  [ab]" in said
    assert checkpoints(config) == ["step-00000001", "step-00000003"]  # the loss goes down, and less is not better here
    train(tiny(*sets, "training.steps=4"))
    assert checkpoints(config) == ["step-00000001", "step-00000004"]
    finish_run(config)
    marks = {name: (config.directory / name / MARK).read_text().strip()[-8:] for name in ("export", "export-best")}
    assert marks == {"export": "00000004", "export-best": "00000001"}


@pytest.mark.parametrize("name", ["shard 2", pytest.param("pp 2", marks=pytest.mark.thorough)])
def test_frozen_parameters_get_no_update_and_keep_their_state(tiny: Tiny, name: str) -> None:
    ranks, layout = LAYOUTS[name]
    frozen = "[{use: freeze, with: {match: ['model.embed_tokens.**', '**.0.**'], until: 2, after: 3}}]"
    config = tiny(f"callbacks={frozen}", *EACH, *layout, "training.steps=2", "profile={step: 2, ranks: [1]}")
    train(config, ranks)
    config = tiny(f"callbacks={frozen}", *EACH, "training.steps=4")
    train(config, 1)
    steps = [tensors(config, step, "") for step in (1, 2, 3, 4)]
    for key in steps[0]:
        if key.startswith("rng"):
            continue
        same = [torch.equal(one[key], other[key]) for one, other in pairwise(steps)]
        stays = "embed_tokens" in key or ".0." in key
        assert same == ([True, False, True] if stays else [False, False, False]), key
    assert steps[3]["optimizer.model.embed_tokens.weight.step"] == 1
    assert [path.name for path in (config.directory / "profile").iterdir()] == ["step-2-rank-1.json"]
    assert len(json.loads((config.directory / "profile" / "step-2-rank-1.json").read_text())["traceEvents"]) > 100


PROMPTS = ["abc de", "hij", "a bcd ef ghij"]


def _sampled(rank: int, config: RunConfig, store: Path) -> list[str]:
    run = trainer_on_rank(config, store).callbacks.run
    return [*run.generate(PROMPTS, 12), *run.generate(PROMPTS, 12, raw=True)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name",
    ["cp 2", "pp 2", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("tp 2", "shard 2", "pp 2 x shard 2"))],
)
def test_a_model_that_trains_continues_prompts_as_its_export_does(tiny: Tiny, tmp_path: Path, name: str) -> None:
    saved(tmp_path / "model")
    ranks, layout = LAYOUTS[name]
    config = tiny(f"model={{path: '{tmp_path}/model'}}", *layout)
    tokenizer, store = prepare_run(config, ranks)[1:]
    tokenizer.save_pretrained(tmp_path / "model")
    due = [generate(tmp_path / "model", prompt, 12, 0, raw=raw) for raw in (False, True) for prompt in PROMPTS]
    assert len({*due}) > 3
    assert run_ranks(_sampled, ranks, config, store.directory) == [due] * ranks


def test_a_model_that_denoises_is_not_sampled_between_steps(tiny: Tiny) -> None:
    with refuses(ConfigError, "config.callback") as caught:
        prepare_run(tiny(*RUN, "sample={prompts: [a], every: 2}"), 1)
    assert "the legal value of sample.every is 0" in str(caught.value)

"""Callbacks: checked before anything starts, called in order, with state in the checkpoint; what they raise is named."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint import storage
from meshwright.checkpoint.directory import latest, read_meta
from meshwright.checkpoint.manager import CheckpointManager
from meshwright.errors import ConfigError, PartError
from meshwright.train.callbacks.callback_state import states
from meshwright.train.callbacks.make_callbacks import check_callbacks, make_callbacks
from meshwright.train.config import RunConfig
from meshwright.train.start.resume import changes
from meshwright.train.start.setup import make_setup
from tests.harness import RankError, refuses
from tests.train.callbacks_of_users import KeepsASet
from tests.train.runs import checkpoints, losses, rows, train

HERE = "tests.train.callbacks_of_users:"
Tiny = Callable[..., RunConfig]


def notes(tmp_path: Path, **arguments: Any) -> str:
    given = "".join(f", {key}: {value}" for key, value in arguments.items())
    return f"callbacks=[{{use: '{HERE}Notes', with: {{path: {tmp_path}/notes{given}}}}}]"


def tensors_of(config: RunConfig) -> dict[str, torch.Tensor]:
    """The tensors of callbacks in the newest checkpoint of a run."""
    checkpoint = latest(config.directory / "checkpoints")
    assert checkpoint is not None
    held = {name: of for name, of in storage.contents(checkpoint).items() if name.startswith("callback.")}
    tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in held.items()}
    storage.read(checkpoint, tensors)
    return tensors


def test_hooks_are_called_in_order_and_their_state_resumes_on_another_layout(tiny: Tiny, tmp_path: Path) -> None:
    sets = ("training.eval_every=2", "checkpoint.keep=null", "schedule.kind=constant", notes(tmp_path))
    whole, parts = tiny(*sets, "training.steps=3", name="whole"), tiny(*sets, "training.steps=2", name="parts")
    train(whole, 1)
    step = ["on_step_start", "on_gradients", "on_step"]
    due = ["on_start 0", "on_evaluation 0", *(f"{hook} 1" for hook in step), *(f"{hook} 2" for hook in step)]
    due += ["on_evaluation 2", *(f"{hook} 3" for hook in step), "on_evaluation 3", "on_save 3", "on_end 3"]
    assert (tmp_path / "notes-0").read_text().splitlines() == due
    logged = [row["mine/total"] for row in rows(whole) if "mine/total" in row]
    assert logged == pytest.approx([sum(losses(whole)[: number + 1]) for number in range(3)])
    assert all(row["eval/again"] == row["eval/loss"] for row in rows(whole) if "eval/loss" in row)
    train(parts, 2)
    train(tiny(*sets, "training.steps=3", name="parts"), 1)
    assert (tmp_path / "notes-1").read_text().splitlines()[-1] == "on_end 2"
    checkpoint = latest(parts.directory / "checkpoints")
    assert checkpoint is not None
    assert read_meta(checkpoint)["callbacks"]["state"][f"{HERE}Notes"] == {"seen": 3}
    one, other = tensors_of(whole), tensors_of(parts)
    assert f"callback.{HERE}Notes.model.norm.weight" in one
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(other[name], one[name], rtol=1e-4, atol=1e-6)


def test_a_callback_ends_the_run_a_step_later_and_what_it_kept_stays(
    tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sets = ("checkpoint.every=1", "checkpoint.keep=1")
    config = tiny(*sets, notes(tmp_path, stop=3, save=2))
    assert len(train(config, 2)) == 4  # rank 0 decides about the step after the one that asks
    assert "Notes: it is enough: the run ends after step 4 of 6" in capfd.readouterr().out
    assert checkpoints(config) == ["step-00000002", "step-00000004"]
    assert [row["step"] for row in rows(config) if "eval/loss" in row] == [0, 4]
    assert len(train(config)) == 4
    assert "nothing to train: step 4 of 4 is done" in capfd.readouterr().out
    assert len(train(tiny(*sets, notes(tmp_path, save=2)))) == 6
    said = capfd.readouterr().out
    assert re.search(r"callbacks: \[.*'stop': 3.*\] in the checkpoint, \[.*\] now", said) is None  # the worker says it
    assert checkpoints(config) == ["step-00000002", "step-00000006"]
    train(tiny(*sets, "callbacks=[ema]", "training.steps=7"))
    said = capfd.readouterr().out
    assert f"callback {HERE}Notes of the checkpoint is gone" in said
    assert "callback ema was not in the checkpoint: it starts fresh" in said
    assert checkpoints(config) == ["step-00000007"]


def test_a_difference_is_said_as_others_are() -> None:
    before, now = (
        {"callbacks": ["ema"], "checkpoint": {"best": None}},
        {"callbacks": [], "checkpoint": {"best": {"mode": "min"}}},
    )
    assert changes(before, now) == [
        "callbacks: ['ema'] in the checkpoint, [] now",
        "checkpoint.best: None in the checkpoint, {'mode': 'min'} now",
    ]
    assert changes({}, now) == []


@pytest.mark.parametrize(
    ("hook", "when"),
    [
        ("on_evaluation", "the evaluation after step 2: "),
        pytest.param("on_step", "step 2: ", marks=pytest.mark.thorough),
        pytest.param("on_gradients", "step 2: ", marks=pytest.mark.thorough),
    ],
)
def test_what_a_hook_raises_is_named_and_nothing_is_lost(tiny: Tiny, tmp_path: Path, hook: str, when: str) -> None:
    config = tiny(
        f"callbacks=[{{use: '{HERE}Notes', with: {{path: {tmp_path}/notes}}}}, {{use: '{HERE}Fails', with: {{hook: {hook}}}}}]",
        "checkpoint.every=1",
        "training.eval_every=2",
    )
    with pytest.raises(RankError) as caught:
        train(config)
    assert f"{when}callback {HERE}Fails, {hook}: ValueError: of its own in {hook}" in str(caught.value)
    assert re.search(r"callbacks_of_users\.py:\d+ in fail: raise ValueError", str(caught.value))
    assert (tmp_path / "notes-0").read_text().splitlines()[-1] == "on_error PartError 2"
    assert checkpoints(config) == ["step-00000001"]


def test_what_an_optimizer_raises_has_its_step(tiny: Tiny) -> None:
    with pytest.raises(RankError, match=rf"step 1: optimizer {HERE}FailsLater, step: ValueError: of its own"):
        train(tiny(f"optimizer={{use: '{HERE}FailsLater', lr: 0.1}}"))


def test_what_is_wrong_is_said_together_before_anything_starts(tiny: Tiny) -> None:
    uses = ["Misspelled", "NoArgument", "nothing", "Path", "{use: ema, with: {decay: 2, evry: 1}}"]
    listed = ", ".join(use if "use" in use else f"'{HERE}{use}'" for use in uses)
    with refuses(ConfigError, "part.signature") as caught:
        make_setup(tiny(f"callbacks=[{listed}, emma]", "optimizer={use: 'torch.optim:Nothing'}"), 1)
    said = str(caught.value)
    for words in (
        "on_steps is no hook; did you mean on_step?",
        "lacks `def on_step(self, run)`",
        "has no 'nothing'",
        "is no class of meshwright.Callback",
        "unknown argument; did you mean 'every'?",
        "callbacks.4.with.decay=2",
        "callbacks.5=emma: no such part; legal are ema, early_stopping, freeze",
        "'Nothing'",
    ):
        assert words in said, words


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("callbacks=[early_stopping]",), "set training.eval_every"),
        (("checkpoint.best={}", "data.eval_fraction=0"), "nothing is held out"),
        (("callbacks=[{use: freeze, with: {match: ['**.nowhere'], until: 2}}]",), "'**.nowhere' matches no trained parameter"),
        (("callbacks=[{use: freeze, with: {match: ['**.weight']}}]",), "set until or after"),
        (("profile={step: 7}",), "step 7 is none of the 6 steps"),
        (("profile={step: 1, ranks: [0, 5]}",), "5 is none of the 2 ranks"),
    ],
)
def test_a_callback_that_does_not_fit_the_run_is_refused(tiny: Tiny, overrides: tuple[str, ...], words: str) -> None:
    config = tiny(*overrides)
    with refuses(ConfigError, "config.callback") as caught:
        check_callbacks(config, make_setup(config, 2).plan)
    assert words in str(caught.value)


def test_the_configuration_shows_callbacks(tiny: Tiny) -> None:
    config = tiny("callbacks=[{use: ema, with: {decay: 0.5}}, early_stopping, ema]", "training.eval_every=2")
    assert config.model_dump(mode="json")["callbacks"][1:] == ["early_stopping", "ema"]
    assert config.own_parts == ["callback: ema (decay=0.5)", "callback: early_stopping", "callback: ema"]
    assert [name for name, _ in make_callbacks(config)] == ["ema", "early_stopping", "ema#2"]


def test_a_state_that_a_checkpoint_cannot_keep_is_refused() -> None:
    with refuses(PartError, "part.returned"):
        states([("sets", KeepsASet())])


def test_kept_checkpoints_are_beside_the_others(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=1)
    for step, kept in ((1, 1), (2, 1), (3, 1), (4, 4), (5, 4)):
        manager.save(step, {"x": torch.ones(1)}, {"callbacks": {"kept": {"best": kept}}})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]

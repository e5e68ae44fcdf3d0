"""A checkpoint completes by itself, stands alone, and is only read into what it is of."""

import json
import shutil
import socket
import time
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.directory import latest, read_meta
from meshwright.checkpoint.export import export_checkpoint
from meshwright.checkpoint.manager import CheckpointManager
from meshwright.errors import CheckpointError, ConfigError
from meshwright.train.config import load_config
from meshwright.train.start.prepare import locked, prepare_run
from meshwright.train.start.resume import checkpoint_to_resume
from meshwright.train.start.run_files import Paths
from meshwright.train.start.worker import damage_here
from tests.harness import refuses, run_ranks
from tests.train.runs import LLAMA, checkpoints, losses, tiny_run, train, trainer_on_rank

TRAINED = ("training.steps=2", "checkpoint.every=1")


def test_a_background_save_completes_without_another_save(tmp_path: Path) -> None:
    """A crash long after the save must find it: it may not wait for the next call."""

    def on_rank(rank: int) -> None:
        manager = CheckpointManager(tmp_path / "checkpoints", asynchronous=True)
        manager.save(1, {"x": torch.arange(8.0)}, {"note": "first"})
        deadline = time.monotonic() + 10
        while latest(tmp_path / "checkpoints") is None and time.monotonic() < deadline:
            time.sleep(0.05)
        found = latest(tmp_path / "checkpoints")
        assert found is not None
        assert read_meta(found)["note"] == "first"
        manager.finish()

    run_ranks(on_rank, 2)


@pytest.mark.thorough
def test_a_copied_checkpoint_exports_without_its_run(tiny, tmp_path: Path) -> None:
    config = tiny(*TRAINED)
    train(config, 2)
    copied = tmp_path / "elsewhere" / "anywhere"
    shutil.copytree(latest(Paths(config.directory).checkpoints), copied)
    shutil.rmtree(config.directory)
    export_checkpoint(copied, tmp_path / "export")
    assert json.loads((tmp_path / "export" / "config.json").read_text())["hidden_size"] == 32
    assert (tmp_path / "export" / "tokenizer.json").is_file()


def test_a_run_from_a_pretrained_model_exports_when_that_is_gone(tiny, tmp_path: Path) -> None:
    from tests.tiny import tiny_model

    tiny_model("llama", vocab_size=300).save_pretrained(tmp_path / "base")
    config = tiny(*TRAINED, "model.config=null", f"model.path={tmp_path / 'base'}")
    train(config, 1)
    shutil.rmtree(tmp_path / "base")
    export_checkpoint(latest(Paths(config.directory).checkpoints), tmp_path / "export")
    assert (tmp_path / "export" / "model.safetensors").is_file()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("model.config.num_attention_heads=2", "num_attention_heads: 4 in the checkpoint, 2 in the model"),
        ("model.config.rope_parameters={rope_type: default, rope_theta: 777.0}", "rope_parameters"),
    ],
)
def test_equal_shapes_of_another_model_are_refused(tiny, override: str, told: str) -> None:
    heads = {**LLAMA, "head_dim": 8, "num_key_value_heads": 2}
    config = tiny(*TRAINED, f"model.config={json.dumps(heads)}")
    train(config, 1)
    before = checkpoints(config)
    extra = [] if "rope" in override else ["model.config.head_dim=16", "model.config.num_key_value_heads=1"]
    other = tiny(*TRAINED, f"model.config={json.dumps(heads)}", override, *extra, "training.steps=3")
    with refuses(CheckpointError, "checkpoint.model") as error:
        prepare_run(other, 1)
    assert told in str(error.value)
    assert checkpoints(config) == before


def test_parameters_that_no_gradient_reached_can_be_resumed(tiny) -> None:
    """Every step before the first save was skipped, so no parameter was ever stepped."""

    def poisoned(rank: int, config, store) -> None:
        trainer = trainer_on_rank(config, store)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.fill_(float("nan"))
        trainer.train_step()
        trainer.step = 1
        trainer.save()
        trainer.recorder.close()

    config = tiny("training.on_nonfinite=skip", "training.steps=2")
    _, _, store = prepare_run(config, 2)
    run_ranks(poisoned, 2, config, store.directory)
    found = checkpoint_to_resume(config)
    assert found is not None

    def resume(rank: int, config, store) -> int:
        return trainer_on_rank(config, store).step

    assert run_ranks(resume, 2, config, store.directory) == [1, 1]


def test_two_runs_cannot_write_to_one_output(tiny) -> None:
    config = tiny()
    with locked(config):

        def other(rank: int) -> None:
            with refuses(CheckpointError, "run.locked"), locked(config):
                pass

        run_ranks(other, 1, group=False)
    with locked(config):
        pass


def test_another_tokenizer_for_a_run_that_goes_on_is_refused(tiny) -> None:
    config = tiny(*TRAINED)
    train(config, 1)
    assert len(losses(config)) == 2
    with pytest.raises(CheckpointError, match=r"tokenizer: the run in .* began with \{'vocab_size': 300\}"):
        prepare_run(tiny(*TRAINED, "tokenizer.chat_template='{{ messages }}'", "training.steps=3"), 1)

    # What lies beside the checkpoints without checksums is made again from them.
    sound = Paths(config.directory).tokenizer.joinpath("tokenizer.json").read_bytes()
    Paths(config.directory).tokenizer.joinpath("tokenizer.json").write_bytes(sound[:-9])
    Paths(config.directory).config.write_text("model:\n  conf")
    prepare_run(config, 1)
    assert Paths(config.directory).tokenizer.joinpath("tokenizer.json").read_bytes() == sound
    assert load_config(Paths(config.directory).config) == config


def test_tokens_that_a_machine_reads_otherwise_are_named(tiny, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny(*TRAINED)
    store = prepare_run(config, 1)[2]
    assert damage_here(str(store.directory), fast=False) == []
    assert "--fast" not in capsys.readouterr().out
    prepare_run(config, 1, fast=True)
    assert f"--fast: 3 of 3 blocks of the tokens in {store.directory} checked" in capsys.readouterr().out
    file = store.directory / "tokens.bin"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    (line,) = damage_here(str(store.directory), fast=True)
    assert line.startswith(f"on {socket.gethostname()}: {file} is not what was written")
    file.unlink()
    (line,) = damage_here(str(store.directory), fast=False)
    assert "tokens.bin is missing" in line
    prepare_run(config, 1)
    assert f"{file} is missing; the tokens are made again" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("schedule.warmup_steps=6", "schedule.warmup_steps=6: must be below training.steps=6"),
        ("optimizer.betas=[1.5, 0.9]", "optimizer.betas.0=1.5"),
        ("sample.prompts=[hello]", "sample.prompts"),
    ],
)
def test_settings_without_effect_are_refused(tmp_path: Path, corpus: Path, override: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        tiny_run(tmp_path, corpus, override)
    assert told in str(error.value)


def test_keys_that_stand_twice_and_empty_sections(tmp_path: Path, corpus: Path) -> None:
    tiny_run(tmp_path, corpus)
    file = tmp_path / "run.yaml"
    text = file.read_text()
    file.write_text(text + "schedule:\n")
    assert load_config(file).schedule.kind == "cosine"
    file.write_text("base: &base\n  warmup_steps: 2\n" + text + "schedule:\n  <<: *base\n")
    with pytest.raises(ConfigError, match="base: unknown key"):  # merge keys work; `base` itself is no section
        load_config(file)
    file.write_text(text + "training: {steps: 3, global_batch_size: 8}\n")
    with pytest.raises(ConfigError, match="the key 'training' occurs twice"):
        load_config(file)


def test_a_background_save_outlives_a_failure_of_the_loop(tiny) -> None:
    config = tiny("checkpoint.every=1", "checkpoint.asynchronous=true", "training.steps=3")
    _, _, store = prepare_run(config, 1)

    def on_rank(rank: int) -> None:
        trainer = trainer_on_rank(config, store.directory)
        step = trainer.train_step

        def failing():
            if trainer.step == 1:
                raise KeyError
            return step()

        trainer.train_step = failing
        with pytest.raises(KeyError):
            trainer.run()

    run_ranks(on_rank, 1)
    assert checkpoints(config) == ["step-00000001"]


def test_the_packing_check_sees_the_weights_of_a_resumed_run(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(*TRAINED)
    train(config, 1)
    seen = []

    def look(logits: object, model, *_: object, **__: object) -> None:
        seen.append(float(model.model.embed_tokens.weight.full_tensor().abs().max()))

    monkeypatch.setattr("meshwright.train.trainer.check_boundaries", look)
    _, _, store = prepare_run(config, 1)

    def on_rank(rank: int) -> None:
        trainer = trainer_on_rank(config, store.directory)
        held = trainer.model.model.embed_tokens.weight.full_tensor()
        assert seen == [float(held.abs().max())]

    run_ranks(on_rank, 1)

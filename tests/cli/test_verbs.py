"""The verbs one after the other: print the configuration, train, export, generate; help, doctor."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from meshwright.train.config import load_config
from tests.cli.conftest import Outcome
from tests.train.runs import losses
from tests.train.test_pretrained import saved

Meshwright = Callable[..., Outcome]


def succeeds(found: Outcome) -> str:
    assert (found.code, found.error) == (0, ""), found
    return found.out


@pytest.mark.parametrize("verb", ["train", "plan"])
def test_printed_configuration_is_complete_and_starts_nothing(meshwright: Meshwright, config: str, verb: str) -> None:
    overrides = ("optimizer.lr=1e-4", "layout.dp_replicate=2", "data.eval_fraction=null")
    out = succeeds(meshwright(verb, config, *overrides, "--print-config"))
    printed = Path(config).with_name("printed.yaml")
    printed.write_text(out)
    assert load_config(printed) == load_config(config, overrides)
    assert not Path(load_config(config).output).exists()


@pytest.mark.thorough
def test_printed_configuration_reproduces_the_run(meshwright: Meshwright, config: str, tmp_path: Path) -> None:
    printed = tmp_path / "printed.yaml"
    printed.write_text(succeeds(meshwright("train", config, "training.seed=5", "--nproc", 2, "--print-config")))
    succeeds(meshwright("train", config, "training.seed=5", "--nproc", 2))
    succeeds(meshwright("train", printed, f"output={tmp_path / 'again'}"))  # --nproc is in it
    again = load_config(printed, [f"output={tmp_path / 'again'}"])
    assert losses(again) == losses(load_config(config))
    # and so does the one that the run keeps
    kept = load_config(Path(load_config(config).output, "config.yaml"))
    assert kept == load_config(printed)


@pytest.mark.thorough
def test_an_adapter_says_nothing_of_other_libraries(meshwright: Meshwright, config: str, tmp_path: Path) -> None:
    saved(tmp_path / "base", "gpt2")  # peft warns of its matrices, which lie the other way round
    run, out = Path(load_config(config).output), tmp_path / "adapter"
    tune = (f"model={{path: '{tmp_path / 'base'}'}}", "adapter={rank: 4}", "training.steps=1")
    succeeds(meshwright("train", config, *tune, "--nproc", 2))
    succeeds(meshwright("export", run, out, "--adapter"))
    for file in out.glob("tokenizer*"):
        (tmp_path / "base" / file.name).write_bytes(file.read_bytes())
    ask = ("generate", tmp_path / "base", "abc", "--adapter", out, "--temperature", 0, "--max-new-tokens")
    succeeds(meshwright(*ask, 4))
    found = meshwright(*ask, 62)
    assert found.code == 0
    assert re.fullmatch(r"up to 6\d tokens, beyond the 64 positions of the model: .* may make no sense\n", found.error)


def test_train_export_generate(meshwright: Meshwright, config: str, tmp_path: Path) -> None:
    out = succeeds(meshwright("train", config, "--nproc", 2, "checkpoint.every=3", "export=true", "sample.prompts=[abc, def]"))
    run = Path(load_config(config).output)
    sampled = out.splitlines()[-2:]
    assert [line[:3] for line in sampled] == ["abc", "def"]

    # A run means its newest checkpoint; a checkpoint means itself.
    assert succeeds(meshwright("export", run, tmp_path / "newest")) == f"{run}/checkpoints/step-00000006 -> {tmp_path}/newest\n"
    succeeds(meshwright("export", run / "checkpoints" / "step-00000003", tmp_path / "third", "--dtype", "bfloat16"))
    third = ("export", run / "checkpoints" / "step-00000003", tmp_path / "third", "--dtype", "bfloat16")
    again = meshwright(*third)
    assert (again.code, again.out) == (2, "")
    assert "already; --overwrite replaces it" in again.error
    succeeds(meshwright(*third, "--overwrite"))
    weights = [(folder / "model.safetensors").read_bytes() for folder in (run / "export", tmp_path / "newest")]
    assert weights[0] == weights[1]
    assert json.loads((tmp_path / "third" / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "third").num_parameters() > 0

    ask = ("generate", tmp_path / "newest", "abc", "--temperature", 0, "--max-new-tokens", 48)
    assert succeeds(meshwright(*ask)) == sampled[0] + "\n"
    assert succeeds(meshwright(*ask, "--seed", 3)) == sampled[0] + "\n"
    warm = {succeeds(meshwright(*ask[:3], "--temperature", 2, "--seed", seed, "--max-new-tokens", 48)) for seed in (1, 1, 2)}
    assert len(warm) == 2


def test_samples_are_asked_as_a_user_asks(meshwright: Meshwright, config: str) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    asked = ("export=true", "sample.prompts=[abc]", "sample.max_new_tokens=5", f'tokenizer.chat_template="{template}"')
    out = succeeds(meshwright("train", config, "training.steps=1", *asked))
    exported = Path(load_config(config).output, "export")
    assert "abc" in out.splitlines()  # and the answer begins on the next line
    ask = ("generate", exported, "abc", "--temperature", 0, "--max-new-tokens", 5)
    assert succeeds(meshwright(*ask)).startswith("abc\n")
    assert not succeeds(meshwright(*ask, "--raw")).startswith("abc\n")
    raw = succeeds(meshwright("train", config, f"output={exported.parent}-raw", "training.steps=1", "sample.raw=true", *asked))
    assert raw.splitlines()[-1] == succeeds(meshwright(*ask, "--raw")).rstrip("\n")


def test_export_refusals(meshwright: Meshwright, config: str, tmp_path: Path) -> None:
    succeeds(meshwright("train", config, "training.steps=1"))
    run = load_config(config).output
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    for arguments, part in (
        ((run, tmp_path / "mine"), "mine: has files that are no export of Meshwright"),
        ((tmp_path / "mine", tmp_path / "to"), "mine: neither a complete checkpoint nor a run that has one"),
        ((run, tmp_path / "to", "--dtype", "int4"), "--dtype=int4: legal are float32, bfloat16, float16"),
    ):
        found = meshwright("export", *arguments)
        assert found.code == 2
        assert found.error.startswith("error: ")
        assert found.error.count("\n") == 1
        assert part in found.error
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    assert not (tmp_path / "to").exists()


def test_a_directory_of_another_kind_gets_the_way_to_the_right_one(meshwright: Meshwright, config: str, tmp_path: Path) -> None:
    saved(tmp_path / "base", "llama")
    base, run, adapter = tmp_path / "base", Path(load_config(config).output), tmp_path / "adapter"
    tune = (f"model={{path: '{base}'}}", "adapter={rank: 4}")
    succeeds(meshwright("train", config, *tune, "training.steps=1"))
    succeeds(meshwright("export", run, adapter, "--adapter"))
    step = run / "checkpoints" / "step-00000001"
    again = ("train", config, f"output={tmp_path / 'again'}")
    for arguments, hint in (
        (("generate", run, "abc"), f"it is the directory of a run: `meshwright export {run} OUT` writes the model"),
        (("generate", step, "abc"), f"it is a checkpoint of a run: `meshwright export {step} OUT` writes the model"),
        (("generate", run / "checkpoints", "abc"), f"`meshwright export {run} OUT` writes the model"),
        (("generate", adapter, "abc"), f"it is an adapter: give it as --adapter, and its model ({base}) as DIRECTORY"),
        (("generate", base, "abc", "--adapter", run), f"`meshwright export {run} OUT --adapter` writes the adapter"),
        (("generate", base, "abc", "--adapter", base), "it is a whole model: give it as DIRECTORY"),
        (("export", base, tmp_path / "to"), "it is a model already, for `meshwright generate`"),
        (("export", adapter, tmp_path / "to"), "it is an adapter already, for `meshwright generate` --adapter"),
        (("export", run / "checkpoints", tmp_path / "to"), f"take one of them, or the run, {run}"),
        ((*again, f"model={{path: '{run}'}}"), f"`meshwright export {run} OUT` writes the model"),
        ((*again, f"model={{path: '{adapter}'}}"), f"give it as adapter.path, and its model ({base}) as model.path"),
        ((*again, *tune, f"adapter.path={base}"), "it is a whole model: give it as model.path"),
        ((*again, *tune, f"adapter.path={run}"), f"`meshwright export {run} OUT --adapter` writes the adapter"),
        ((*again, *tune, f"checkpoint.resume={run}"), f"it is a run, whose newest checkpoint is {step}"),
    ):
        found = meshwright(*arguments)
        assert (found.code, found.error.count("\n")) == (2, 1), found
        assert hint in found.error, found.error
    (run / "export").mkdir()
    (run / "export" / "config.json").write_text("{}")
    assert f", or take {run / 'export'}, its last export" in meshwright("generate", run, "abc").error


def test_finished_run_is_left_as_it_is(meshwright: Meshwright, config: str) -> None:
    succeeds(meshwright("train", config))
    before = Path(load_config(config).output, "metrics.jsonl").read_text()
    assert "nothing to train: step 6 of 6 is done" in succeeds(meshwright("train", config))
    assert Path(load_config(config).output, "metrics.jsonl").read_text() == before


def test_help_names_every_verb(meshwright: Meshwright) -> None:
    out = succeeds(meshwright("--help"))
    for verb in ("plan", "train", "export", "generate", "doctor"):
        assert verb in out
        assert "--debug" in succeeds(meshwright(verb, "--help"))


def test_doctor(meshwright: Meshwright) -> None:
    facts = json.loads(succeeds(meshwright("doctor", "--json")))
    assert {"meshwright", "torch", "transformers", "python", "cpus", "gpus"} <= facts.keys()
    assert "all private names that Meshwright uses are there" in succeeds(meshwright("doctor"))


def test_a_run_that_goes_on_with_other_settings_says_which(meshwright: Callable[..., Outcome], config: str) -> None:
    assert meshwright("train", config, "training.steps=2").code == 0
    changed = ("training.steps=3", "optimizer.lr=0.02", "schedule.kind=linear")
    found = meshwright("train", config, *changed)
    assert found.code == 0, found
    for line in (
        "optimizer.lr: 0.01 in the checkpoint, 0.02 now",
        "schedule.kind: cosine in the checkpoint, linear now",
        "training.steps: 2 in the checkpoint, 3 now",
    ):
        assert line in found.out
    assert " in the checkpoint, " not in meshwright("train", config, *changed).out

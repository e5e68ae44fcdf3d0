"""What cannot be trained is refused by `plan` and by `train` in the same words, which say what to do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from meshwright.errors import ModelError
from meshwright.models.model_config import ModelConfig
from meshwright.models.weights.source import facts, refuse_untrainable
from meshwright.train.config import RunConfig
from meshwright.train.start.prepare import prepare_run
from meshwright.train.start.setup import make_setup
from tests.tiny import tiny_model
from tests.train.conftest import corpus, tiny

__all__ = ["corpus", "tiny"]

Tiny = Callable[..., RunConfig]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model that can be trained."""
    tiny_model(vocab_size=300).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def rewrite(directory: Path, **changes: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def pickled(directory: Path, name: str = "pytorch_model.bin") -> None:
    (directory / "model.safetensors").unlink()
    torch.save({}, directory / name)


def adapter(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink()
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "x/y"}')
    (directory / "adapter_model.safetensors").write_bytes(b"")


def family(model_type: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        from transformers import CONFIG_MAPPING

        CONFIG_MAPPING[model_type]().save_pretrained(directory)

    return change


CASES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "pickled": (pickled, "pytorch_model.bin, and only safetensors are read (no pickles are read", "save_pretrained"),
    "pickled parts": (lambda at: pickled(at, "pytorch_model-00001-of-00002.bin"), "00001-of-00002.bin", "save_pretrained"),
    "gguf": (lambda at: pickled(at, "model.gguf"), "model.gguf", "save_pretrained"),
    "adapter": (adapter, "holds an adapter (adapter_config.json)", "merge_and_unload()"),
    "classification": (
        lambda at: rewrite(at, architectures=["LlamaForSequenceClassification"]),
        "is a LlamaForSequenceClassification",
        "take the base model",
    ),
    "tokens": (lambda at: rewrite(at, architectures=["LlamaForTokenClassification"]), "TokenClassification", "take the base"),
    "t5": (family("t5"), "is an encoder-decoder (t5)", "take a decoder"),
    "bart": (family("bart"), "is an encoder-decoder (bart)", "take a decoder"),
    "llava": (family("llava"), "is a model of images and text (llava)", "text_config"),
    "bert": (family("bert"), "is an encoder (bert)", "take a decoder"),
    "vit": (family("vit"), "is of a kind (vit) that has no head to generate text", "causal language modeling"),
}


@pytest.mark.parametrize("name", CASES)
def test_plan_and_train_refuse_it_alike(tiny: Tiny, directory: Path, name: str) -> None:
    change, what, remedy = CASES[name]
    change(directory)
    config = tiny(f"model={{path: '{directory}'}}")
    told = []
    for verb in (make_setup, prepare_run):
        with pytest.raises(ModelError) as caught:
            verb(config, 2)
        told.append(caught.value.problems)
    assert told[0] == told[1]
    (problem,) = told[0]
    assert problem.startswith(f"model.path='{directory}': ")
    assert what in problem
    assert remedy in problem
    assert len(problem) < 500  # not transformers' list of classes


@pytest.mark.parametrize("kind", ["t5", "llava", "bert"])
def test_a_new_model_of_such_a_kind_is_refused_too(tiny: Tiny, kind: str) -> None:
    with pytest.raises(ModelError, match=rf"^model.config: is an? .*\({kind}\)"):
        make_setup(tiny(f"model={{config: {{model_type: {kind}}}}}", "model.config.vocab_size=300"), 1)


def test_what_can_be_trained_passes(tiny: Tiny, directory: Path) -> None:
    (directory / "training_args.bin").write_bytes(b"")
    (directory / "adapter_config.json").write_text("{}")  # left beside a model that was merged
    config = tiny(f"model={{path: '{directory}'}}")
    assert make_setup(config, 2).plan == prepare_run(config, 2)[0].plan
    (directory / "model.safetensors").unlink()  # a plan needs no weights
    (directory / "adapter_config.json").unlink()
    make_setup(config, 2)
    refuse_untrainable(ModelConfig(config={"model_type": "bert", "is_decoder": True}))
    shutil.rmtree(directory)


def test_files_of_the_hub_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda name: ["adapter_config.json", "adapter_model.safetensors"])
    monkeypatch.setattr("huggingface_hub.model_info", lambda name, **_: None)
    with pytest.raises(ModelError, match=r"model.path='owner/name': holds an adapter"):
        refuse_untrainable(ModelConfig(path="owner/name"))


def test_placeholders_are_no_names_of_the_hub(tiny: Tiny) -> None:
    for value in ("path/to/model", "model/"):
        with pytest.raises(ModelError, match=rf"^model.path='{value}': no such directory"):
            make_setup(tiny(f"model={{path: {value}}}"), 1)


def test_what_an_export_gives_back(directory: Path) -> None:
    assert facts([directory / "model.safetensors"])["dtype"] == "float32"
    (directory / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config.json: cannot be read: JSONDecodeError"):
        facts([directory / "model.safetensors"])

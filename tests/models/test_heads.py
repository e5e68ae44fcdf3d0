"""Heads of other tasks: built, read from files that have none, refused where they cannot be."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from meshwright.checkpoint.export import generate
from meshwright.errors import MeshwrightError, ModelError
from meshwright.models.added_modules import _WithAdded
from meshwright.models.heads import head_of
from meshwright.models.model_config import ModelConfig
from meshwright.models.weights.build import build_on_meta, materialize, pretrained_config
from meshwright.models.weights.source import refuse_untrainable
from meshwright.plan.given.traces import Traces
from tests.harness import refuses
from tests.tiny import tiny_model

SIZES = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 2, "vocab_size": 64}  # fmt: skip
TWO = {"kind": "sequence_classification", "num_labels": 2}
CPU = torch.device("cpu")


def filled(**values: Any) -> tuple[Any, ModelConfig]:
    config = ModelConfig.model_validate({"dtype": "float64", **values})
    refuse_untrainable(config)
    model = build_on_meta(config, pretrained_config(config, strict=False))
    materialize(model, config, CPU, 0)
    return model.eval(), config


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma3_text", "mixtral", "phi3"])
def test_layers_are_read_and_the_head_is_that_of_a_new_model(tmp_path: Path, family: str) -> None:
    """The layers are those of a causal language model; the head is made as in a new model, whatever the layers are."""
    causal = tiny_model(family, seed=3, tie_word_embeddings=True).double()
    causal.save_pretrained(tmp_path / "causal")
    head = {"kind": "sequence_classification", "num_labels": 3}
    plain = {"experts_implementation": "eager"} if family == "mixtral" else {}
    model, _ = filled(path=str(tmp_path / "causal"), head=head, **plain)
    new, _ = filled(config=causal.config.to_dict(), head=head)
    assert torch.equal(model.score.weight, new.score.weight)
    assert model.score.weight.std() > 0
    values = dict(causal.base_model.named_parameters())
    assert all(torch.equal(values[name], own) for name, own in model.base_model.named_parameters())
    model.save_pretrained(tmp_path / "saved")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", dtype=torch.float64, **plain).eval()
    ids = torch.tensor([[5, 9, 7, 8], [6, 4, 5, 7]])
    positions = torch.arange(4).expand(2, 4)
    with torch.no_grad():
        ours = model(input_ids=ids, position_ids=positions).logits
        assert ours.shape == (2, 4, 3)
        assert torch.allclose(ours[:, -1], theirs(ids).logits, rtol=0, atol=1e-12)
    again, _ = filled(path=str(tmp_path / "saved"), head="sequence_classification")
    assert torch.equal(again.score.weight, model.score.weight)
    assert again.config.num_labels == 3


def test_a_config_says_what_the_numbers_are() -> None:
    model, _ = filled(config=SIZES, head={"kind": "sequence_classification", "labels": ["no", "yes"]})
    config = model.config
    assert (config.id2label, config.label2id) == ({0: "no", 1: "yes"}, {"no": 0, "yes": 1})
    assert (config.problem_type, config.pad_token_id) == ("single_label_classification", config.eos_token_id)
    assert (
        filled(config=SIZES, head={"kind": "sequence_classification", "num_labels": 1})[0].config.problem_type == "regression"
    )
    tokens, _ = filled(config=SIZES, head={"kind": "token_classification", "num_labels": 5})
    assert (type(tokens).__name__, head_of(tokens)) == ("LlamaForTokenClassification", "score")
    assert tokens(input_ids=torch.tensor([[5, 9]]), position_ids=torch.arange(2)[None]).logits.shape == (1, 2, 5)


@pytest.mark.parametrize(
    ("values", "code", "words"),
    [
        ({"head": "sequence_classification"}, "model.head", "set it, or labels"),
        ({"head": {"kind": "sequence_classification", "num_labels": 2}, "kind": "cohere"}, "model.head", "of cohere"),
        (
            {"head": {"kind": "sequence_classification", "num_labels": 2}, "kind": "nemotron_h"},
            "model.head",
            "nemotron_h has no",
        ),
        ({"head": {"kind": "sequence_classification", "num_labels": 2}, "kind": "bert"}, "model.encoder", "an encoder (bert)"),
        (
            {"head": {"kind": "token_classification", "num_labels": 2}, "kind": "modernbert"},
            "model.encoder",
            "an encoder (modernbert), on which model.head=token_classification is not there yet: its attention sees all tokens",
        ),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_cannot_have_a_head(values: dict[str, Any], code: str, words: str) -> None:
    config = {**SIZES, "model_type": values.pop("kind", "llama")}
    with refuses(MeshwrightError, code) as caught:
        filled(config=config, **values)
    assert words in str(caught.value)


def test_files_of_another_head_are_refused(tmp_path: Path) -> None:
    model, _ = filled(config=SIZES, head={"kind": "sequence_classification", "num_labels": 2})
    model.save_pretrained(tmp_path / "saved")
    with refuses(ModelError, "model.kind") as caught:
        refuse_untrainable(ModelConfig(path=str(tmp_path / "saved")))
    assert "set model.head=sequence_classification" in str(caught.value)
    with refuses(ModelError, "model.kind"):
        filled(path=str(tmp_path / "saved"), head={"kind": "token_classification", "num_labels": 2})
    with refuses(ModelError, "model.weights.mismatch") as caught:
        filled(path=str(tmp_path / "saved"), head={"kind": "sequence_classification", "num_labels": 3})
    assert "score.weight: shape (2, 16) in the files" in str(caught.value)
    assert "; set model.head.num_labels=2" in str(caught.value)
    with refuses(ModelError, "generate.directory") as caught:
        generate(tmp_path / "saved", "text", 3)
    assert "generates no text" in str(caught.value)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ({"kind": "sequence_classification", "num_labels": 3, "labels": ["a", "b"]}, "leave num_labels out"),
        ({"kind": "sequence_classification", "labels": ["a", "a"]}, "is there twice"),
    ],
)
def test_labels_that_do_not_fit(head: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelConfig.model_validate({"config": SIZES, "head": head})


def test_every_question_to_a_model_is_asked_with_added_modules_too() -> None:
    questions = {name for name in vars(Traces) if not name.startswith("_")}
    assert questions <= set(vars(_WithAdded))

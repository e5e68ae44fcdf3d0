"""Rewards: each loss as its paper has it, on every axis as in one process, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from meshwright.audit.conduct import Auditor
from meshwright.data.preparation import write_documents
from meshwright.data.store import TokenStore
from meshwright.errors import ConfigError
from meshwright.models.heads import with_outputs_of_tokens
from meshwright.objectives.reward import Reward
from meshwright.train.config import RunConfig
from tests.audit.conftest import auditor, folder
from tests.harness import refuses
from tests.objectives.shipped import LORA, PLACES, compare, documents_of, facts, gradients, plain_step
from tests.objectives.test_trial import tried

__all__ = ["auditor", "folder"]

ONE = {"kind": "sequence_classification", "num_labels": 1}
MARGIN = {"margin": {"per": "document"}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bradley_terry": ({}, {}),
    "with margins, centered": ({"center_rewards_coefficient": 0.3}, MARGIN),
    "mse": ({"loss_type": "mse"}, {}),
}
PAD = 3


def run_of(packing: str, arguments: dict[str, Any], tensors: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(
        {
            "output": "nowhere",
            "model": {"config": {"model_type": "llama", "vocab_size": 50}, "head": ONE},
            "data": {"files": ["none"], "sequence_length": 40, "packing": packing, "tensors": tensors},
            "training": {"steps": 1, "global_batch_size": 1, "objective": {"use": "reward", "with": arguments}},
        }
    )


def documents(directory: Path, config: RunConfig, count: int = 7) -> TokenStore:
    """Documents, or pairs of them, of unequal lengths; some end with padding tokens."""
    draw = np.random.default_rng(3)
    tokens, values, seconds = [], [], []
    for number in range(count):
        members = [draw.integers(4, 50, int(draw.integers(2, 12))) for _ in range(2 if config.data.pairs else 1)]
        members[-1][-1 - number % 2 :] = PAD
        tokens.append(np.concatenate(members))
        seconds.append(len(members[0]))
        values.append({name: np.asarray(draw.uniform(-1, 1), np.float32) for name in config.data.values})
    return write_documents(
        directory / "store", tokens, None, sequence_length=40, tensors=config.data.values, values=values,
        seconds=seconds if config.data.pairs else None,
    )  # fmt: skip


def tiny_model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
    config = AutoConfig.for_model("llama", num_key_value_heads=1, num_labels=1, pad_token_id=PAD, **sizes)
    return AutoModelForSequenceClassification.from_config(config).double()


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("packing", ["pack", "pad"])
@pytest.mark.parametrize("case", CASES)
def test_the_papers(tmp_path: Path, case: str, packing: str, microbatches: int) -> None:
    arguments, tensors = CASES[case]
    config = run_of(packing, arguments, tensors)
    store, objective = documents(tmp_path, config), Reward(**arguments)
    theirs, ours = tiny_model(), with_outputs_of_tokens(tiny_model())
    objective.begin(ours, facts(config))
    loss, metrics = plain_step(objective, ours, store, config, microbatches, lambda batch: objective.training([batch], [])[0])
    losses, pairs = [], []
    for first, second, values in documents_of(store):
        chosen, rejected = (theirs(torch.tensor([ids])).logits[0, 0] if ids else None for ids in (first, second))
        if case == "mse":
            losses.append((chosen - float(values["score"])) ** 2)
            continue
        margin, center = float(values.get("margin", 0.0)), arguments.get("center_rewards_coefficient", 0.0)
        losses.append(-torch.log(torch.sigmoid(chosen - rejected - margin)) + center * (chosen + rejected) ** 2)
        pairs.append((float(chosen.detach()), float(rejected.detach())))
    truth = torch.stack(losses).mean()
    truth.backward()
    assert float((loss - truth.detach()).abs()) < 1e-11
    expected, found = gradients(theirs), gradients(ours)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) < 1e-11, name
    if pairs:
        right = sum(chosen > rejected for chosen, rejected in pairs) / len(pairs)
        means = [sum(side) / len(pairs) for side in zip(*pairs, strict=True)]
        assert metrics["accuracy"] == pytest.approx(right)
        assert metrics["margin"] == pytest.approx(means[0] - means[1])
        assert [metrics["rewards/chosen"], metrics["rewards/rejected"]] == pytest.approx(means)


def test_an_axis(auditor: Auditor, folder: Path) -> None:
    compare(auditor, folder, PLACES["cp 2"], {"use": "reward"}, head=ONE)


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("packing", ["pack", "pad"])
@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("label", ["shard 2", "2 x shard 2", "tp 2", "tp 2 seq", "cp 2", "pp 2", "ep 2", "cp 2 x tp 2"])
def test_products(auditor: Auditor, folder: Path, label: str, adapter: bool, packing: str, case: str) -> None:
    if adapter and (label == "ep 2" or packing == "pad"):
        pytest.skip("adapters of experts are slices of their own")
    arguments, tensors = CASES[case]
    part, family = {"use": "reward", "with": arguments}, "mixtral" if "ep" in label else "llama"
    options = {"adapter": LORA} if adapter else {}
    compare(auditor, folder, PLACES[label], part, family, packing=packing, tensors=tensors, microbatches=3, head=ONE, **options)


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_a_margin_of_either_kind_is_read(tmp_path: Path, dtype: str) -> None:
    config = run_of("pack", {}, {"margin": {"per": "document", "dtype": dtype}})
    objective = Reward()
    objective.begin(with_outputs_of_tokens(tiny_model()), facts(config))
    assert objective.has_margin
    with pytest.raises(ConfigError, match="a pair has one margin"):
        objective.begin(with_outputs_of_tokens(tiny_model()), facts(run_of("pack", {}, {"margin": {"per": "token"}})))


# -- what is refused ----------------------------------------------------------------------------------------------------------


def test_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="applies to loss_type bradley_terry"):
        Reward("mse", 0.1)
    for head, words in ((None, "needs a model ForSequenceClassification"), ({**ONE, "num_labels": 2}, "the head gives 2")):
        with refuses(ConfigError, "config.objective") as caught:
            tried(tmp_path, "focal", "training.objective=reward", *([f"model.head={head}"] if head else []))
        assert words in str(caught.value)
    with refuses(ConfigError, "config.objective") as caught:
        tried(tmp_path, "focal", "training.objective=null", f"model.head={ONE}")
    assert "says labels (model.head), not the next token" in str(caught.value)

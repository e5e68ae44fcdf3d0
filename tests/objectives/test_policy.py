"""Policy gradients: each loss as its paper has it, and on every axis as in one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.audit.conduct import Auditor
from meshwright.data.packing import SequenceDataset
from meshwright.data.preparation import write_documents
from meshwright.data.store import TokenStore
from meshwright.errors import ConfigError
from meshwright.models.token_loss import count_tokens
from meshwright.objectives.documents import number_documents
from meshwright.objectives.policy import Policy
from meshwright.train.config import RunConfig
from tests.audit.conftest import auditor, folder
from tests.objectives.shipped import LORA, PLACES, compare, documents_of, facts, gradients, plain_step, tiny_model

__all__ = ["auditor", "folder"]

COLUMNS = {name: {"per": "token"} for name in ("old_log_probs", "advantages", "reference_log_probs")}
REFERENCE = {"reference_log_probs": {"per": "token"}}
LONGEST = 17


def run_of(packing: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "output": "nowhere",
            "model": {"config": {"model_type": "llama", "vocab_size": 50}},
            "data": {"files": ["none"], "sequence_length": 24, "packing": packing, "tensors": COLUMNS},
            "training": {"steps": 1, "global_batch_size": 1},
        }
    )


def rollouts(directory: Path, config: RunConfig) -> TokenStore:
    """Answers of unequal lengths, whose tokens were about as likely before as they are now."""
    draw = np.random.default_rng(5)
    tokens, masks, values = [], [], []
    for _ in range(8):
        length = int(draw.integers(4, 15))
        mask = np.arange(length) >= draw.integers(1, length - 1)
        tokens.append(draw.integers(0, 50, length))
        masks.append(mask)
        logs = {name: draw.normal(-3.9, 0.3, length).astype(np.float32) for name in ("old_log_probs", "reference_log_probs")}
        values.append(logs | {"advantages": np.full(length, draw.normal(), np.float32)})
    return write_documents(directory / "store", tokens, masks, sequence_length=24, tensors=config.data.values, values=values)


def paper(kind: str, options: dict[str, Any], answers: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The loss of a step, from the values of the tokens of each answer."""
    low, high = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (None, 5.0)}.get(kind, (0.2, 0.2))
    low, high = options.get("epsilon", low), options.get("epsilon_high", options.get("epsilon", high))
    losses = []
    for one in answers:
        log_ratio = one["new"] - one["old"]
        r = torch.exp(log_ratio.mean().expand_as(log_ratio) if kind == "gspo" else log_ratio)
        if kind == "importance_sampling":
            loss = -r * one["A"]
        elif kind == "cispo":
            loss = -torch.minimum(r, torch.tensor(high, dtype=r.dtype)).detach() * one["A"] * one["new"]
        else:
            loss = -torch.minimum(r * one["A"], torch.clamp(r, 1 - low, 1 + high) * one["A"])
        d = one["new"] - one["reference"]
        kl = {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) + d - 1}[options.get("kl_estimator", "k3")]
        losses.append(loss + options.get("beta", 0.0) * kl)
    how = options.get("normalization", {"grpo": "sequence", "gspo": "sequence", "dr_grpo": "constant"}.get(kind, "token"))
    if how == "token":
        return torch.cat(losses).sum() / sum(len(loss) for loss in losses)
    if how == "sequence":
        return torch.stack([loss.mean() for loss in losses]).mean()
    return torch.cat(losses).sum() / (len(losses) * options.get("max_completion_length", 24))


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "importance_sampling": ("importance_sampling", {}),
    "ppo": ("ppo", {"epsilon": 0.1}),
    "grpo": ("grpo", {"beta": 0.3}),
    "grpo, k1": ("grpo", {"beta": 0.3, "kl_estimator": "k1", "epsilon_high": 0.5}),
    "dapo, k2": ("dapo", {"beta": 0.3, "kl_estimator": "k2"}),
    "dr_grpo": ("dr_grpo", {"max_completion_length": LONGEST}),
    "bnpo, of answers": ("bnpo", {"normalization": "sequence"}),
    "gspo": ("gspo", {"epsilon": 0.05}),
    "cispo": ("cispo", {"epsilon_high": 1.1}),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("packing", ["pack", "pad"])
@pytest.mark.parametrize("case", CASES)
def test_the_papers(tmp_path: Path, case: str, packing: str, microbatches: int) -> None:
    kind, options = CASES[case]
    config, model = run_of(packing), tiny_model()
    store = rollouts(tmp_path, config)
    objective = Policy(kind, **options)  # type: ignore[arg-type]
    objective.begin(model, facts(config))  # type: ignore[arg-type]
    objective.reference = False  # it is a column
    loss, metrics = plain_step(objective, model, store, config, microbatches)
    ours = gradients(model)
    answers = []
    for number, (tokens, _, values) in enumerate(documents_of(store)):
        assert store.loss_mask is not None
        mask = store.loss_mask[store.offsets[number] : store.offsets[number + 1]]
        places = [place for place in range(1, len(tokens)) if mask[place]]
        logs = torch.log_softmax(model(input_ids=torch.tensor([tokens])).logits[0], -1)
        given = {name: torch.tensor(np.asarray(one[places], np.float64)) for name, one in values.items()}
        answers.append(
            {
                "new": torch.stack([logs[place - 1, tokens[place]] for place in places]),
                "old": given["old_log_probs"],
                "A": given["advantages"],
                "reference": given["reference_log_probs"],
            }
        )
    truth = paper(kind, options, answers)
    truth.backward()
    assert float((loss - truth.detach()).abs()) < 1e-11
    theirs = gradients(model)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert float((ours[name] - gradient).abs().max()) < 1e-11, name
    assert metrics["ratio"] > 0
    if kind not in ("importance_sampling", "cispo"):
        assert 0 < metrics["clipped"] < 1


POLICY = {"use": "policy", "with": {"beta": 0.1}}


@pytest.mark.parametrize("normalization", ["token", "sequence", "constant"])
def test_what_is_counted_are_tokens_where_it_says_so(tmp_path: Path, normalization: Any) -> None:
    """Or else tokens a second would be answers a second."""
    config, objective = run_of("pad"), Policy(normalization=normalization)
    dataset = SequenceDataset(rollouts(tmp_path, config), "train", 24, "pad")
    rows = {name: torch.stack([torch.as_tensor(row[name]) for row in dataset]) for name in ("labels", "position_ids")}
    objective.begin(tiny_model(), facts(config))
    counts = objective.counts([{**rows, **number_documents(rows)}])
    assert (counts == [count_tokens([rows])]) == (objective.unit == "token")


def test_an_axis(auditor: Auditor, folder: Path) -> None:
    compare(auditor, folder, PLACES["cp 2"], {"use": "policy", "with": {"loss_type": "gspo", "epsilon": 0.2}})


@pytest.mark.thorough
@pytest.mark.parametrize("packing", ["pack", "pad"])
@pytest.mark.parametrize("kind", ["grpo", "dapo", "dr_grpo", "gspo"])
@pytest.mark.parametrize("label", ["shard 2", "2 x shard 2", "tp 2", "tp 2 seq", "cp 2", "pp 2", "ep 2", "cp 2 x tp 2"])
def test_products(auditor: Auditor, folder: Path, label: str, kind: str, packing: str) -> None:
    family, objective = "mixtral" if "ep" in label else "llama", {"use": "policy", "with": {"loss_type": kind, "beta": 0.1}}
    compare(auditor, folder, PLACES[label], objective, family, packing=packing, tensors=REFERENCE, microbatches=3)


@pytest.mark.thorough
@pytest.mark.parametrize("label", ["shard 2", "tp 2", "cp 2", "pp 2"])
def test_with_an_adapter(auditor: Auditor, folder: Path, label: str) -> None:
    compare(auditor, folder, PLACES[label], POLICY, adapter=LORA)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"loss_type": "importance_sampling", "epsilon": 0.1}, "epsilon: has no effect, since importance_sampling has no such"),
        ({"kl_estimator": "k1"}, "kl_estimator: has no effect, since beta is 0"),
        ({"max_completion_length": 8}, "max_completion_length: has no effect, since the sum is divided by sequence"),
    ],
)
def test_arguments_without_effect(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Policy(**arguments)

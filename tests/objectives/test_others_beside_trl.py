"""Policy gradients, rewards and distillation beside TRL, on the same rows with the same model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from meshwright.data.packing import IGNORE
from meshwright.data.store import TokenStore
from meshwright.models.heads import with_outputs_of_tokens
from meshwright.objectives.distillation import Distillation
from meshwright.objectives.policy import Policy
from meshwright.objectives.reward import Reward
from tests.objectives.beside_trl import (
    WORDS,
    agree,
    labels_of,
    made,
    padded,
    plain_pairs,
    scored_in_float64,
    sides,
)
from tests.objectives.shipped import documents_of, facts, gradients, plain_step, tiny_model
from tests.objectives.test_distillation import documents as taught
from tests.objectives.test_distillation import run_of as distillation_config
from tests.objectives.test_policy import rollouts
from tests.objectives.test_policy import run_of as policy_config
from tests.objectives.test_reward import MARGIN, PAD
from tests.objectives.test_reward import documents as rewarded
from tests.objectives.test_reward import run_of as reward_config
from tests.objectives.test_reward import tiny_model as tiny_reward_model

trl = pytest.importorskip("trl")


# -- policy -------------------------------------------------------------------------------------------------------------------

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"beta": 0.3}, {"loss_type": "grpo", "beta": 0.3}),
    "ppo": ({}, {"loss_type": "dapo"}),
    "importance_sampling": ({}, {"loss_type": "dapo", "epsilon_low": 1e9, "epsilon_high": 1e9}),
    "dapo": ({"beta": 0.3}, {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.3}),
    "dr_grpo": ({"max_completion_length": 17}, {"loss_type": "dr_grpo", "max_completion_length": 17}),
    "bnpo": ({"epsilon": 0.1}, {"loss_type": "bnpo", "epsilon_low": 0.1, "epsilon_high": 0.1}),
    "cispo": ({"epsilon_high": 1.1, "beta": 0.3}, {"loss_type": "cispo", "epsilon_high": 1.1, "beta": 0.3}),
    "gspo": (
        {"epsilon": 0.05, "epsilon_high": 0.06},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.06},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def grpo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, nn.Module]:
    model = tiny_model()
    rows = [{"prompt": f"Say {word}."} for word in WORDS]
    trainer = made(
        trl.GRPOTrainer, trl.GRPOConfig, tmp_path_factory.mktemp("grpo"), model, rows,
        reward_funcs=lambda completions, **_: [0.0 for _ in completions],
        args={"per_device_train_batch_size": 8, "num_generations": 2},
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    return trainer, scored_in_float64(model)


def of_rollouts(store: TokenStore) -> dict[str, torch.Tensor]:
    """A batch of answers as TRL makes it when it has generated them."""
    assert store.loss_mask is not None
    parts: dict[str, list[Any]] = {name: [] for name in ("prompt", "completion", "old", "reference", "advantages")}
    for number, (tokens, _, values) in enumerate(documents_of(store)):
        mask = store.loss_mask[store.offsets[number] : store.offsets[number + 1]]
        begin = int(np.argmax(mask))
        assert mask[begin:].all()
        parts["prompt"].append(tokens[:begin])
        parts["completion"].append(tokens[begin:])
        parts["old"].append(torch.tensor(values["old_log_probs"][begin:], dtype=torch.float64))
        parts["reference"].append(torch.tensor(values["reference_log_probs"][begin:], dtype=torch.float64))
        parts["advantages"].append(float(values["advantages"][0]))
    pad = nn.utils.rnn.pad_sequence
    return {
        "prompt_ids": padded(parts["prompt"], left=True),
        "prompt_mask": padded([[1] * len(one) for one in parts["prompt"]], left=True),
        "completion_ids": padded(parts["completion"]),
        "completion_mask": padded([[1] * len(one) for one in parts["completion"]]),
        "old_per_token_logps": pad(parts["old"], batch_first=True),
        "ref_per_token_logps": pad(parts["reference"], batch_first=True),
        "advantages": torch.tensor(parts["advantages"], dtype=torch.float64),
        "num_items_in_batch": torch.tensor(float(sum(map(len, parts["completion"])))),
    }


def weigh_divergence(trainer: Any, model: nn.Module, batch: dict[str, torch.Tensor], patch: pytest.MonkeyPatch) -> None:
    """TRL weighs the divergence of a token with its ratio unless told otherwise (grpo_trainer.py:3104; DeepSeek-V3.2)."""
    plain = trainer._compute_loss(model, batch)
    patch.setattr(trainer.args, "use_bias_correction_kl", True)
    weighed = trainer._compute_loss(model, batch)
    patch.setattr(trainer.args, "use_bias_correction_kl", False)
    ids, mask = (torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], 1) for name in ("ids", "mask"))
    mask_of = batch["completion_mask"]
    labels = torch.cat([torch.full_like(batch["prompt_ids"], IGNORE), batch["completion_ids"].where(mask_of > 0, IGNORE)], 1)
    new = model(input_ids=ids, attention_mask=mask, labels=labels).log_probs[:, -mask_of.shape[1] :]
    away = new - batch["ref_per_token_logps"]
    added = ((new - batch["old_per_token_logps"]).exp() - 1) * (torch.exp(-away) + away - 1) * mask_of
    mean = (added.sum(1) / mask_of.sum(1)).mean() if trainer.loss_type == "grpo" else added.sum() / mask_of.sum()
    assert abs(float(weighed - plain)) > 1e-5
    assert float((weighed - plain - trainer.beta * mean).abs()) < 1e-11


@pytest.mark.parametrize("kind", KINDS)
def test_policy(tmp_path: Path, grpo: tuple[Any, nn.Module], monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    (trainer, theirs_model), model, config = grpo, tiny_model(), policy_config("pack")
    options, attributes = KINDS[kind]
    store, objective = rollouts(tmp_path, config), Policy(kind, **options)  # type: ignore[arg-type]
    objective.begin(model, facts(config))  # type: ignore[arg-type]
    objective.reference = False
    loss, _ = plain_step(objective, model, store, config, 3)
    batch = of_rollouts(store)
    monkeypatch.setattr(trainer.args, "use_bias_correction_kl", False)
    defaults = {"epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0, "importance_sampling_level": "token"}
    for name, value in {**defaults, **attributes}.items():
        monkeypatch.setattr(trainer, name, value)
    theirs_model.zero_grad()
    theirs = trainer._compute_loss(theirs_model, batch)
    theirs.backward()
    agree(loss, theirs, gradients(model), theirs_model)
    if trainer.beta:
        weigh_divergence(trainer, theirs_model, batch, monkeypatch)
    # Over two microbatches, TRL's bnpo is the mean of their means; ours is divided once, by all tokens of the step.
    halves = [
        {name: one if name == "num_items_in_batch" else one[part] for name, one in batch.items()}
        for part in (slice(0, 4), slice(4, 8))
    ]
    monkeypatch.setattr(trainer, "current_gradient_accumulation_steps", 2)
    monkeypatch.setattr(trainer.args, "steps_per_generation", 2)
    parts = sum(float(trainer._compute_loss(theirs_model, half).detach()) for half in halves)
    assert (abs(parts - float(loss)) < 1e-11) == (kind != "bnpo")


# -- rewards and divergences --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("center", [None, 0.3])
def test_reward(tmp_path: Path, center: float | None) -> None:
    arguments = {} if center is None else {"center_rewards_coefficient": center}
    config = reward_config("pack", arguments, MARGIN)
    store, objective = rewarded(tmp_path, config), Reward(**arguments)
    model, ours = tiny_reward_model(), with_outputs_of_tokens(tiny_reward_model())
    objective.begin(ours, facts(config))
    loss, _ = plain_step(objective, ours, store, config, 3, lambda batch: objective.training([batch], [])[0])
    trainer = made(trl.RewardTrainer, trl.RewardConfig, tmp_path, model, plain_pairs(), args=arguments)
    model.config.pad_token_id = PAD  # the trainer takes that of its tokenizer
    members = [ids for ids, _, _ in documents_of(store)] + [ids for _, ids, _ in documents_of(store)]
    batch = {
        "input_ids": padded(members, PAD),
        "attention_mask": padded([[1] * len(ids) for ids in members]),
        "margin": torch.tensor([float(values["margin"]) for *_, values in documents_of(store)], dtype=torch.float64),
    }
    theirs = trainer.compute_loss(model, batch)
    theirs.backward()
    agree(loss, theirs, gradients(ours), model)


@pytest.mark.parametrize(("divergence", "beta"), [("forward_kl", 0.0), ("reverse_kl", 1.0), ("js", 0.3)])
def test_distillation(tmp_path: Path, divergence: str, beta: float) -> None:
    """Over the whole vocabulary, with TRL's order of both in the mixture of ``js``."""
    from trl.experimental.gkd import GKDTrainer

    options = {"divergence": divergence, "temperature": 1.5, **({"beta": beta} if divergence == "js" else {})}
    config, model, teacher = distillation_config("pack", 50, **options), tiny_model(0), tiny_model(1)
    store = taught(tmp_path, config, teacher, 50)
    objective = Distillation(**options)
    objective.begin(model, facts(config))
    loss, _ = plain_step(objective, model, store, config, 3)
    found = gradients(model)
    members = [(ids, mask) for ids, mask in sides(store) if ids]
    ids, labels = padded([one for one, _ in members]), padded(labels_of(members), IGNORE)
    with torch.no_grad():
        said = teacher(input_ids=ids).logits[:, :-1]
    theirs = GKDTrainer.generalized_jsd_loss(model(input_ids=ids).logits[:, :-1], said, labels[:, 1:], beta, 1.5)
    theirs.backward()
    agree(loss, theirs, found, model, close=1e-6)  # what a teacher says is stored in float32

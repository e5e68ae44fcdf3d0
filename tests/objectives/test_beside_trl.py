"""Our losses beside those of TRL, on the same rows with the same model. What differs is said in docs/objectives.md."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.data.packing import IGNORE
from meshwright.data.preparation import prepare
from meshwright.data.store import TokenStore
from meshwright.data.tokenizer import train_tokenizer
from meshwright.objectives.preference import Kto, Preference
from meshwright.train.config import RunConfig
from tests.objectives.beside_trl import (
    TEMPLATE,
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
from tests.objectives.test_preference import pairs as random_pairs
from tests.objectives.test_preference import run_of as pairs_config
from tests.objectives.test_preference import with_reference

trl = pytest.importorskip("trl")


def rows() -> list[dict[str, Any]]:
    def side(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    return [
        {
            "prompt": side("user", f"Mix {a} and {WORDS[number]}."),
            "chosen": side("assistant", f"You get {a} {WORDS[number]}."),
            "rejected": side("assistant", f"No {'no ' * (number % 3)}{a}!"),
        }
        for number, a in enumerate(["grey", "pink", "teal", "gold", "lime", "plum"])
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"loss_type": "dpo", "beta": 0.3}, {"loss_type": "sigmoid", "beta": 0.3}),
        ({"loss_type": "ipo", "beta": 0.3}, {"loss_type": "ipo", "beta": 0.3}),
        ({"loss_type": "hinge", "beta": 0.3}, {"loss_type": "hinge", "beta": 0.3}),
        (
            {"loss_type": "dpo", "beta": 0.3, "rpo_alpha": 0.5},
            {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "beta": 0.3},
        ),
        # TRL's sigmoid does not read label_smoothing (dpo_trainer.py:1387), and its robust loss (line 1428) is another one.
        (
            {"loss_type": "dpo", "beta": 0.3, "label_smoothing": 0.1},
            {"loss_type": ["sigmoid", "robust"], "loss_weights": [1.8, -0.8], "label_smoothing": 0.1, "beta": 0.3},
        ),
    ],
    ids=["dpo", "ipo", "hinge", "rpo", "cdpo"],
)
def test_dpo(tmp_path: Path, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    from datasets import Dataset

    tokenizer = train_tokenizer([str(row) for row in rows()], 300)
    tokenizer.chat_template = TEMPLATE
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    model, reference = (tiny_model(seed, vocab_size=len(tokenizer)).float() for seed in (0, 1))
    config = RunConfig.model_validate(
        {
            "output": "nowhere",
            "model": {"config": {"model_type": "llama", "vocab_size": len(tokenizer)}},
            "data": {"files": [str(path)], "sequence_length": 256, "eval_fraction": 0.0},
            "training": {"steps": 1, "global_batch_size": 1, "objective": {"use": "preference", "with": ours}},
        }
    )
    store = prepare(config.data, tokenizer, tmp_path / "store", 0)
    objective = Preference(**ours)
    objective.begin(model, facts(config))  # type: ignore[arg-type]
    objective.reference = False  # it comes with the batches
    loss, metrics = plain_step(objective, model, store, config, 1, with_reference(reference))
    found = gradients(model)

    arguments = trl.DPOConfig(
        output_dir=str(tmp_path / "trl"),
        per_device_train_batch_size=len(rows()),
        use_cpu=True,
        bf16=False,
        report_to=[],
        max_length=None,
        gradient_checkpointing=False,
        disable_dropout=True,
        **theirs,
    )
    trainer = trl.DPOTrainer(
        model=model, ref_model=reference, args=arguments, train_dataset=Dataset.from_list(rows()), processing_class=tokenizer
    )
    batch = next(iter(trainer.get_train_dataloader()))
    other, _ = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    other.backward()
    assert float(loss) == pytest.approx(float(other.detach()), rel=1e-5)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-6)
    assert 0 <= metrics["rewards/accuracies"] <= 1


def ours_of_pairs(tmp_path: Path, options: dict[str, Any], model: nn.Module, reference: nn.Module) -> Any:
    """The loss and the gradients of a step of ours on random pairs, which are returned too."""
    config = pairs_config("pack", **options)
    store = random_pairs(tmp_path, config)
    objective = (Kto if options["loss_type"] == "kto" else Preference)(**options)
    objective.begin(model, facts(config))  # type: ignore[arg-type]
    objective.reference = False
    loss, _ = plain_step(objective, model, store, config, 3, with_reference(reference))
    return loss, gradients(model), store


def test_kto(tmp_path: Path) -> None:
    """The same baseline, that of mismatched answers; TRL's is that of a microbatch (trainer/kto_trainer.py:1443)."""
    model, reference = tiny_model(0), tiny_model(1)
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
    loss, found, store = ours_of_pairs(tmp_path, {"loss_type": "kto", "beta": 0.4, **weights}, model, reference)
    rows = [{"prompt": f"Say {word}.", "completion": f" It is {word}.", "label": n % 2 == 0} for n, word in enumerate(WORDS)]
    trainer = made(
        trl.KTOTrainer, trl.KTOConfig, tmp_path, model, rows, ref_model=reference,
        args={"beta": 0.4, "per_device_train_batch_size": 4, "max_length": None, **weights},
    )  # fmt: skip
    scored_in_float64(model), scored_in_float64(reference)
    members = sides(store)
    own, other = members[: len(members) // 2], members[len(members) // 2 :]
    batch: dict[str, torch.Tensor] = {"label": torch.tensor([bool(values["label"]) for *_, values in documents_of(store)])}
    for prefix, answers in (("", own), ("KL_", other)):
        batch[f"{prefix}input_ids"] = padded([ids for ids, _ in answers])
        batch[f"{prefix}attention_mask"] = padded([[1] * len(ids) for ids, _ in answers])
        batch[f"{prefix}completion_mask"] = padded([mask for _, mask in answers])
    theirs = trainer.compute_loss(model, batch)
    theirs.backward()
    agree(loss, theirs, found, model)
    # The mean over two microbatches of TRL has two baselines, and is another loss.
    halves = [{name: one[part] for name, one in batch.items()} for part in (slice(0, 4), slice(4, None))]
    parts = [float(trainer.compute_loss(model, half).detach()) * len(half["label"]) / len(batch["label"]) for half in halves]
    assert abs(sum(parts) - float(theirs)) > 1e-6
    # It rotates the answers within a microbatch (kto_trainer.py:1150): the first row of each gets its last answer.
    shown = trainer.train_dataset
    for begin in (0, 4):
        answers = [shown[place]["completion_ids"] for place in range(begin, begin + 4)]
        assert [shown[begin + place]["KL_completion_ids"] for place in range(4)] == [answers[-1], *answers[:-1]]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("kind", "alpha"), [("cpo", 1.0), ("cpo", 0.4), ("simpo", 0.0), ("simpo", 0.3)])
def test_cpo_and_simpo(tmp_path: Path, kind: str, alpha: float, smoothing: float) -> None:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    model = tiny_model(0)
    options = {"beta": 0.6, "label_smoothing": smoothing, "cpo_alpha": alpha}
    margin = {"simpo_gamma": 0.3} if kind == "simpo" else {}
    loss, found, store = ours_of_pairs(tmp_path, {"loss_type": kind, **options, **margin}, model, tiny_model(1))
    theirs_options = {**options, **margin, "loss_type": "simpo" if kind == "simpo" else "sigmoid"}
    trainer = made(CPOTrainer, CPOConfig, tmp_path, model, plain_pairs(), args=theirs_options)
    theirs, _ = trainer.get_batch_loss_metrics(model, of_members(store))
    theirs.backward()
    agree(loss, theirs, found, model)


def test_orpo(tmp_path: Path) -> None:
    """The odds are alike. TRL adds the loss of chat and prompt (orpo_trainer.py:800), ours that of the answer."""
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    model = tiny_model(0)
    loss, found, store = ours_of_pairs(tmp_path, {"loss_type": "orpo", "beta": 0.5}, model, tiny_model(1))
    trainer = made(ORPOTrainer, ORPOConfig, tmp_path, model, plain_pairs(), args={"beta": 0.5})
    theirs, _ = trainer.get_batch_loss_metrics(model, of_members(store))
    chosen = sides(store)[: len(store.lengths)]

    def plain(labels: list[list[int]]) -> torch.Tensor:
        total, tokens = torch.zeros((), dtype=torch.float64), 0
        for (ids, _), wanted in zip(chosen, labels, strict=True):
            logits, target = model(input_ids=torch.tensor([ids])).logits[0, :-1], torch.tensor(wanted[1:])
            total = total + nn.functional.cross_entropy(logits, target, reduction="sum", ignore_index=IGNORE)
            tokens += int((target != IGNORE).sum())
        return total / tokens

    whole, answer = plain([ids for ids, _ in chosen]), plain(labels_of(chosen))
    assert abs(float(whole.detach()) - float(answer.detach())) > 1e-3
    same = theirs - whole + answer
    same.backward()
    agree(loss, same, found, model, close=1e-6)  # TRL computes the odds in float32 (orpo_trainer.py:691)


def of_members(store: TokenStore) -> dict[str, torch.Tensor]:
    """A batch of pairs as TRL's collator makes it."""
    members, batch = sides(store), {}
    for name, part in (("chosen", members[: len(members) // 2]), ("rejected", members[len(members) // 2 :])):
        batch[f"{name}_input_ids"] = padded([ids for ids, _ in part])
        batch[f"{name}_attention_mask"] = padded([[1] * len(ids) for ids, _ in part])
        batch[f"{name}_labels"] = padded(labels_of(part), IGNORE)
    return batch

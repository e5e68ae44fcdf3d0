"""Our losses beside those of TRL, on the same rows with the same model. What differs is said in docs/objectives.md."""

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.data.preparation import prepare
from meshwright.data.tokenizer import train_tokenizer
from meshwright.objectives.preference import Preference
from meshwright.train.config import RunConfig
from tests.objectives.shipped import facts, gradients, plain_step, tiny_model
from tests.objectives.test_preference import with_reference

trl = pytest.importorskip("trl")

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
WORDS = ["red", "green", "blue", "black", "white", "brown", "amber", "ivory"]


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
    ],
    ids=["dpo", "ipo", "hinge", "rpo"],
)
def test_dpo(tmp_path: Path, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    import json

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
    assert float(loss) == pytest.approx(float(other), rel=1e-5)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-6)
    assert 0 <= metrics["rewards/accuracies"] <= 1

"""What the tests beside TRL share: its trainers, whose loss is given a batch, and our rows as its collators make them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from meshwright.data.packing import IGNORE
from meshwright.data.store import TokenStore
from meshwright.data.tokenizer import train_tokenizer
from tests.objectives.shipped import documents_of, gradients

__all__ = ["TEMPLATE", "WORDS", "agree", "labels_of", "made", "padded", "plain_pairs", "scored_in_float64", "sides"]

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
WORDS = ["red", "green", "blue", "black", "white", "brown", "amber", "ivory"]


def plain_pairs() -> list[dict[str, Any]]:
    return [{"prompt": f"Say {one}.", "chosen": f" It is {one}.", "rejected": " No."} for one in WORDS]


def made(kind: Any, config: Any, folder: Path, model: nn.Module, rows: list[dict[str, Any]], **more: Any) -> Any:
    """A trainer of TRL. Its data are rows that nobody trains on: a batch is given to its loss."""
    from datasets import Dataset

    arguments = config(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
        **more.pop("args", {}),
    )
    tokenizer = train_tokenizer([str(row) for row in rows], 300)
    tokenizer.chat_template = TEMPLATE
    return kind(model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, **more)


def scored_in_float64(model: nn.Module) -> nn.Module:
    """TRL scores tokens with a kernel in float32 (kernels/chunked_logprob.py:235); this is the same, in the model's dtype."""
    inner = type(model).forward

    def forward(input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        places = (attention_mask.cumsum(1) - 1).clamp(min=0)
        logits = inner(model, input_ids=input_ids, attention_mask=attention_mask, position_ids=places).logits[:, :-1]
        logs, learned = logits.log_softmax(-1), labels[:, 1:] != IGNORE
        own = logs.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0].masked_fill(~learned, 0)
        entropy = -(logs.exp() * logs).sum(-1).masked_fill(~learned, 0)
        return SimpleNamespace(log_probs=own, entropy=entropy, mean_logits=logits.mean(-1), aux_loss=None)

    model.forward = forward
    return model


def padded(rows: list[Any], fill: int = 0, *, left: bool = False) -> torch.Tensor:
    longest = max(len(row) for row in rows)
    lines = [
        [fill] * (longest - len(row)) * left + [int(one) for one in row] + [fill] * (longest - len(row)) * (not left)
        for row in rows
    ]
    return torch.tensor(lines)


def sides(store: TokenStore) -> list[tuple[list[int], list[bool]]]:
    """Tokens, and which are learned: of all first members, then of all second ones."""
    assert store.loss_mask is not None
    found: tuple[list[Any], list[Any]] = ([], [])
    for number, (first, second, _) in enumerate(documents_of(store)):
        begin = int(store.offsets[number])
        mask = [bool(one) for one in store.loss_mask[begin : begin + len(first) + len(second)]]
        found[0].append((first, mask[: len(first)]))
        found[1].append((second, mask[len(first) :]))
    return found[0] + found[1]


def labels_of(members: list[tuple[list[int], list[bool]]]) -> list[list[int]]:
    return [[token if learned else IGNORE for token, learned in zip(ids, mask, strict=True)] for ids, mask in members]


def agree(
    ours: torch.Tensor, theirs: torch.Tensor, found: dict[str, torch.Tensor], model: nn.Module, close: float = 1e-11
) -> None:
    """Compare two losses, and gradients with those that the model has."""
    assert float((ours - theirs).detach().abs()) < close
    gradients_of_theirs = gradients(model)
    assert found.keys() == gradients_of_theirs.keys()
    for name, gradient in gradients_of_theirs.items():
        assert float((found[name] - gradient).abs().max()) < close, name

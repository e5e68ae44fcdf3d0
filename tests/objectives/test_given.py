"""What is given to an objective, on every axis against one process: loss and gradients, fp64."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from maintain.cells import LAYOUTS, Place, Variant, family_case
from meshwright.audit.conduct import Auditor
from meshwright.objectives import given
from meshwright.objectives.documents import BEGIN, END, number_documents
from meshwright.plan.given.closed_choices import PipelineSchedule, SyncPolicy
from meshwright.user_code import PartConfig
from tests.audit.conftest import auditor, folder

__all__ = ["auditor", "folder"]

PLACES = {place.label: place for place in LAYOUTS}
LORA = {"rank": 2, "targets": "all-linear"}


def compare(
    auditor: Auditor,
    folder: Path,
    place: Place,
    name: str,
    family: str = "llama",
    chunks: bool = True,
    layers: int | None = None,
    microbatches: int = 2,
    **options: Any,
) -> None:
    variant = Variant(SyncPolicy.REDUCE_EACH, "float64", microbatches, False, False)
    case = family_case(family, place, variant, folder, loss_chunks=3 if chunks else 0, **options)
    objective = PartConfig(use=f"tests.objectives.parts:{name}")
    training, model = case.config.training.model_copy(update={"objective": objective}), case.config.model
    if layers is not None:
        model = model.model_copy(update={"config": {**(model.config or {}), "num_hidden_layers": layers}})
    changed = case.config.model_copy(update={"training": training, "model": model})
    report = auditor.audit(replace(case, config=changed), place.world_size)
    assert report.passed, report.verdict
    assert report.worst_gradient < 1e-12


AXES = [
    ("shard 2", "llama", "Before", {"adapter": LORA}),
    ("shard 2", "llama", "Tokens", {}),
    ("replicate 2", "llama", "Vectors", {}),
    ("tp 2", "llama", "Tokens", {"loss_parallel": True}),
    ("tp 2 seq", "llama", "Vectors", {}),
    ("cp 2", "llama", "Tokens", {}),
    ("cp 2", "llama", "Vectors", {"context_balance": "contiguous"}),
    ("pp 2", "llama", "Tokens", {}),
    ("ep 2", "mixtral", "Vectors", {}),
    ("tp 2", "llama", "smooth", {}),
    ("tp 2", "llama", "Before", {"adapter": LORA}),
    ("tp 2", "llama", "Compared", {}),
    ("pp 2", "llama", "Before", {"adapter": LORA}),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("label", "family", "name", "options"), AXES, ids=lambda value: str(value).replace(" ", "-"))
def test_every_axis(auditor: Auditor, folder: Path, label: str, family: str, name: str, options: dict[str, Any]) -> None:
    compare(auditor, folder, PLACES[label], name, family, chunks=name in ("Tokens", "Before") and "pp" not in label, **options)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["Tokens", "Vectors", "smooth"])
@pytest.mark.parametrize(
    "label", ["shard 2", "cp 2 x tp 2", "cp 2 x shard 2", "2 x shard 2", "tp 2 x shard 2", "ep 2 x shard 2"]
)
def test_products(auditor: Auditor, folder: Path, label: str, name: str) -> None:
    compare(auditor, folder, PLACES[label], name, "mixtral" if "ep" in label else "llama", chunks=False)


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", [schedule for schedule in PipelineSchedule if schedule.single or schedule.splits])
def test_schedules(auditor: Auditor, folder: Path, schedule: PipelineSchedule) -> None:
    pipeline = {"schedule": schedule, "stages_per_rank": None}
    least = schedule.least(2, 2)
    compare(auditor, folder, PLACES["pp 2"], "Tokens", chunks=False, layers=4, microbatches=least, pipeline=pipeline)


# -- alone --------------------------------------------------------------------------------------------------------------------


def batch_of(labels: list[list[int]], positions: list[list[int]]) -> dict[str, torch.Tensor]:
    tensors = torch.tensor(labels), torch.tensor(positions)
    return {"input_ids": torch.arange(tensors[0].numel()).view_as(tensors[0]), "labels": tensors[0], "position_ids": tensors[1]}


def test_documents_end_with_what_is_learned() -> None:
    none = -100
    batch = batch_of(
        [[5, 6, none, 7, none, none], [none, 5, 6, none, none, none], [none] * 6],
        [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2]],
    )
    found = number_documents(batch)
    assert found["documents"].tolist() == [[0, 0, 0, 1, 1, -1], [0, 0, 0, 0, -1, -1], [-1] * 6]
    assert found["document_marks"].tolist() == [[BEGIN, 0, END, BEGIN, END, 0], [BEGIN, 0, 0, END, 0, 0], [0] * 6]
    assert found["document_exists"].tolist() == [[True, True], [True, False], [False, False]]
    assert given.document_count([found]) == 3
    whole = {**batch, **found}
    sums = given.per_document(torch.arange(18.0).view(3, 6), whole)
    assert sums.tolist() == [[3.0, 7.0], [30.0, 0.0], [0.0, 0.0]]
    assert float(given.document_sum(sums + 1, whole)) == 43.0
    states = torch.arange(36.0).view(3, 6, 2)
    assert given.pooled(states, whole, "last")[0].tolist() == [[4.0, 5.0], [8.0, 9.0]]
    assert given.pooled(states, whole)[0].tolist() == [[2.0, 3.0], [7.0, 8.0]]


def test_entropies_and_their_gradients() -> None:
    from meshwright.models.token_loss import token_entropies, token_log_probs

    logits, labels = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True), torch.tensor([[1, 2, -100], [0, -100, 6]])
    probabilities = logits.softmax(-1)
    assert torch.allclose(token_entropies(logits, labels), torch.distributions.Categorical(probabilities).entropy())
    expected = probabilities.log().gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(labels < 0, 0)
    assert torch.allclose(token_log_probs(logits, labels), expected)
    assert nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum").allclose(
        -token_log_probs(logits.float(), labels).sum()
    )

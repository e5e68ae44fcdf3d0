"""Columns of the data in an objective: on every axis against one process, and found, refused and named when it is tried."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from maintain.cells import Place, Variant, family_case
from meshwright.audit.conduct import Auditor
from meshwright.audit.data import draw_documents
from meshwright.data.rows.columns import TensorColumn
from meshwright.errors import ConfigError
from meshwright.objectives import given
from meshwright.objectives.documents import number_documents
from meshwright.objectives.trying.invented import invented
from meshwright.plan.given.closed_choices import ContextBalance, SyncPolicy
from meshwright.train.run_objective import columns_of
from meshwright.user_code import PartConfig
from tests.audit.conftest import auditor, folder
from tests.harness import refuses
from tests.objectives.test_given import PLACES
from tests.objectives.test_trial import config, tried

__all__ = ["auditor", "folder"]

TENSORS = {
    "weight": {"per": "token"},
    "teacher": {"per": "token", "width": 3},
    "scores": {"per": "document", "width": 2},
    "kind": {"per": "document", "dtype": "int64"},
    "reference_log_probs": {"per": "token"},
}
SET = "data.tensors=" + str(TENSORS).replace("'", "")


def compare(auditor: Auditor, folder: Path, place: Place, packing: str, chunks: bool = False, **options: Any) -> None:
    case = family_case(
        "llama", place, Variant(SyncPolicy.REDUCE_EACH, "float64", 2, False, False), folder, loss_chunks=3 if chunks else 0,
        **options,
    )  # fmt: skip
    tensors = {name: TensorColumn.model_validate(column) for name, column in TENSORS.items()}
    run = case.config
    length, vocabulary = run.data.sequence_length, run.model.config["vocab_size"]  # type: ignore[index]
    count = 4 * run.training.global_batch_size * case.steps
    longest = length if packing == "pack" else 2 * length
    store = draw_documents(vocabulary, length, count, 0, folder / f"columns-{packing}", longest, tensors=tensors)
    changed = run.model_copy(
        update={
            "training": run.training.model_copy(update={"objective": PartConfig(use="tests.objectives.parts:Scored")}),
            "data": run.data.model_copy(update={"packing": packing, "tensors": tensors}),
        }
    )
    report = auditor.audit(replace(case, config=changed, store=store.directory), place.world_size)
    assert report.passed, report.verdict
    assert report.worst_gradient < 1e-12


def test_an_axis(auditor: Auditor, folder: Path) -> None:
    compare(auditor, folder, PLACES["cp 2"], "pack", chunks=True)


@pytest.mark.thorough
@pytest.mark.parametrize("packing", ["pack", "pad"])
@pytest.mark.parametrize(
    ("label", "options"),
    [
        ("cp 2", {"context_balance": ContextBalance.CONTIGUOUS}),
        ("cp 2", {"context_balance": ContextBalance.ZIGZAG}),
        ("tp 2", {"loss_parallel": True}),
        ("tp 2 seq", {}),
        ("pp 2", {}),
        ("shard 2", {}),
        ("replicate 2", {}),
        ("cp 2 x tp 2", {}),
        ("cp 2 x shard 2", {}),
        ("pp 2 x cp 2", {}),
    ],
    ids=str,
)
def test_every_axis(auditor: Auditor, folder: Path, label: str, packing: str, options: dict[str, Any]) -> None:
    compare(auditor, folder, PLACES[label], packing, **options)


# -- tried --------------------------------------------------------------------------------------------------------------------


def test_what_an_objective_reads_is_found(tmp_path: Path) -> None:
    scored = tried(tmp_path, "Scored", SET)
    assert scored.reads == TENSORS.keys()
    assert (scored.documents, scored.reference, scored.shares, scored.packs) == (True, False, True, True)
    weighted = tried(tmp_path, "weighted", "data.tensors={weight: {per: token}}")
    assert (weighted.reads, weighted.documents) == ({"weight"}, False)
    assert config(tmp_path, "weighted", "data.tensors={weight: {per: token}}").own_parts[-1] == (
        "columns: weight (per token, float32)"
    )


@pytest.mark.parametrize("name", ["weighted", "ReadsInTraining"])
def test_a_column_that_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    with refuses(ConfigError, "objective.batch") as caught:
        tried(tmp_path, name, "data.tensors={reward: {per: token}}")
    assert "legal are input_ids, labels, position_ids, reward, reference_log_probs, document" in str(caught.value)
    assert "'weight' is not in a batch" in str(caught.value) or "'weigth' is not in a batch" in str(caught.value)


def test_a_reference_is_a_column_or_a_model_without_adapters(tmp_path: Path) -> None:
    assert not tried(tmp_path, "Before", "data.tensors={reference_log_probs: {per: token}}").reference
    with refuses(ConfigError, "objective.reference") as caught:
        tried(tmp_path, "Before")
    assert "data.tensors.reference_log_probs" in str(caught.value)
    with refuses(ConfigError, "data.tensors"):
        config(tmp_path, "Before", "data.tensors={reference_log_probs: {per: document}}")


def test_values_of_documents_lie_as_sums_over_documents(tmp_path: Path) -> None:
    none = -100
    batch = {
        "input_ids": torch.arange(12).view(2, 6),
        "labels": torch.tensor([[1, 2, none, none, 5, none], [none, 5, 6, none, none, none]]),
        "position_ids": torch.tensor([[0, 1, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5]]),
        "scores": torch.tensor([[7.0, 7, 8, 9, 9, 9], [4, 4, 4, 4, 4, 4]])[..., None].expand(2, 6, 2),
    }
    found = number_documents(batch, spread=["scores"])
    assert found["scores"][..., 0].tolist() == [[7.0, 9.0], [4.0, 0.0]]  # the second document has nothing to learn
    whole = {**batch, **found}
    spread = given.per_token(whole["scores"], whole)[..., 1]
    assert spread.tolist() == [[7, 7, 0, 9, 9, 9], [4, 4, 4, 4, 0, 0]]
    ones = given.per_document(torch.ones(2, 6), whole)
    assert ones.shape == found["scores"].shape[:2]
    assert number_documents(batch, 4, ["scores"])["scores"].shape == (2, 4, 2)
    columns = columns_of(config(tmp_path, "Scored", SET))
    made = invented(columns, batch)
    assert {name: tuple(tensor.shape) for name, tensor in made.items()} == {
        "weight": (2, 6), "teacher": (2, 6, 3), "scores": (2, 6, 2), "kind": (2, 6), "reference_log_probs": (2, 6)
    }  # fmt: skip
    assert made["weight"][0, 2] == 0
    assert (made["reference_log_probs"] <= 0).all()

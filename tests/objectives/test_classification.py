"""Labels of texts: on every axis against one process, and against transformers' own forward of each text alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from maintain.cells import LAYOUTS, Place, Variant, family_case
from meshwright.audit.conduct import Auditor
from meshwright.audit.data import draw_documents
from meshwright.data.rows.columns import TensorColumn
from meshwright.plan.given.closed_choices import SyncPolicy
from meshwright.user_code import PartConfig
from tests.audit.conftest import auditor, folder

__all__ = ["auditor", "folder"]

PLACES = {place.label: place for place in LAYOUTS}
LORA = {"rank": 2, "targets": "all-linear"}
USE = "meshwright.objectives.classification:Classification"
KINDS = {
    "single_label_classification": {"num_labels": 2, "label": {"per": "document", "dtype": "int64"}},
    "multi_label_classification": {"num_labels": 3, "label": {"per": "document", "width": 3}},
    "regression": {"num_labels": 1, "label": {"per": "document"}},
}


def compare(
    auditor: Auditor, folder: Path, place: Place, kind: str, family: str = "llama", packing: str = "pack",
    microbatches: int = 2, **options: Any,
) -> None:  # fmt: skip
    variant = Variant(SyncPolicy.REDUCE_EACH, "float64", microbatches, False, False)
    case = family_case(family, place, variant, folder, packing=packing, **options)
    run, facts = case.config, KINDS[kind]
    head = {"kind": "sequence_classification", "num_labels": facts["num_labels"], "problem_type": kind}
    tensors = {"label": TensorColumn.model_validate(facts["label"])}
    model = type(run.model).model_validate({**run.model.model_dump(), "head": head})
    length, vocabulary = run.data.sequence_length, run.model.config["vocab_size"]  # type: ignore[index]
    store = draw_documents(
        vocabulary, length, 4 * run.training.global_batch_size * case.steps, 0, folder / f"{kind}-{packing}", length,
        tensors=tensors,
    )  # fmt: skip
    changed = run.model_copy(
        update={
            "model": model,
            "training": run.training.model_copy(update={"objective": PartConfig(use=USE)}),
            "data": run.data.model_copy(update={"packing": packing, "tensors": tensors}),
        }
    )
    report = auditor.audit(replace(case, config=changed, store=store.directory), place.world_size)
    assert report.passed, report.verdict
    assert report.worst_gradient < 1e-12
    assert any(row.name == "score.weight" for row in report.rows)


def test_an_axis(auditor: Auditor, folder: Path) -> None:
    compare(auditor, folder, PLACES["cp 2"], "single_label_classification")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packing", ["pack", "pad"])
@pytest.mark.parametrize(
    "label", ["shard 2", "2 x shard 2", "tp 2", "tp 2 seq", "cp 2", "pp 2", "ep 2", "cp 2 x tp 2", "cp 2 x shard 2"]
)
def test_every_axis(auditor: Auditor, folder: Path, label: str, packing: str, kind: str) -> None:
    compare(auditor, folder, PLACES[label], kind, "mixtral" if "ep" in label else "llama", packing)


@pytest.mark.thorough
@pytest.mark.parametrize("label", ["shard 2", "tp 2", "pp 2", "cp 2"])
def test_beside_adapters(auditor: Auditor, folder: Path, label: str) -> None:
    compare(auditor, folder, PLACES[label], "multi_label_classification", adapter=LORA)

"""Block diffusion over ranks that share sequences and canvases, against one process; and bugs that only this can have."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from maintain.cells import LAYOUTS, Variant, family_case
from meshwright.audit.case import Case
from meshwright.audit.causes.diagnose import Kind
from meshwright.audit.conduct import Auditor
from meshwright.models.diffusion_gemma.block_diffusion_options import DiffusionConfig
from meshwright.plan.given.closed_choices import SyncPolicy
from tests.audit import plants

PLACES = {place.label: place for place in LAYOUTS}


def case(folder: Path, place: str, mode: str = "all_blocks", variant: Variant | None = None, **parallel: Any) -> Case:
    chosen = variant or Variant(SyncPolicy.DEFER, "float64", 2, False, False)
    built = family_case("diffusion_gemma", PLACES[place], chosen, folder, packing="pad", **parallel)
    two = {"microbatch_size": 2, "global_batch_size": 2 * built.config.training.global_batch_size}
    training = built.config.training.model_copy(update=two)
    options = DiffusionConfig(mode=mode)  # type: ignore[arg-type]
    return Case(built.config.model_copy(update={"diffusion": options, "training": training}), built.store, built.steps)


def passes(auditor: Auditor, built: Case, place: str) -> None:
    report = auditor.audit(built, PLACES[place].world_size)
    assert report.passed, [finding.message for finding in report.findings]
    assert report.worst_gradient < 1e-12
    assert any("decoder.layers.1" in row.point.module and row.passed for row in report.borders)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("mode", "method"), [("all_blocks", "gather"), ("one_block", "ring")])
def test_two_ranks_compute_what_one_process_does(auditor: Auditor, tmp_path: Path, mode: str, method: str) -> None:
    passes(auditor, case(tmp_path, "cp 2", mode, context_parallel=method), "cp 2")


WIDE = ("cp 4", "cp 2 x shard 2", "cp 2 x tp 2", "cp 2 x ep 2", "2 x cp 2 x shard 2")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("place", "mode", "options"),
    [
        ("cp 2", "all_blocks", {"context_parallel": "ulysses"}),
        *((place, "all_blocks", {"context_parallel": "gather", "context_recompute": True}) for place in WIDE),
        *((place, "one_block", {"context_parallel": "ring", "context_balance": "contiguous"}) for place in WIDE),
        *((place, "all_blocks", {"context_parallel": "ring"}) for place in WIDE),
    ],
)
def test_every_layout_computes_what_one_process_does(
    auditor: Auditor, tmp_path: Path, place: str, mode: str, options: dict[str, Any]
) -> None:
    passes(auditor, case(tmp_path, place, mode, **options), place)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["gather", "ring"])
@pytest.mark.parametrize(
    "variant",
    [
        Variant(SyncPolicy.REDUCE_EACH, "float64", 3, True, True, False, True),
        Variant(SyncPolicy.RESHARD_EACH, "float64", 3, True, False),
        Variant(SyncPolicy.DEFER, "float32", 1, False, False),
    ],
    ids=str,
)
def test_with_other_options_too(auditor: Auditor, tmp_path: Path, method: str, variant: Variant) -> None:
    report = auditor.audit(case(tmp_path, "cp 2 x shard 2", variant=variant, context_parallel=method), 4)
    assert report.passed, [finding.message for finding in report.findings]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plant", [plants.block_sees_its_clean_copy, plants.keys_of_another_document])
def test_planted_bugs_are_found_where_they_are(auditor: Auditor, tmp_path: Path, plant: Callable[..., None]) -> None:
    report = auditor.audit(case(tmp_path, "cp 2", context_parallel="gather"), 2, plants=[plant])
    first = report.findings[0]
    words = f"forward diverges in {plants.CANVAS_LAYER}: its inputs agree, its output is off by"
    assert (first.kind, words in first.message) == (Kind.FORWARD, True), [finding.message for finding in report.findings]


@pytest.mark.thorough
def test_a_rank_with_noise_of_its_own_is_found(auditor: Auditor, tmp_path: Path) -> None:
    report = auditor.audit(case(tmp_path, "cp 2"), 2, plants=[plants.noise_of_rank_1])
    first = report.findings[0]
    assert first.kind is Kind.DATA, [finding.message for finding in report.findings]
    assert "canvas_ids" in first.message

"""Routers and experts that a layer calls itself, and two stacks of layers, over ranks that have slices of the stream."""

from pathlib import Path

import pytest

from maintain.cells import LAYOUTS, Variant, family_case
from meshwright.audit.case import Case
from meshwright.audit.causes.diagnose import Kind
from meshwright.audit.conduct import Auditor
from meshwright.audit.ranks import RankTrainer
from meshwright.models.diffusion_gemma.block_diffusion_options import DiffusionConfig
from meshwright.plan.given.closed_choices import SyncPolicy
from tests.audit import plants

PLACES = {place.label: place for place in LAYOUTS}
PLAIN = Variant(SyncPolicy.DEFER, "float64", 2, False, False)


def case(folder: Path, family: str, label: str, variant: Variant = PLAIN, mode: str = "all_blocks") -> Case:
    """Canvases of DiffusionGemma have an odd number of columns, which ranks cannot share: they are padded."""
    canvas = family == "diffusion_gemma"
    model = {"canvas_length": 5} if canvas else {}
    built = family_case(family, PLACES[label], variant, folder, packing="pad" if canvas else "pack", model=model)
    options = DiffusionConfig(mode=mode) if canvas else built.config.diffusion  # type: ignore[arg-type]
    return Case(built.config.model_copy(update={"diffusion": options}), built.store, built.steps)


@pytest.mark.parametrize(
    ("family", "label", "variant", "mode"),
    [
        ("diffusion_gemma", "tp 2 seq", PLAIN, "one_block"),
        *(
            pytest.param(*cell, marks=pytest.mark.thorough)
            for cell in [
                ("gemma4_moe", "tp 2 seq", PLAIN, ""),
                ("gemma4_moe", "ep 2, tp 2 seq, shard 2", PLAIN, ""),
                ("gemma4_moe", "pp 2 x tp 2 seq", PLAIN, ""),
                ("diffusion_gemma", "tp 2 seq", PLAIN, "all_blocks"),
                ("diffusion_gemma", "tp 2 seq x shard 2", PLAIN, "one_block"),
                ("diffusion_gemma", "cp 2 x tp 2 seq", PLAIN, "all_blocks"),
                ("diffusion_gemma", "cp 2 x tp 2 seq", PLAIN, "one_block"),
                ("diffusion_gemma", "ep 2, tp 2 seq, shard 2", PLAIN, "all_blocks"),
                (
                    "diffusion_gemma",
                    "tp 2 seq x shard 2",
                    Variant(SyncPolicy.REDUCE_EACH, "float64", 3, True, True, False, True),
                    "all_blocks",
                ),
                ("diffusion_gemma", "tp 2 seq", Variant(SyncPolicy.RESHARD_EACH, "float64", 3, True, False), "one_block"),
            ]
        ),
    ],
    ids=str,
)
def test_ranks_compute_what_one_process_does(
    auditor: Auditor, tmp_path: Path, family: str, label: str, variant: Variant, mode: str
) -> None:
    built = case(tmp_path, family, label, variant, mode)
    report = auditor.audit(built, PLACES[label].world_size)
    assert report.passed, [finding.message for finding in report.findings]
    assert report.worst_gradient < 1e-12
    for part in ("router", "experts", "self_attn", "mlp"):
        assert any(row.point.module.endswith(f".layers.1.{part}") and row.passed for row in report.borders), part


def routers_not_summed(trainer: RankTrainer) -> None:
    """Each rank has the gradient of the choices for its own slice."""
    routers = tuple(row.router for row in trainer.setup.plan.experts)
    plants.replanned(trainer, "sequence_parallel", lambda name: name.startswith(routers), sums=())


@pytest.mark.thorough
def test_routers_whose_gradients_are_not_summed_are_named(auditor: Auditor, tmp_path: Path) -> None:
    report = auditor.audit(case(tmp_path, "diffusion_gemma", "tp 2 seq"), 2, plants=[routers_not_summed])
    first = report.findings[0]
    assert first.kind is Kind.UNREDUCED, [finding.message for finding in report.findings]
    assert "router" in first.message
    assert not any("layernorm" in finding.message for finding in report.findings)

"""Stages of two stacks that share their layers: three passes of a microbatch, against one process; and bugs of them alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from maintain.cells import LAYOUTS, Variant, family_case
from meshwright.audit.case import Case
from meshwright.audit.causes.diagnose import Kind
from meshwright.audit.conduct import Auditor
from meshwright.audit.ranks import RankTrainer
from meshwright.distributed.pipeline.passes import passes_of_model
from meshwright.distributed.pipeline.stage_parts import models_of
from meshwright.models.diffusion_gemma.block_diffusion_options import DiffusionConfig
from meshwright.plan.given.closed_choices import SyncPolicy

PLACES = {place.label: place for place in LAYOUTS}
PLAIN = Variant(SyncPolicy.DEFER, "float64", 4, False, False)


def case(folder: Path, label: str, variant: Variant = PLAIN, options: dict[str, Any] | None = None, **parallel: Any) -> Case:
    built = family_case("diffusion_gemma", PLACES[label], variant, folder, packing="pad", **parallel)
    diffusion = DiffusionConfig(**{"self_conditioning": 0.7, **(options or {})})
    return Case(built.config.model_copy(update={"diffusion": diffusion}), built.store, built.steps)


ONE_BLOCK = {"mode": "one_block"}
RECOMPUTED = Variant(SyncPolicy.DEFER, "float64", 4, True, True, False, True)


@pytest.mark.parametrize(
    ("label", "variant", "options", "parallel"),
    [
        ("pp 2", PLAIN, {}, {}),
        *(
            pytest.param(*cell, marks=pytest.mark.thorough)
            for cell in [
                ("pp 4", Variant(SyncPolicy.DEFER, "float64", 8, False, False), {}, {}),
                ("pp 2", Variant(SyncPolicy.REDUCE_EACH, "float64", 3, True, False), ONE_BLOCK, {}),
                ("pp 2", PLAIN, {"encoder_loss_weight": 0.0}, {}),
                ("pp 2", PLAIN, {"self_conditioning": 0.0, "freeze_router": True}, {"activation_checkpointing": "selective"}),
                ("pp 2", PLAIN, {"self_conditioning": 1.0}, {"activation_checkpointing": "submodule"}),
                ("pp 2", PLAIN, ONE_BLOCK, {"compile": True, "compile_backend": "aot_eager"}),
                ("pp 2 x shard 2", RECOMPUTED, {}, {}),
                ("pp 2 x shard 2", PLAIN, ONE_BLOCK, {"twin_units": True}),
                ("pp 2 x tp 2", PLAIN, {}, {}),
                ("pp 2 x ep 2", PLAIN, {}, {}),
                ("pp 2 x cp 2", PLAIN, {}, {}),
                ("pp 2 x cp 2", PLAIN, ONE_BLOCK, {"context_balance": "contiguous"}),
                ("2 x pp 2 x shard 2", PLAIN, ONE_BLOCK, {}),
                ("pp 2 x tp 2 x shard 2", PLAIN, {}, {}),
            ]
        ),
    ],
    ids=str,
)
def test_ranks_compute_what_one_process_does(
    auditor: Auditor, tmp_path: Path, label: str, variant: Variant, options: dict[str, Any], parallel: dict[str, Any]
) -> None:
    report = auditor.audit(case(tmp_path, label, variant, options, **parallel), PLACES[label].world_size)
    assert report.passed, [finding.message for finding in report.findings]
    assert report.worst_gradient < 1e-12


def few_states(trainer: RankTrainer) -> None:
    """No more microbatches have keys and values on a rank than torch's order starts before the first one is over."""
    own, states = passes(trainer), []
    inner = own._encode

    def encode(received: Any, state: dict[str, Any], batch: Any) -> torch.Tensor:
        states.append(state)
        sent: torch.Tensor = inner(received, state, batch)
        assert sum(map(bool, states)) <= 4
        return sent

    own._encode = encode


@pytest.mark.thorough
def test_a_microbatch_leaves_nothing_on_its_ranks(auditor: Auditor, tmp_path: Path) -> None:
    built = case(tmp_path, "pp 2", Variant(SyncPolicy.DEFER, "float64", 8, False, False))
    report = auditor.audit(built, 2, plants=[few_states])
    assert report.passed, [finding.message for finding in report.findings]


def passes(trainer: RankTrainer) -> Any:
    (part,) = models_of(trainer.model)
    return passes_of_model(part)


def keys_without_gradient(trainer: RankTrainer) -> None:
    """What the decoder gives to keys and values of the encoder is lost."""
    own = passes(trainer)
    inner = own._encode

    def encode(received: Any, state: dict[str, Any], batch: Any) -> torch.Tensor:
        sent: torch.Tensor = inner(received, state, batch)
        for layer in state["written"].layers:
            if layer.is_initialized:
                layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        return sent

    own._encode = encode


def embedding_without_gradient_of_drafts(trainer: RankTrainer) -> None:
    """The gradient of soft embeddings, which the last stage gets from the first, does not reach the matrix."""
    own = passes(trainer)
    inner = own._draft
    own._draft = lambda *given: inner(*given).detach()


@pytest.mark.parametrize(
    ("plant", "kind", "named"),
    [
        (keys_without_gradient, {Kind.BACKWARD}, "model.encoder.language_model.layers.1.self_attn"),
        pytest.param(
            embedding_without_gradient_of_drafts, {Kind.GRADIENT, Kind.BACKWARD}, "embed_tokens", marks=pytest.mark.thorough
        ),
    ],
)
def test_planted_bugs_are_found(
    auditor: Auditor, tmp_path: Path, plant: Callable[[RankTrainer], None], kind: set[Kind], named: str
) -> None:
    report = auditor.audit(case(tmp_path, "pp 2"), 2, plants=[plant])
    assert not report.passed
    assert report.findings[0].kind in kind, [finding.message for finding in report.findings]
    assert any(named in finding.message for finding in report.findings), [finding.message for finding in report.findings]

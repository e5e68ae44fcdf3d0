"""NemotronH: what its strategy adds to the model's own declarations. Its gradients are a row of the support matrix."""

from typing import Any

import pytest

from meshwright.audit.conduct import Auditor
from meshwright.distributed.parallelizer import get_lm_ac_layers
from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.matrix.cells import LAYOUTS, VARIANTS, Outcome, run_cell
from meshwright.models.registry import spec_of
from meshwright.models.spec import derived_spec
from meshwright.plan.options import ActivationCheckpointing, ParallelOptions
from meshwright.plan.resolver import resolve
from meshwright.plan.spec import ExpertsRule, Scores
from tests.tiny import tiny_model

KINDS = ["linear_attention", "moe", "full_attention", "mlp"]


def styles_of(kinds: list[str], **changes: Any) -> dict[str, str]:
    model = tiny_model("nemotron_h", meta=True, layers_block_type=kinds, **changes)
    plan = resolve(spec_of(model), model, Layout(tp=2, dp_shard=1))
    assert [unit.name for unit in plan.units if unit.kind != "experts"] == [
        "",
        *(f"model.layers.{index}" for index in range(len(kinds))),
    ]
    return {row.module.removeprefix("model.layers."): row.style for row in plan.tensor_parallel}


def test_every_block_is_a_unit_and_is_split_by_its_kind() -> None:
    shared = {"1.mixer.shared_experts.up_proj": "colwise", "1.mixer.shared_experts.down_proj": "rowwise"}
    assert styles_of(KINDS) == {
        "model.embeddings": "embedding_rowwise",
        "1.mixer.experts": "moe_tp_experts",
        **shared,
        "3.mixer.up_proj": "colwise",
        "3.mixer.down_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    }


def test_kinds_that_a_model_lacks_are_no_error() -> None:
    assert set(styles_of(["mlp", "full_attention"])) == {"model.embeddings", "0.mixer.up_proj", "0.mixer.down_proj", "lm_head"}
    assert set(styles_of(["linear_attention"])) == {"model.embeddings", "lm_head"}


def test_heads_do_not_limit_what_leaves_attention_whole() -> None:
    assert "3.mixer.up_proj" in styles_of(KINDS, num_key_value_heads=1)
    sizes = spec_of(tiny_model("nemotron_h", meta=True)).sizes
    assert sizes == {"layers": "num_hidden_layers", "experts": "num_local_experts"}


def test_what_is_derived_stays() -> None:
    model = tiny_model("nemotron_h", meta=True)
    derived, found = derived_spec(model), spec_of(model)
    assert (found.layers, found.fp32, found.tied) == (derived.layers, derived.fp32, derived.tied)
    assert found.experts == derived.experts == (
        ExpertsRule("model.layers.*.mixer.experts", "model.layers.*.mixer.gate", Scores.SIGMOID, "e_score_correction_bias"),
    )  # fmt: skip
    assert derived.tp_styles.items() < found.structure.styles.items()
    with pytest.raises(PlanError, match=r"sequence_parallel=True: Mamba blocks carry a state.*the legal value is False"):
        resolve(spec_of(model), model, Layout(tp=2, dp_shard=1), ParallelOptions(sequence_parallel=True))


def test_checkpointing_applies_block_by_block() -> None:
    model = tiny_model("nemotron_h", meta=True)
    assert get_lm_ac_layers(model) == list(model.model.layers)
    options = ParallelOptions(activation_checkpointing_layers={"model.layers.0": "full", "model.layers.3": "submodule"})
    plan = resolve(spec_of(model), model, Layout(), options, world_size=2)
    modes = [unit.activation_checkpointing for unit in plan.units if unit.kind == "layer"]
    none = ActivationCheckpointing.NONE
    assert modes == [ActivationCheckpointing.FULL, none, none, ActivationCheckpointing.SUBMODULE]


@pytest.mark.thorough
@pytest.mark.parametrize("label", ["tp 2", "tp 2 x shard 2", "2 x shard 2"])
def test_parity(label: str, tmp_path: Any) -> None:
    place = next(place for place in LAYOUTS if place.label == label)
    with Auditor() as auditor:
        cell = run_cell(auditor, "nemotron_h", place, (VARIANTS[1], VARIANTS[3]), tmp_path)
    assert cell.outcome is Outcome.WORKS, cell.note
    assert cell.note.startswith("with data.packing=pad only")
    assert cell.worst["float32"] < 1e-5
    assert cell.worst["float64"] < 1e-10

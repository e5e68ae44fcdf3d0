"""NemotronH: what its strategy adds to the model's own declarations. Its gradients are a row of the support matrix."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from maintain.cells import LAYOUTS, VARIANTS, Outcome, run_cell
from meshwright.audit.conduct import Auditor
from meshwright.distributed.fsdp2 import FSDP2Manager
from meshwright.distributed.parallelizer import get_lm_ac_layers
from meshwright.errors import ModelError
from meshwright.layout import Layout
from meshwright.models.specs.derived import derived_spec
from meshwright.models.specs.registry import spec_of
from meshwright.plan.axes.tensor.move_kinds import Move
from meshwright.plan.given.closed_choices import ActivationCheckpointing
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.given.spec import ExpertsRule, Scores
from meshwright.plan.resolver import resolve
from tests.harness import run_ranks
from tests.tiny import tiny_model, whole

KINDS = ["linear_attention", "moe", "full_attention", "mlp"]


def styles_of(kinds: list[str], **changes: Any) -> dict[str, str]:
    model = tiny_model("nemotron_h", meta=True, layers_block_type=kinds, **changes)
    plan = resolve(spec_of(model), model, Layout(tp=2, dp_shard=1))
    assert [unit.name for unit in plan.units if unit.kind != "experts"] == [
        "",
        *(f"model.layers.{index}" for index in range(len(kinds))),
    ]
    return {row.module.removeprefix("model.layers."): row.style for row in plan.tensor_parallel}


MIXER = {"0.mixer": "mixer", "0.mixer.in_proj": "fused_colwise", "0.mixer.norm": "channels", "0.mixer.out_proj": "rowwise"}


def test_every_block_is_a_unit_and_is_split_by_its_kind() -> None:
    shared = {"1.mixer.shared_experts.up_proj": "colwise", "1.mixer.shared_experts.down_proj": "rowwise"}
    assert styles_of(KINDS) == {
        "model.embeddings": "embedding_rowwise",
        **MIXER,
        "1.mixer.experts": "moe_tp_experts",
        **shared,
        "3.mixer.up_proj": "colwise",
        "3.mixer.down_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    }


def test_kinds_that_a_model_lacks_are_no_error() -> None:
    assert set(styles_of(["mlp", "full_attention"])) == {"model.embeddings", "0.mixer.up_proj", "0.mixer.down_proj", "lm_head"}
    assert set(styles_of(["linear_attention"])) == {"model.embeddings", "lm_head", *MIXER}


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


def test_each_block_gets_the_whole_sequence_under_sequence_parallel() -> None:
    """A Mamba block and an attention are computed whole, an MLP is split; a trace shows it."""
    model = tiny_model("nemotron_h", meta=True)
    plan = resolve(spec_of(model), model, Layout(tp=2, dp_shard=1), ParallelOptions(sequence_parallel=True))
    moves = {row.module: (row.entry, row.exit) for row in plan.tensor_parallel if row.style == "region"}
    assert moves.keys() == {f"{layer}.mixer" for layer in plan.layers}
    whole = (Move.GATHER_SEQUENCE_WHOLE, Move.SPLIT_SEQUENCE)
    assert {*moves.values()} == {whole, (Move.GATHER_SEQUENCE, Move.NONE)}


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


class NemotronHMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.relu(self.up_proj(x)).square())


class NemotronHMixer(nn.Module):
    """Stands for Mamba and for attention: it mixes tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out_proj(self.in_proj(x).cumsum(1))


class NemotronHBlock(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block_type = kind
        self.norm, self.mixer = nn.RMSNorm(8), NemotronHMLP() if kind == "mlp" else NemotronHMixer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mixer(self.norm(x))


class NemotronHForCausalLM(nn.Module):
    """In the shape of the code that comes with the weights: no model of transformers."""

    _keep_in_fp32_modules_strict = ("norm_f",)

    def __init__(self, body: str, container: type) -> None:
        super().__init__()
        blocks = [NemotronHBlock(kind) for kind in ("mamba", "mlp", "attention", "mlp")]
        inner = nn.Module()
        inner.embeddings = nn.Embedding(29, 8)
        inner.layers = (
            nn.ModuleList(blocks)
            if container is list
            else nn.ModuleDict({str(index): block for index, block in enumerate(blocks)})
        )
        inner.norm_f = nn.RMSNorm(8)
        setattr(self, body, inner)
        self.body, self.lm_head = body, nn.Linear(8, 29, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        inner = getattr(self, self.body)
        x = inner.embeddings(ids)
        for block in inner.layers.values() if isinstance(inner.layers, nn.ModuleDict) else inner.layers:
            x = block(x)
        return self.lm_head(inner.norm_f(x))


@pytest.mark.parametrize(("body", "container"), [("backbone", list), ("backbone", dict), ("model", dict)])
def test_the_shape_of_the_code_that_comes_with_the_weights(body: str, container: type) -> None:
    def made() -> NemotronHForCausalLM:
        torch.manual_seed(0)
        return NemotronHForCausalLM(body, container)

    def on_rank(rank: int) -> None:
        alone, model = made(), made()
        fp32 = MixedPrecisionPolicy(torch.float32, torch.float32)
        manager = FSDP2Manager(tp_size=2, mp_policy=fp32, activation_checkpointing=True)
        manager.parallelize(model)
        assert manager.plan is not None
        split = {row.module: row.style for row in manager.plan.tensor_parallel}
        assert split == {
            **{f"{body}.layers.{index}.mixer.up_proj": "colwise" for index in (1, 3)},
            **{f"{body}.layers.{index}.mixer.down_proj": "rowwise" for index in (1, 3)},
            "lm_head": "colwise_gather_output",
        }
        assert [unit.name for unit in manager.plan.units if unit.kind == "layer"] == [f"{body}.layers.{i}" for i in range(4)]
        data = torch.randint(0, 29, (4, 6), generator=torch.Generator().manual_seed(1))
        reader = rank // 2
        model(data[2 * reader : 2 * reader + 2]).square().sum().backward()
        (alone(data).square().sum() / 2).backward()
        for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=1e-4, atol=1e-5, msg=name)

    run_ranks(on_rank, 4)


def test_modules_of_a_class_without_a_library_that_compute_in_fp32_and_one_without_blocks() -> None:
    spec = spec_of(NemotronHForCausalLM("backbone", list))
    assert spec.fp32 == ("backbone.norm_f",)
    model = NemotronHForCausalLM("backbone", list)
    del model.backbone.layers
    with pytest.raises(ModelError, match=r"has neither backbone\.layers nor model\.layers"):
        spec_of(model)

"""Audits of what runs between matrices that `tp` slices and needs all features: norms over them (BitNet), mixers (Mamba).

And bugs of it, planted on the ranks.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from maintain.cells import LAYOUTS
from maintain.coverage import case_of
from meshwright.audit.causes.findings import Kind
from meshwright.audit.conduct import Auditor
from meshwright.audit.ranks import RankTrainer
from meshwright.distributed.tensor import mixer_slices, moves
from meshwright.distributed.tensor.slicing import compute_with_slices
from meshwright.plan.result.program import Compute
from tests.tiny import needs_norm_of_groups

PLACES = {place.label: place for place in LAYOUTS}
THOROUGH = (
    *(("bitnet", label) for label in ("tp 2", "tp 4", "cp 2 x tp 2", "tp 2 seq x shard 2")),
    *(
        (name, label)
        for name in ("mamba", "falcon_mamba")
        for label in ("tp 2", "tp 4", "pp 2 x tp 2 seq", "tp 2 seq x shard 2")
    ),
    *((name, "tp 2 x shard 2") for name in ("mamba use_bias=true", "mamba2 use_bias=true", "mamba2 use_conv_bias=false")),
    *(("mamba2", label) for label in ("tp 2", "pp 2 x tp 2", "2 x tp 2")),
    *((name, "tp 2 seq") for name in ("rwkv", "recurrent_gemma", "xlstm", "kimi_linear", "olmo_hybrid", "bailing_hybrid")),
    *(
        (name, label)
        for name in ("jamba", "nemotron_h")
        for label in ("tp 2", "tp 2 seq x shard 2", "ep 2 = tp 2", "pp 2 x tp 2")
    ),
)


@pytest.fixture(scope="module")
def auditor() -> Iterator[Auditor]:
    with Auditor() as auditor:
        yield auditor


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "label"),
    [("bitnet", "tp 2 seq"), ("mamba2", "tp 2 seq"), *(pytest.param(*own, marks=pytest.mark.thorough) for own in THOROUGH)],
)
def test_gradients_are_those_of_one_process(auditor: Auditor, tmp_path: Path, name: str, label: str) -> None:
    needs_norm_of_groups(name)
    place = PLACES[label]
    report = auditor.audit(case_of(name, place, tmp_path, "pad", "float64"), place.world_size)
    assert report.passed, report.verdict
    assert report.worst_gradient < 1e-12


def sums_of_slices(trainer: RankTrainer) -> None:
    """Each rank takes the mean over its own features, or sums over its own channels."""
    moves.sum_both_ways = lambda part, group: 2 * part  # type: ignore[assignment]


def sums_of_forward_alone(trainer: RankTrainer) -> None:
    """What is needed of all features is summed over ranks, and the gradients that come back to it are not."""
    moves.sum_both_ways = moves.leave  # type: ignore[assignment]


def columns_of_heads_swapped(trainer: RankTrainer) -> None:
    """B and C of all groups are taken for one matrix: a rank gets B of each group, and another one C."""
    for action in trainer.setup.plan.program:
        if isinstance(action, Compute) and action.row.style == "fused_colwise":
            gate, values, keys, queries, steps = action.parts
            del trainer.model.get_submodule(action.module).forward  # the class's own comes back
            changed = replace(action, parts=(gate, values, keys + queries, steps))
            compute_with_slices(trainer.model, changed, trainer.mesh)


def what_all_store_not_summed(trainer: RankTrainer) -> None:
    """Each rank has the gradient of its own channels of a convolution, or through its own heads, of what all store whole."""
    mixer_slices.enter = lambda whole, group: whole  # type: ignore[assignment]


PLANTS = [
    (sums_of_forward_alone, "bitnet", Kind.BACKWARD, "backward diverges in model.layers.1.mlp"),
    (sums_of_forward_alone, "mamba", Kind.BACKWARD, "backward diverges in backbone.layers.1.mixer"),
    (columns_of_heads_swapped, "mamba2", Kind.FORWARD, "forward diverges in backbone.layers.0.mixer"),
    (sums_of_slices, "bitnet", Kind.FORWARD, "forward diverges in model.layers.0.self_attn"),
    (sums_of_slices, "falcon_mamba", Kind.FORWARD, "forward diverges in backbone.layers.0.mixer"),
    (what_all_store_not_summed, "jamba", Kind.UNREDUCED, "layernorm.weight"),
    (what_all_store_not_summed, "mamba2", Kind.UNREDUCED, "mixer.conv1d.weight"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("plant", "name", "kind", "words"),
    [*PLANTS[:3], *(pytest.param(*own, marks=pytest.mark.thorough) for own in PLANTS[3:])],
)
def test_what_is_not_of_all_ranks_is_named(
    auditor: Auditor, tmp_path: Path, plant: Callable[[RankTrainer], None], name: str, kind: Kind, words: str
) -> None:
    needs_norm_of_groups(name)
    report = auditor.audit(case_of(name, PLACES["tp 2"], tmp_path, "pad", "float64"), 2, plants=[plant])
    assert not report.passed
    assert report.findings[0].kind is kind, report.verdict
    assert words in report.findings[0].message, report.verdict

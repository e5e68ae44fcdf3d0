"""Audits of norms over features that `tp` slices, as BitNet has them; and bugs of their means, planted on the ranks."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from maintain.cells import LAYOUTS
from maintain.coverage import case_of
from meshwright.audit.causes.findings import Kind
from meshwright.audit.conduct import Auditor
from meshwright.audit.ranks import RankTrainer
from meshwright.distributed.tensor import means, moves

PLACES = {place.label: place for place in LAYOUTS}


@pytest.fixture(scope="module")
def auditor() -> Iterator[Auditor]:
    with Auditor() as auditor:
        yield auditor


@pytest.mark.parametrize(
    "label",
    [
        "tp 2 seq",
        *(pytest.param(label, marks=pytest.mark.thorough) for label in ("tp 2", "tp 4", "cp 2 x tp 2", "tp 2 seq x shard 2")),
    ],
)
def test_means_over_all_ranks(auditor: Auditor, tmp_path: Path, label: str) -> None:
    place = PLACES[label]
    report = auditor.audit(case_of("bitnet", place, tmp_path, "pad", "float64"), place.world_size)
    assert report.passed, report.verdict
    assert report.worst_gradient < 1e-12


def means_of_slices(trainer: RankTrainer) -> None:
    """Each rank takes the mean over its own features, as a norm does that nobody told of the others."""
    means.moves.sum_both_ways = lambda part, group: 2 * part  # type: ignore[attr-defined]


def sums_of_forward_alone(trainer: RankTrainer) -> None:
    """Means are summed over ranks, and the gradients that come back to them are not."""
    means.moves.sum_both_ways = moves.leave  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("plant", "kind", "words"),
    [
        (means_of_slices, Kind.FORWARD, "forward diverges in model.layers.0.self_attn"),
        (sums_of_forward_alone, Kind.BACKWARD, "backward diverges in model.layers.1.mlp"),
    ],
)
def test_a_mean_that_is_not_of_all_ranks_is_named(
    auditor: Auditor, tmp_path: Path, plant: Callable[[RankTrainer], None], kind: Kind, words: str
) -> None:
    report = auditor.audit(case_of("bitnet", PLACES["tp 2"], tmp_path, "pad", "float64"), 2, plants=[plant])
    assert not report.passed
    assert report.findings[0].kind is kind
    assert words in report.findings[0].message, report.verdict

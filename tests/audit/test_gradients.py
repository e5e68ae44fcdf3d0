"""The words for a gradient that is wrong, from rows made by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from meshwright.audit.causes.gradients import gradient_findings
from meshwright.audit.compare import Row
from meshwright.layout import Layout
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.given.spec import ParallelSpec
from meshwright.plan.resolver import resolve

PLAN = resolve(
    ParallelSpec(family="stack", layers=("layers.*",)),
    nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))}),
    Layout(dp_shard=2),
    ParallelOptions(microbatches=2),
    world_size=2,
)
ROW = Row("gradient", "layers.0.weight", "layers.0", "", 0.3, 1.0, 0.4, 1e-9, 1.0)


def said(*rows: Row) -> list[str]:
    reference: Any = SimpleNamespace(microbatch_tokens=[5, 6, 7, 8])
    rank: Any = SimpleNamespace(rank=0, without_gradient=[], digests={}, borders=[])
    return [finding.message for finding in gradient_findings(PLAN, reference, rows, [rank])]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ratio": 0.5, "residual": 0.0}, "is 0.5 times that of one process"),
        ({"ratio": 1.00001, "residual": 0.001}, "it has other contributions, or lacks a part of one (off by 0.3)"),
        ({"weights": (1.00002, 1.00001, 1.0, 1.0)}, "it has other contributions, or lacks a part of one (off by 0.3)"),
        ({"weights": (0.5, 0.5, 0.5, math.nan)}, "is 0.5 times that of one process"),
        ({"weights": (math.nan,) * 4}, "the gradients of the microbatches are too much alike to tell which of them are in it"),
        ({"weights": (math.nan,) * 4, "ratio": 2.0, "residual": 0.0}, "is 2 times that of one process"),
        ({"weights": (1.0, 1.0, 0.0, math.nan)}, "is that of data rank 0 alone"),
        ({"weights": (1.0, 0.5, math.nan, math.nan)}, "weighs the microbatches of the ranks by 1.000, 0.500, ?, ?"),
        ({"error": math.inf, "residual": math.inf}, "is not finite"),
    ],
    ids=str,
)
def test_the_way_in_which_a_gradient_is_wrong(changed: dict[str, Any], words: str) -> None:
    (message,) = said(replace(ROW, **changed))
    assert words in message


def test_of_one_kind_the_largest_error_comes_first() -> None:
    half = {"ratio": 0.5, "residual": 0.0}
    small = [replace(ROW, name=f"layers.{index}.weight", error=0.5, **half) for index in (0, 1)]
    large = replace(ROW, name="layers.2.weight", error=7.0)
    first, second = said(*small, large)
    assert "layers.2.weight" in first
    assert "layers.0" in second

"""Forecasts against published runs (benchmarks/predict.py): those that no constant was fitted on stay within what
docs/measurements.md says, and what recomputation repeats and adapters cost is counted."""

from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import Any, ClassVar

import pytest

from benchmarks.predict import ROWS, Found, Row, forecast
from meshwright.plan.cost.activation_traffic import repeated_share
from meshwright.trace import step
from meshwright.train.start.setup import RunSetup
from tests.harness import run_ranks
from tests.trace.test_memory import setup_of

HELD_OUT = tuple(row for row in ROWS if not row.fitted)

TIME, MEMORY = (0.10, 0.25), 0.10
"""The goals: median and worst error of the time, worst error of the memory."""


def found(row: Row) -> Found:
    """Forecast a row in a process of its own."""
    (result,) = run_ranks(lambda _: forecast(row), 1, group=False)
    return result


def check(rows: tuple[Row, ...]) -> list[float]:
    """Check that rows are within what is said of them; return the errors of their times."""
    errors = []
    for row in rows:
        result = found(row)
        if row.tokens is not None:
            errors.append(abs(result.tokens / row.tokens - 1))
            assert errors[-1] <= TIME[1], row.name
        if row.memory is not None:
            assert abs(result.memory / row.memory - 1) <= MEMORY, row.name
    return errors


def named(*numbers: str) -> tuple[Row, ...]:
    return tuple(row for row in HELD_OUT if row.name.split()[0] in numbers)


@pytest.mark.thorough
def test_some_held_out_rows() -> None:
    assert max(check(named("2", "c"))) <= TIME[0]


@pytest.mark.thorough
@pytest.mark.timeout(900)  # 25 forecasts, each with a trace of its own
def test_all_held_out_rows() -> None:
    errors = check(HELD_OUT)
    assert len(errors) == 25
    assert median(errors) <= TIME[0]


def test_rows_that_were_fitted_are_named() -> None:
    assert [row.name.split()[0] for row in ROWS if row.fitted] == ["1", "3"]


class Communication(step.WorkCounter):
    """Counts calls of collectives."""

    seen: ClassVar[Counter[str]] = Counter()

    def count(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        self.seen[func.name().partition(".")[0]] += func.namespace == "c10d"
        super().count(func, args, kwargs, result)


CASES: list[tuple[str, dict[str, int], bool, str]] = [
    ("llama", {"tp": 2}, True, "full"),
    ("llama", {"tp": 2}, True, "submodule"),
    ("llama", {"tp": 2}, False, "selective"),
    ("qwen3_moe", {"ep": 2}, False, "full"),
]


def recomputing(family: str, layout: dict[str, int], sliced: bool, mode: str) -> RunSetup:
    parallel, training = {"activation_checkpointing": mode, "sequence_parallel": sliced}, {"global_batch_size": 4}
    return setup_of(2, family, layers=2, layout=layout, packing="pad", parallel=parallel, training=training)


def collectives(_: int) -> list[list[int]]:
    """Count the collectives of a step of each case, without recomputation and with it."""
    step.WorkCounter = Communication  # type: ignore[misc]
    counts: list[list[int]] = []
    for family, layout, sliced, mode in CASES:
        counts.append([])
        for one in ("none", mode):
            Communication.seen.clear()
            step.trace_step(recomputing(family, layout, sliced, one), device=True)
            counts[-1].append(sum(Communication.seen.values()))
    return counts


@pytest.mark.thorough
def test_what_recomputation_repeats() -> None:
    """A traced step with recomputation has as many more collectives as the share says, of those that layers have."""
    (counts,) = run_ranks(collectives, 1, group=False)
    for case, (plain, recomputed) in zip(CASES, counts, strict=True):
        plan, (axis,) = recomputing(*case).plan, case[1]
        # Of a layer: four gathers and four reductions, four all-reduces, or of a mixture four exchanges of rows.
        own = 4 * len(plan.experts) if axis == "ep" else (8 if case[2] else 4) * len(plan.layers)
        assert recomputed - plain == repeated_share(plan, axis) * own * plan.options.microbatches > 0

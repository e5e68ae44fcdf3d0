"""Lines that differ in the numbers of layers alone are one; other digits tell things apart."""

import pytest

from meshwright.errors import Refusal
from meshwright.plan.given.names import without_repetition


@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        (["'layers.0.mlp' is odd", "'layers.1.mlp' is odd"], ["'layers.0.mlp' is odd (and 1 more like it)"]),
        (["module layers.0: no", "module layers.7: no", "other"], ["module layers.0: no (and 1 more like it)", "other"]),
        (["'0' is odd", "'1' is odd", "'12' is odd"], ["'0' is odd (and 2 more like it)"]),
        (["'layers.0.fc1' is odd", "'layers.0.fc2' is odd"], None),
        (["fc1 matches nothing", "fc2 matches nothing"], None),
        (["heads=4 over tp=8", "heads=6 over tp=8"], None),
        (["1.5 GiB", "2.5 GiB"], None),
    ],
)
def test_only_numbers_of_layers_are_alike(lines: list[str], kept: list[str] | None) -> None:
    kept_refusals = without_repetition(Refusal("plan.pattern", line) for line in lines)
    assert kept_refusals == (kept or lines)
    assert {refusal.code for refusal in kept_refusals} == {"plan.pattern"}

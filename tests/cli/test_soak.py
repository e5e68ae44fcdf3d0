"""A few kills and signals at random moments; ``python -m tests.cli.soak 30`` does many."""

from pathlib import Path

import pytest

from tests.cli.soak import soak


@pytest.mark.thorough
def test_kills_and_signals_at_random_moments_change_no_loss(tmp_path: Path, warm: None) -> None:
    found = soak(tmp_path, 3)
    assert found.total() - found["lives"] == 3, found

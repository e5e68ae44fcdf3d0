"""Reading weights draws one bar: that of rank 0, in a terminal."""

import sys

import pytest
from transformers.utils import logging

from meshwright.models.weights.bars import one_bar


@pytest.mark.parametrize(("rank", "terminal", "drawn"), [(0, True, True), (0, False, False), (3, True, False)])
def test_who_draws(monkeypatch: pytest.MonkeyPatch, capsys, rank: int, terminal: bool, drawn: bool) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with one_bar("reading weights"):
        assert list(logging.tqdm(range(3), desc="Loading weights")) == [0, 1, 2]
    found = capsys.readouterr().err
    assert ("reading weights" in found) == drawn
    assert "Loading" not in found
    list(logging.tqdm(range(3), desc="Loading weights"))
    assert "Loading weights" in capsys.readouterr().err  # as before

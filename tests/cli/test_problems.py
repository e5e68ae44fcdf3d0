"""A message that fills the screen is cut, with a count; all of it is in a file, and under --debug."""

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from meshwright.cli.problems import MOST_LINES, show_problems
from meshwright.errors import coded
from tests.cli.conftest import Outcome
from tests.train.test_pretrained import saved


def test_the_beginning_the_count_and_the_file(capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    show_problems([coded("first"), *(coded(f"a\nb {number}") for number in range(60))])
    *shown, last = capsys.readouterr().err.splitlines()
    assert shown[:3] == ["error: first", "error: a", "b 0"]
    assert len(shown) == 30
    found = re.fullmatch(r"\.\.\. and 91 more lines; all 121 lines are in (.+)", last)
    assert found is not None
    assert Path(found.group(1)).read_text().splitlines()[-1] == "b 59"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    show_problems([coded("x")] * 41, kind="")
    assert capsys.readouterr().err.endswith("... and 11 more lines; --debug prints all\n")


@pytest.mark.parametrize(("lines", "whole"), [(MOST_LINES, False), (200, True)])
def test_short_ones_and_those_of_debug_are_whole(capsys, lines: int, whole: bool) -> None:
    show_problems([coded("x")] * lines, whole=whole)
    assert capsys.readouterr().err == "error: x\n" * lines


def test_weights_of_another_model(meshwright: Callable[..., Outcome], config: str, tmp_path: Path) -> None:
    saved(tmp_path / "model", num_hidden_layers=8)
    file = tmp_path / "model" / "model.safetensors"
    save_file({f"{name}.old": tensor for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    arguments = ("train", config, f"model={{path: '{tmp_path / 'model'}'}}", "--nproc", 1)
    found = meshwright(*arguments)
    assert found.code == 2
    assert len(found.error.splitlines()) == 31
    assert "not in the files" in found.error
    assert len(meshwright(*arguments, "--debug").error.splitlines()) > 100

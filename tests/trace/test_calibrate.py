"""A machine is measured, and a forecast from what was measured is near what a step takes."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.plan.hardware import load_hardware
from meshwright.trace.calibrate import _products, calibrate
from tests.trace.test_memory import setup_of


def test_what_is_measured_is_a_device(tmp_path: Path) -> None:
    values = calibrate(setup_of(2, layers=2), 2, "cpu")
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump(values))
    found = load_hardware(str(path))
    assert found.calibrated
    assert found.gpus_per_node == 2
    assert 0 < found.attention <= 1
    assert 1e-4 < found.bf16_tflops < 100
    assert 1e-3 < found.link_gb_s < 1e3


def test_products_are_those_of_a_rank() -> None:
    whole, sliced = (
        _products(setup_of(2, layers=2, layout=layout).plan, 128, "cpu")
        for layout in ({"dp_shard": 2}, {"tp": 2, "dp_shard": 1})
    )
    assert (128, 32, 48) in whole  # gate and up of a layer
    assert (128, 32, 24) in sliced
    assert (128, 24, 32) in sliced  # down
    assert max(tokens for tokens, *_ in _products(setup_of(2).plan, 10**9, "cpu")) < 10**7


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    example = str(Path(__file__).parents[2] / "examples" / "quickstart.yaml")
    result = CliRunner().invoke(app, ["calibrate", example, str(tmp_path / "no" / "x.yaml")])
    with pytest.raises(Exception, match="its directory does not exist"):
        raise result.exception or AssertionError(result.output)

"""A machine is measured, and a forecast from what was measured is near what a step takes."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.plan.cost.hardware import load_hardware
from meshwright.trace.calibrate import _products, calibrate
from meshwright.trace.time import forecast_time
from meshwright.train.start.setup import make_setup
from tests.trace.test_memory import setup_of
from tests.train.runs import tiny_run, train, write_corpus


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
        _products(setup_of(2, layers=2, layout=layout).plan) for layout in ({"dp_shard": 2}, {"tp": 2, "dp_shard": 1})
    )
    assert (32, 48) in whole  # gate and up of a layer
    assert (32, 24) in sliced
    assert (24, 32) in sliced  # down


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    example = str(Path(__file__).parents[2] / "examples" / "quickstart.yaml")
    result = CliRunner().invoke(app, ["calibrate", example, str(tmp_path / "no" / "x.yaml")])
    with pytest.raises(Exception, match="its directory does not exist"):
        raise result.exception or AssertionError(result.output)


def test_a_forecast_leaves_nothing_behind_for_ranks_that_are_forked(tmp_path: Path) -> None:
    """DTensor remembers results by meshes that are equal, whichever rank the process was: here rank 0 of a fake world."""
    config = tiny_run(tmp_path, write_corpus(tmp_path / "corpus.jsonl"), "training.steps=2")
    forecast_time(make_setup(config, 2), load_hardware("h100"))
    assert len(train(config, 2)) == 2  # and their checkpoint has all chunks

from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.train.config import RunConfig
from tests.train.runs import tiny_run, write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "words.jsonl")


@pytest.fixture
def tiny(tmp_path: Path, corpus: Path) -> Callable[..., RunConfig]:
    """Makes tiny runs: ``tiny("training.steps=3", name="other")``; each name has an output directory of its own."""

    def make(*overrides: str, name: str = "run") -> RunConfig:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        return tiny_run(directory, corpus, *overrides)

    return make

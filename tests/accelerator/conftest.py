"""The build of the accelerator, and workers that have it. This process has none: it would change the torch of every test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.ranks.pool import Pool
from tests.accelerator.build import CannotBuildError, build
from tests.accelerator.workers import Workers
from tests.train.conftest import corpus, tiny

__all__ = ["corpus", "tiny"]


@pytest.fixture(scope="session")
def accelerator() -> Path:
    """The folder that makes torch load the accelerator: see :func:`tests.accelerator.build.on_path`."""
    try:
        return build()
    except CannotBuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def one(accelerator: Path) -> Iterator[Workers]:
    """One worker with two devices."""
    with Workers(1, accelerator) as workers:
        yield workers


@pytest.fixture(scope="session")
def two(accelerator: Path) -> Iterator[Workers]:
    """Two workers in a process group, each on a device of its own."""
    with Workers(2, accelerator) as workers:
        yield workers


@pytest.fixture(scope="session")
def cpu_pool() -> Iterator[Pool]:
    """Two ranks on the CPU."""
    with Pool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def four(accelerator: Path) -> Iterator[Workers]:
    """Four workers in a process group, each on a device of its own."""
    with Workers(4, accelerator) as workers:
        yield workers


@pytest.fixture(scope="module")
def four_on_cpu() -> Iterator[Pool]:
    """Four ranks on the CPU."""
    with Pool(4) as pool:
        yield pool

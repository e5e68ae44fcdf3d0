"""The build of the accelerator, and workers that have it. This process has none: it would change the torch of every test."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.accelerator.build import CannotBuildError, build
from tests.accelerator.workers import Workers


@pytest.fixture(scope="session")
def accelerator() -> Path:
    """The folder that makes torch load the accelerator, where it is on ``PYTHONPATH``."""
    try:
        return build()
    except CannotBuildError as error:
        pytest.skip(str(error))


@contextmanager
def on_path(folder: Path, **variables: str) -> Iterator[None]:
    """Give processes that start inside the accelerator, and variables of its ``Settings``."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder), *sys.path])  # which spawned processes take over, in place of PYTHONPATH
        for name, value in {"PYTHONPATH": path, **variables}.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module", params=["sim"])
def one(request: pytest.FixtureRequest, accelerator: Path) -> Iterator[Workers]:
    """One worker with two devices."""
    with on_path(accelerator, ACCELERATOR_NAME=request.param), Workers(1, request.param) as workers:
        yield workers


@pytest.fixture(scope="module", params=["sim"])
def two(request: pytest.FixtureRequest, accelerator: Path) -> Iterator[Workers]:
    """Two workers in a process group, each on a device of its own."""
    with on_path(accelerator, ACCELERATOR_NAME=request.param), Workers(2, request.param) as workers:
        yield workers

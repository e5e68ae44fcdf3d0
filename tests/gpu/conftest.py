"""One worker on the GPU, and one on the CPU."""

from collections.abc import Iterator

import pytest

from meshwright.ranks.pool import Pool
from tests.train.conftest import corpus, tiny

__all__ = ["corpus", "tiny"]


@pytest.fixture(scope="module")
def gpu() -> Iterator[Pool]:
    with Pool(1, "cuda", patience=120) as pool:
        yield pool


@pytest.fixture(scope="module")
def cpu() -> Iterator[Pool]:
    with Pool(1, patience=120) as pool:
        yield pool

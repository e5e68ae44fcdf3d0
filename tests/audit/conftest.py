from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.audit.conduct import Auditor


@pytest.fixture(scope="module")
def auditor() -> Iterator[Auditor]:
    with Auditor() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the documents of cases are."""
    return tmp_path_factory.mktemp("audit")

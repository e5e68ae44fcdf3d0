"""Modules that an objective adds to the model: on every axis against one process, learned, saved, resumed, exported."""

from pathlib import Path
from typing import Any

import pytest

from tests.audit.conftest import auditor, folder
from tests.objectives.test_given import LORA, PLACES, compare

__all__ = ["auditor", "folder"]


@pytest.mark.parametrize(
    ("label", "name", "options"),
    [
        ("shard 2", "Heads", {}),
        ("tp 2 seq", "Heads", {}),
        ("cp 2", "Heads", {}),
        ("tp 2", "Preference", {"loss_parallel": True, "adapter": LORA}),
        ("pp 2", "Preference", {}),
    ],
)
def test_every_axis(auditor: Any, folder: Path, label: str, name: str, options: dict[str, Any]) -> None:
    compare(auditor, folder, PLACES[label], name, chunks=name == "Preference" and "pp" not in label, **options)

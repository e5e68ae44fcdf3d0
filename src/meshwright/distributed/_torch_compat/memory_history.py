"""The history of a device's memory, which torch records for some kinds of devices under names that are not documented."""

from pathlib import Path
from typing import Any

import torch

__all__ = ["record", "write"]

RECORD, DUMP = "_record_memory_history", "_dump_snapshot"


def _memory(kind: str) -> Any:
    try:
        return getattr(torch.get_device_module(kind), "memory", None)
    except RuntimeError:
        return None


def record(kind: str) -> bool:
    """Begin to record the history of the memory of a kind of device, and return whether torch can."""
    memory = _memory(kind)
    able = hasattr(memory, RECORD) and hasattr(memory, DUMP)
    if able:
        getattr(memory, RECORD)()
    return able


def write(kind: str, file: Path) -> None:
    """Write what was recorded, as torch's viewer of memory reads it, and end recording."""
    memory = _memory(kind)
    getattr(memory, DUMP)(str(file))
    getattr(memory, RECORD)(enabled=None)

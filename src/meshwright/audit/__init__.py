"""Compare many processes with one process, parameter by parameter.

Names are imported on first use.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "AuditReport": "report",
    "Auditor": "conduct",
    "Case": "case",
    "audit": "conduct",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'meshwright.audit' has no attribute {name!r}")
    return getattr(import_module(f"meshwright.audit.{_HOMES[name]}"), name)

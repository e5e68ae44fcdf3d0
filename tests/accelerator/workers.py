"""Processes that have the accelerator, stay alive between jobs, and are in one process group; and tests that run in them."""

import gc
import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from meshwright.ranks.pool import Pool
from tests.accelerator.build import on_path


class Workers(Pool):
    """Ranks that have the accelerator, each a device of its own.

    Args:
        number: of ranks.
        accelerator: folder of the build.
        kind: name of the device.
    """

    def __init__(self, number: int, accelerator: Path, kind: str = "sim") -> None:
        super().__init__(number, kind, patience=60)
        self._accelerator = accelerator

    def _start(self) -> None:
        with on_path(self._accelerator, ACCELERATOR_NAME=self.kind):
            super()._start()


def in_workers(number: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function ``(device, **parameters)``: it runs on this number of ranks (1 or 2), each on its device."""

    def test_of(function: Callable[..., None]) -> Callable[..., None]:
        fixture = {1: "one", 2: "two"}[number]

        def test(**given: Any) -> None:
            __tracebackhide__ = True  # what matters is the worker's traceback
            given.pop(fixture).run(_run_test, function.__module__, function.__name__, given)

        parameters = list(inspect.signature(function).parameters.values())[1:]
        own = inspect.Parameter(fixture, inspect.Parameter.KEYWORD_ONLY)
        parameters = [item.replace(kind=own.kind) for item in parameters]
        test.__signature__ = inspect.Signature([*parameters, own])  # type: ignore[attr-defined]
        test.__name__, test.__module__, test.__doc__ = function.__name__, function.__module__, function.__doc__
        test.pytestmark = getattr(function, "pytestmark", [])  # type: ignore[attr-defined]
        test.body = function  # type: ignore[attr-defined]
        return test

    return test_of


def _run_test(device: torch.device, module: str, name: str, given: dict[str, Any]) -> None:
    """Run it from a clean state, and find its reports unread: a test that is not about reports has none."""
    simulated = module_of(device)
    gc.collect()
    simulated.ignore_orders([])
    simulated.synchronize(device)
    simulated.reports.take()
    simulated.reset_counts()
    getattr(import_module(module), name).body(device, **given)
    simulated.synchronize(device)
    left = reports(device)
    assert not left, left


def module_of(device: torch.device) -> Any:
    """The module ``torch.<name>`` of the device."""
    return torch.get_device_module(device)


def reports(device: torch.device) -> list[Any]:
    """Take all reports but waits."""
    return module_of(device).reports.take()


def waits(device: torch.device) -> list[Any]:
    """Take the host's waits."""
    return module_of(device).reports.take("wait")

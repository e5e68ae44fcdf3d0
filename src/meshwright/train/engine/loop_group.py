"""The process group of engines: the first one starts it, all later ones of the process share it, the last one ends it."""

import atexit
import os
import sys
from contextlib import ExitStack
from datetime import timedelta

import torch
import torch.distributed as dist

from meshwright.device import claim
from meshwright.distributed.process_group import process_group

__all__ = ["Membership"]


class Membership:
    """One engine's use of the process group. A group that the user started is used, and never ended.

    Args:
        kind: kind of the device.
        timeout: how long a collective waits for other ranks, if this engine starts the group.

    Attributes:
        device: the device of this rank.
    """

    def __init__(self, kind: str, timeout: timedelta) -> None:
        self._counts = False
        if dist.is_initialized():
            self.device = claim(kind, int(os.environ.get("LOCAL_RANK", 0)))
        else:
            self.device = _begin(kind, timeout)
        if _shared.resources is not None:
            _shared.users += 1
            self._counts = True

    def end(self, *, failed: bool = False) -> None:
        """Leave the group; the last one ends it.

        Args:
            failed: leave it open until the program ends, since other ranks may wait in a collective.
        """
        if not self._counts:
            return
        self._counts = False
        _shared.users -= 1
        if not _shared.users and not failed:
            _end()


class _Shared:
    """The group that an engine of this process started: what ends it, and how many engines use it."""

    resources: ExitStack | None = None
    users = 0


_shared = _Shared()


def _begin(kind: str, timeout: timedelta) -> torch.device:
    resources = ExitStack()
    device = resources.enter_context(process_group(timeout, kind))
    if _shared.resources is None:
        atexit.register(_end_at_exit)
    else:  # the user ended it meanwhile, and with it the group of all engines until now
        _shared.users = 0
    _shared.resources = resources
    return device


def _end() -> None:
    resources, _shared.resources = _shared.resources, None
    atexit.unregister(_end_at_exit)
    if resources is not None and dist.is_initialized():
        resources.close()


def _end_at_exit() -> None:
    if not hasattr(sys, "last_value"):  # else the process fails, and its peers may wait in a collective
        _end()

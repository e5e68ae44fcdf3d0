"""What a rank does at a moment: its stack, its collectives, and whether it moves."""

import os
import re
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import prod
from pathlib import Path
from typing import Any

import torch

from meshwright.distributed import _torch_compat

__all__ = ["Collective", "Frame", "Pace", "RankState", "look", "pulse", "ranks_in_words", "stack_of_text"]

SIZES_MAY_DIFFER = ("all_to_all", "gather", "scatter")
"""Collectives in which the ranks' tensors may differ in size; in every other collective a difference is an error."""
SHOWN_FRAMES = 4
BUSY = 0.05
"""A thread that computes more than this share of the time counts as making progress."""
_TORCH = str(Path(torch.__file__).parent) + os.sep
_STANDARD = sysconfig.get_paths()["stdlib"]
_WORKER = str(Path(__file__).with_name("forked.py"))
_WRAPPERS = {"wrapper", "inner", "fsdp_hook_wrapper", "decorate_context", "_wrapped_call_impl", "_call_impl", "_fn"}
_DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16"}


@dataclass(frozen=True)
class Collective:
    """One entry of the flight recorder: a collective that a rank entered in a group.

    Attributes:
        kind: such as ``all_reduce``.
        number: sequence number of the collective in its group.
        group: torch's name of the group.
        description: torch's description of the group, which names its mesh axis.
        ranks: the ranks of the group.
        shapes: shape of each input tensor.
        dtypes: dtype of each input tensor.
        finished: whether the collective has finished.
        time: when the entry was created, in ns.
    """

    kind: str
    number: int
    group: str
    description: str
    ranks: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    finished: bool
    time: int

    @property
    def place(self) -> str:
        """The group in words, by its mesh axis if torch knows it. An axis over all ranks shares the default group."""
        axis = self.description.removeprefix("mesh_")
        known = {"default_pg": "the default group", "undefined": f"group {self.group}", "": f"group {self.group}"}
        return f"{known.get(axis, axis)} ({ranks_in_words(self.ranks)})"

    @property
    def tensors(self) -> str:
        """Shape and dtype of this rank's input tensors, in words; empty for a barrier."""
        if not self.shapes:
            return ""
        more = f" and {len(self.shapes) - 1} more" if len(self.shapes) > 1 else ""
        shape = " x ".join(map(str, self.shapes[0])) or "scalar"
        return f"{shape} {self.dtypes[0] if self.dtypes else ''}{more}"

    @property
    def agreement(self) -> tuple[Any, ...]:
        """The values that must be equal on all ranks."""
        if self.kind in SIZES_MAY_DIFFER:
            return (self.kind,)
        return (self.kind, tuple(prod(shape) for shape in self.shapes), self.dtypes)

    def __str__(self) -> str:
        return f"{self.kind} number {self.number} of {self.place}"


@dataclass(frozen=True)
class Frame:
    """One level of a Python stack."""

    file: str
    line: int
    function: str

    @property
    def is_torch(self) -> bool:
        """Whether the code belongs to torch."""
        return self.file.startswith(_TORCH)

    @property
    def foreign(self) -> bool:
        """Whether the code belongs to torch or to Python's standard library, which tells the user little."""
        standard = self.file.startswith(_STANDARD) and "site-packages" not in self.file
        return self.is_torch or standard or self.file.startswith("<") or self.file.endswith("typing_extensions.py")


@dataclass(frozen=True)
class RankState:
    """Where a rank is.

    Attributes:
        rank: its number.
        collectives: the collectives that it entered, in order; empty: the rank makes progress, so its recorder was not read;
            ``None``: torch recorded none.
        stack: the useful frames, innermost first: the function of torch that the rank is in, then code that is not torch's.
        ending: how its job ended, such as ``has returned``; ``None``: the job still runs.
        broken: whether the job ended because a collective failed.
        silent: why nothing is known about the rank; ``None``: it answered.
        doing: what the rank last said that it does, such as ``step 12, stage 0, forward of microbatch 3``.
    """

    rank: int
    collectives: tuple[Collective, ...] | None = None
    stack: tuple[Frame, ...] = ()
    ending: str | None = None
    broken: bool = False
    silent: str | None = None
    doing: str = ""

    @property
    def waits(self) -> Collective | None:
        """The collective that the rank waits in; if several are in flight, the first."""
        return next((item for item in self.collectives or () if not item.finished), None)

    @property
    def last(self) -> Collective | None:
        """The last collective that the rank finished."""
        return next((item for item in reversed(self.collectives or ()) if item.finished), None)

    @property
    def position(self) -> str:
        """The stack of the rank in a few words."""
        code = [frame for frame in self.stack if not frame.is_torch]
        path = " <- ".join(f"{Path(item.file).name}:{item.line} {item.function}" for item in code[:SHOWN_FRAMES])
        inner = self.stack[0].function if self.stack and self.stack[0].is_torch else ""
        inner = f"in torch's {inner}" if inner and not (self.waits and inner == self.waits.kind) else ""
        return ", ".join(part for part in (inner, path and f"called from {path}" if inner or self.waits else path) if part)

    def __str__(self) -> str:
        return f"{self._where()}{f' ({self.doing})' if self.doing else ''}"

    def _where(self) -> str:
        last = "; its last collective was " + ", ".join(filter(None, (str(self.last), self.last.tensors))) if self.last else ""
        if self.ending or self.silent:
            return f"rank {self.rank} {self.ending or self.silent}{last}"
        if self.waits:
            return ", ".join(filter(None, (f"rank {self.rank} waits in {self.waits}", self.waits.tensors, self.position)))
        where = self.position or "at an unknown place"
        where = where if where.startswith(("in ", "at ")) else f"at {where}"
        return f"rank {self.rank} is {where if self.collectives is None else f'in no collective; it is {where}'}{last}"


def look(rank: int, thread: int, *, recorded: bool = True) -> RankState:
    """Return the state of this process. Another thread than ``thread`` calls this.

    Args:
        rank: rank of this process.
        thread: the thread whose stack is read.
        recorded: whether to read the flight recorder too; that thread must not make progress meanwhile.
    """
    if not recorded:
        return RankState(rank, (), _useful(_frames(thread)))
    records, ranks = _torch_compat.flight_records(), _torch_compat.group_ranks()
    entries = sorted((item for record in records or () for item in record.get("entries", ())), key=_created)
    collectives = tuple(_collective(entry, ranks) for entry in entries)
    # The pool's workers begin with an all-reduce, so no collective at all means that nothing was recorded.
    return RankState(rank, collectives or None, _useful(_frames(thread)))


def _created(entry: dict[str, Any]) -> int:
    return entry["time_created_ns"]


def _collective(entry: dict[str, Any], ranks: dict[str, tuple[int, ...]]) -> Collective:
    group, description = entry["process_group"]
    return Collective(
        kind=entry["profiling_name"].split(":")[-1].removeprefix("_").removesuffix("_base"),
        number=entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"],
        group=group,
        description=description,
        ranks=ranks.get(group, ()),
        shapes=tuple(map(tuple, entry["input_sizes"])),
        dtypes=tuple(_DTYPES.get(name, name.lower()) for name in entry.get("input_dtypes", ())),
        finished=entry["retired"],
        time=_created(entry),
    )


def pulse() -> str:
    """Return a value that changes while the main thread makes progress: the number of times it has waited for something.

    On systems other than Linux, which do not give this number, the value always changes, and only the timeout of collectives
    ends a hang.

    This is called twice a second while the main thread runs, so it must not read anything that a running process changes.
    torch's recorder keeps its data about groups in maps that are read without a lock. Code that walks Python's stacks
    (``faulthandler`` too) meets threads that are just being created or ended. Either crashes a process once in some thousand
    calls.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return str(time.monotonic())
    return "".join(re.findall(r"^voluntary_ctxt_switches:.*", status, re.MULTILINE))


class Pace:
    """Detects whether a thread of this process makes progress: it has waited for something new, or it computes.

    Args:
        thread: Python's identifier of the thread; the main thread.
        kind: kind of device. A wait for an accelerator spins, so on one computing is no sign of progress.
    """

    def __init__(self, thread: int, kind: str) -> None:
        clocked = kind == "cpu" and hasattr(time, "pthread_getcpuclockid")
        self._clock = time.pthread_getcpuclockid(thread) if clocked else None
        self._pulse, self._spent, self._time = "", 0.0, time.monotonic()

    def moved(self) -> bool:
        """Whether the thread made progress since the last call."""
        now, time_now = pulse(), time.monotonic()
        used = time.clock_gettime(self._clock) if self._clock is not None else 0.0
        computed = used > self._spent + BUSY * (time_now - self._time)
        moved = now != self._pulse or computed
        self._pulse, self._spent, self._time = now, used, time_now
        return moved


def _frames(thread: int) -> list[Frame]:
    """The frames of a thread, innermost first. It must not make progress: its frames must not end while they are read."""
    frames = []
    try:
        frame = sys._current_frames().get(thread)
        while frame is not None:
            frames.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
    except AttributeError:  # in Python 3.11 f_back of a frame that has ended is sometimes not a frame
        pass
    return frames


def stack_of_text(text: str) -> tuple[Frame, ...]:
    """Return the useful frames of the text that ``faulthandler`` wrote about one thread."""
    lines = re.findall(r'File "(.+)", line (\d+) in (.+)', text)
    return _useful([Frame(file, int(line), function) for file, line, function in lines])


def _useful(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """The frames inside the worker's own, innermost first, without foreign code except for the call that entered torch."""
    inside = list(takewhile(lambda frame: frame.file != _WORKER, frames))
    inner = list(takewhile(lambda frame: frame.foreign, inside))
    entrance = [frame for frame in inner if frame.is_torch and frame.function not in _WRAPPERS]
    return (*entrance[-1:], *(frame for frame in inside if not frame.foreign))


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks in words, such as ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

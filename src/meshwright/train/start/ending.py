"""Ends a run early, losing no work: on a signal, all ranks agree on a step, save a checkpoint and exit with code 75.

A separate thread handles signals, so they are handled even while the main thread waits in a collective. The ranks agree through
the store, on the CPU: no step waits for a device, and no collective is added.
"""

import itertools
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch.distributed as dist

from meshwright.distributed import _torch_compat
from meshwright.errors import MeshwrightError

__all__ = [
    "SIGNALS",
    "UNEXPORTED",
    "WISH",
    "Agreement",
    "Decision",
    "SignalThread",
    "begin",
    "has_begun",
    "leave_to_rank_0",
    "tell",
    "wishes_to_end",
]

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""The signals that Slurm, Kubernetes and spot machines send before they kill a process, and that of Ctrl-C."""
BEAT = 0.2
"""Seconds between two checks whether the launcher asks to end the run."""
WITH_LAUNCHER = 1.0
"""Seconds that a worker waits for the launcher's file after a SIGTERM, in case the launcher got the signal too."""
WISH = "the run ends after this step or the next, with a checkpoint; a second signal ends it now"
UNEXPORTED = "ended after the last step; its checkpoint is complete, and the same command exports it"
AGAIN = 0.05
"""Seconds after which a signal comes again whose exception Python dropped."""
SAME = 2.0
"""Seconds within which a second signal counts as the first: Ctrl-C reaches a worker from the terminal and from torchrun."""


_MADE = itertools.count()
"""Numbers of agreements: the same on all ranks, which make them in the same order."""
DECIDED = "decided"
"""Key of the step that rank 0 decided about last."""
POLL = 0.001
"""Seconds between two looks at it."""
BEGUN = "begun"
"""Name of the file beside the launcher's file by which rank 0 says that training begins."""


def begin(asked: Path) -> None:
    """Say that training begins, to the launcher and to all its workers.

    Args:
        asked: the file that the launcher creates to ask the run to end.
    """
    asked.with_name(BEGUN).touch()


def has_begun(asked: Path) -> bool:
    """Return whether training has begun."""
    return asked.with_name(BEGUN).exists()


@dataclass(frozen=True)
class Decision:
    """What all ranks do after a step.

    Attributes:
        save: whether a checkpoint is due.
        end: why the run ends here, with a checkpoint; empty: it goes on.
        finish: why the run is done here, as after its last step; empty: it goes on.
    """

    save: bool = False
    end: str = ""
    finish: str = ""


class Agreement:
    """Makes all ranks save, or end, after the same step.

    After step n, rank 0 decides what all ranks do after step n + 1, and writes it into the store before it begins that step.
    After step n + 1, the others wait for it. On the CPU it is there, because the step needs the gradient of rank 0. On an
    accelerator, where the host only launches the step, a host that is ahead of rank 0's waits for it, and not for a device.

    Args:
        minutes: time between two checkpoints, by the clock of rank 0; ``None``: no checkpoints by the clock.
    """

    def __init__(self, minutes: float | None = None) -> None:
        keys = f"boundary/{next(_MADE)}"  # a process group may have several runs, one after another
        self._store, self._rank0 = _torch_compat.control_store(keys), dist.get_rank() == 0
        self._wishes = _torch_compat.control_store(keys)  # for other threads: one thread at a time may use a connection
        self._seconds = None if minutes is None else 60 * minutes
        self._saved = time.monotonic()
        self._first: int | None = None
        self._decided = 0

    def ask_to_end(self, reason: str) -> None:
        """Ask for the run to end after this step or the next one. Any rank and any thread may call it.

        Args:
            reason: printed in the last line of the run, such as ``SIGTERM``.
        """
        with suppress(RuntimeError):  # if the store is gone, the run ends anyway, and sooner
            self._wishes.set("end", f"end {reason}")

    def ask_to_finish(self, step: int, reason: str) -> None:
        """Ask for the run to be done, as after its last step. Any rank may call it, in its main thread.

        If rank 0 calls it, the step is the same in every run: rank 0 decides about the next step after it has asked.

        Args:
            step: the step that was done last, or is under way.
            reason: for people.
        """
        self._store.set("end", f"finish {step} {reason}")

    def saved(self) -> None:
        """Restart the clock, because a checkpoint was saved."""
        self._saved = time.monotonic()

    def after(self, step: int) -> Decision:
        """Return what all ranks do after a step.

        Args:
            step: number of optimizer steps done.
        """
        decision = Decision()
        self._first = self._first or step  # nobody decides what is done after it
        while self._decided < step > self._first:
            self._decided = int(self._store.get(DECIDED))
            if self._decided < step:
                time.sleep(POLL)
        if self._store.check([str(step)]):
            word, _, reason = self._store.get(str(step)).decode().partition(" ")
            ends, finishes = (reason if word == one else "" for one in ("end", "finish"))
            decision = Decision(save=word == "save", end=ends, finish=finishes)
        if self._rank0 and not (decision.end or decision.finish):
            self._decide(step + 1)
        return decision

    def _decide(self, step: int) -> None:
        word = ""
        if self._store.check(["end"]):
            word = _due_at(self._store.get("end").decode(), step)
        elif self._seconds is not None and time.monotonic() - self._saved > self._seconds:
            word = "save"
        if word:
            self._store.set(str(step), word)
        self._store.set(DECIDED, str(step))  # after the decision, which whoever reads this will find
        self._decided = step


def _due_at(wish: str, step: int) -> str:
    """Return the word about a step that a wish leads to; none if a rank that is ahead asked after it."""
    kind, _, rest = wish.partition(" ")
    if kind == "end":
        return wish
    asked, _, reason = rest.partition(" ")
    return f"finish {reason}" if int(asked) < step else ""


class SignalThread:
    """Handles the signals of this process in a thread. Use it as a context manager, in the main thread.

    The first signal asks the run to end. A second one, more than :data:`SAME` seconds later, ends the process at once.

    Args:
        signals: the signals to handle.
        ask: called once, in the thread, with the name of the first signal.
        asked: a file that the launcher, which started this process, creates to ask the same; it holds the reason. If given,
            this process ends at once when the launcher is gone, or on a SIGTERM that the launcher did not get.
        speaks: whether to print that the signal was received, if there is no launcher that prints it.
    """

    def __init__(
        self,
        signals: tuple[signal.Signals, ...],
        ask: Callable[[str], None],
        asked: Path | None = None,
        *,
        speaks: bool = False,
    ) -> None:
        self._signals, self._ask, self._file, self._speaks = signals, ask, asked, speaks
        self._first: float | None = None
        self._parent = os.getppid()

    def __enter__(self) -> "SignalThread":
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _taken) for number in self._signals}
        self._thread = threading.Thread(target=self._attend, daemon=True)
        self._thread.start()
        _ATTENDED.extend(self._signals)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _ATTENDED.clear()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._write)
        self._thread.join(10 * BEAT)
        os.close(self._read)

    def _attend(self) -> None:
        while True:
            ready, _, _ = select.select([self._read], [], [], None if self._file is None else BEAT)
            if self._file is not None and os.getppid() != self._parent:
                os._exit(1)  # the launcher died; the SIGINT that the kernel then sends does not ask the run to end
            if ready:
                numbers = os.read(self._read, 64)
                if not numbers:
                    return
                for number in numbers:
                    if number in self._signals:
                        self._take(signal.Signals(number))
            elif self._first is None and self._asked():
                self._begin(self._reason())

    def _asked(self) -> bool:
        return self._file is not None and self._file.exists()

    def _reason(self) -> str:
        return self._file.read_text() if self._file is not None else ""

    def _take(self, number: signal.Signals) -> None:
        if self._first is None and self._file is not None and number is signal.SIGTERM:
            # torch sends SIGTERM to end the other workers of a failed job. It asks the run to end only if the launcher got it
            # too, as from `timeout`.
            end = time.monotonic() + WITH_LAUNCHER
            while not self._asked() and time.monotonic() < end and not any(self._file.parent.glob("rank-*")):
                time.sleep(BEAT / 4)
            if not self._asked():
                os._exit(128 + number)
        if self._first is None:
            self._begin(number.name)
        elif time.monotonic() > self._first + SAME:
            os._exit(128 + number)

    def _begin(self, reason: str) -> None:
        self._first = time.monotonic()
        self._ask(reason)
        if self._file is None and self._speaks:  # otherwise the launcher has printed it
            tell(f"{reason}: {WISH}")


def tell(line: str) -> None:
    """Write a line to stderr at once. Safe in a signal handler, which may interrupt a print; a closed terminal is ignored."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode())


@contextmanager
def wishes_to_end(asked: Path, interrupted: list[int]) -> Iterator[None]:
    """Pass the first signal that comes inside on to the workers, by a file; a second one ends them at once, as torch does.

    Ctrl-C before the first step ends them at once too: there is nothing to save. It is noted in ``interrupted``, because Python
    drops an exception that is raised in a function that it calls at a fork.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    first: list[float] = []
    comes_again = threading.Event()

    def take(number: int, frame: object) -> None:
        name = signal.Signals(number).name
        if comes_again.is_set():
            return
        if number == signal.SIGINT and not has_begun(asked):
            interrupted.append(number)
            raise SignalException(f"{name} before the first step", sigval=signal.SIGINT)
        if not first:
            first.append(time.monotonic())
            asked.with_suffix(".tmp").write_text(name)
            asked.with_suffix(".tmp").rename(asked)
            tell(f"{name}: {WISH}")
        elif time.monotonic() > first[0] + SAME:
            raise SignalException(f"{name} a second time", sigval=signal.Signals(number))

    def dropped(error: Any) -> None:
        if not isinstance(error.exc_value, SignalException):
            report(error)
            return
        comes_again.set()
        threading.Timer(AGAIN, come_again, (error.exc_value.sigval,)).start()

    def come_again(number: signal.Signals) -> None:
        comes_again.clear()
        os.kill(os.getpid(), number)

    before = {number: signal.signal(number, take) for number in SIGNALS}
    report, sys.unraisablehook = sys.unraisablehook, dropped
    try:
        yield
    finally:
        sys.unraisablehook = report
        for number, handler in before.items():
            signal.signal(number, handler)


def leave_to_rank_0(error: MeshwrightError) -> NoReturn:
    """End this rank silently on an error that rank 0 reports; a second later, so that rank 0 is not stopped before it does."""
    time.sleep(1)
    os._exit(error.exit_code)  # the process group still exists, and a regular exit of the interpreter might wait for it


def _taken(number: int, frame: object) -> None:
    """Do nothing: the thread gets the signal too. This handler only replaces the default action of the signal."""


_ATTENDED: list[signal.Signals] = []
"""The signals that a thread of this process handles."""


def _hold() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _ATTENDED)


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ATTENDED)


def _forget() -> None:
    """Restore the default handlers in a process that user code forks: it has no such thread, and handles signals itself."""
    if _ATTENDED:
        signal.set_wakeup_fd(-1)
        for number in _ATTENDED:
            signal.signal(number, signal.SIG_DFL)
        _release()
        _ATTENDED.clear()


os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_forget)

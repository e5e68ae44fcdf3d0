"""How a run ends early and loses nothing: a signal, all ranks agree on a step, a complete checkpoint, exit code 75.

A signal is taken by a thread of its own, so also while the main thread waits in a collective. The ranks agree through the
store, on the CPU: no step waits for a device, and no collective is added.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch.distributed as dist

from meshwright.distributed import _torch_compat
from meshwright.errors import MeshwrightError

__all__ = ["SIGNALS", "UNEXPORTED", "WISH", "Agreement", "Attendant", "Decision", "leave_to_rank_0", "tell"]

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""What Slurm, Kubernetes and spot machines send before they kill, and Ctrl-C."""
BEAT = 0.2
"""Seconds between two looks for what the launcher asks."""
WITH_LAUNCHER = 1.0
"""Seconds in which the launcher passes a signal on, that it got together with a worker."""
WISH = "the run ends after this step or the next, with a checkpoint; a second signal ends it now"
UNEXPORTED = "ended after the last step; its checkpoint is complete, and the same command exports it"
SAME = 2.0
"""Seconds within which a second signal is the first once more: Ctrl-C reaches a worker from the terminal and from torchrun."""


@dataclass(frozen=True)
class Decision:
    """What all ranks do after a step.

    Attributes:
        save: a checkpoint is due.
        end: why the run ends here, with a checkpoint; empty: it does not.
    """

    save: bool = False
    end: str = ""


class Agreement:
    """Has all ranks save, or end, after the same step.

    Rank 0 decides after step n what is done after step n + 1, and writes it into the store before it begins that step. No
    rank completes step n + 1 without rank 0, whose gradient is in it. So every rank that looks after step n + 1 finds it.

    Args:
        minutes: between two checkpoints, by the clock of rank 0; ``None``: whatever the clock says.
    """

    def __init__(self, minutes: float | None = None) -> None:
        self._store, self._rank0 = _torch_compat.control_store("boundary"), dist.get_rank() == 0
        self._wishes = _torch_compat.control_store("boundary")  # for other threads: a connection is one thread's at a time
        self._seconds = None if minutes is None else 60 * minutes
        self._saved = time.monotonic()

    def ask_to_end(self, reason: str) -> None:
        """Have the run end after this step or the next one. From any rank and any thread.

        Args:
            reason: for the last line of the run, such as ``SIGTERM``.
        """
        with suppress(RuntimeError):  # a store that is gone ends the run sooner
            self._wishes.set("end", reason)

    def saved(self) -> None:
        """A checkpoint was saved; the clock begins anew."""
        self._saved = time.monotonic()

    def after(self, step: int) -> Decision:
        """What is done after a step.

        Args:
            step: optimizer steps done.
        """
        found = Decision()
        if self._store.check([str(step)]):
            word, _, reason = self._store.get(str(step)).decode().partition(" ")
            found = Decision(save=word == "save", end=reason)
        if self._rank0 and not found.end:
            self._decide(step + 1)
        return found

    def _decide(self, step: int) -> None:
        word = ""
        if self._store.check(["end"]):
            word = f"end {self._store.get('end').decode()}"
        elif self._seconds is not None and time.monotonic() - self._saved > self._seconds:
            word = "save"
        if word:
            self._store.set(str(step), word)
            self._store.check([str(step)])  # answered: so the store has it before any rank begins the step


class Attendant:
    """Takes the signals of this process, in a thread. Use it as a context manager, in the main thread.

    The first is a wish to end, the second, later than :data:`SAME`, ends the process at once.

    Args:
        signals: to take.
        ask: called once with the name of the signal that came first, in another thread.
        asked: a file that appears when the launcher, which started this process, asks the same; it holds the reason. With it,
            this process ends at once when the launcher is gone, and by a SIGTERM that the launcher did not get.
        speaks: say that the signal was heard, where there is no launcher that says it.
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

    def __enter__(self) -> "Attendant":
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
                os._exit(1)  # the launcher died; a SIGINT, which torch has sent then, is no wish
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
            # torch ends the others of a failed job by it. It is a wish where the launcher got it too, as from `timeout`.
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
        if self._file is None and self._speaks:  # otherwise the launcher has said it
            tell(f"{reason}: {WISH}")


def tell(line: str) -> None:
    """Say a line at once, also from a handler: print may be what the signal came in. A terminal may be gone."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode())


def leave_to_rank_0(error: MeshwrightError) -> NoReturn:
    """End this rank without a word, for an error that rank 0 has too; a moment later, or rank 0 is stopped before it spoke."""
    time.sleep(1)
    os._exit(error.exit_code)  # the group is still there, and the end of the interpreter might wait for it


def _taken(number: int, frame: object) -> None:
    """The thread has it already; this only keeps the signal from doing what it would do."""


_ATTENDED: list[signal.Signals] = []
"""Signals that a thread of this process takes."""


def _hold() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _ATTENDED)


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ATTENDED)


def _forget() -> None:
    """In a process that user code forks: it has no such thread, and its signals are its own."""
    if _ATTENDED:
        signal.set_wakeup_fd(-1)
        for number in _ATTENDED:
            signal.signal(number, signal.SIG_DFL)
        _release()
        _ATTENDED.clear()


os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_forget)

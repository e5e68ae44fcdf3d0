"""``meshwright`` with a rank that fails in its second step: ``python -m tests.cli.failing HOW RANK VERB ARGUMENT...``."""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

MESSAGE = "a cat sat on the cable"


def fail(how: str, rank: int) -> Callable[[], None]:
    """What makes a rank fail; to be called in the process that starts the ranks, or in each of them."""

    def patch() -> None:
        from meshwright.train.trainer import Trainer

        plain = Trainer.train_step

        def train_step(self: Trainer) -> dict[str, Any]:
            if self.step == 1 and self.rank == rank:
                HOW[how]()
            return plain(self)

        Trainer.train_step = train_step

    return patch


def _raise() -> None:
    raise ValueError(MESSAGE)


def _raise_ours() -> None:
    from meshwright.errors import DataError

    raise DataError(MESSAGE)


def _interrupt_launcher(number: int) -> None:
    os.kill(os.getppid(), number)
    time.sleep(60)


HOW: dict[str, Callable[[], Any]] = {
    "raise": _raise,
    "raise ours": _raise_ours,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "abort": os.abort,
    "exit": lambda: os._exit(7),
    "sleep": lambda: time.sleep(60),
    "interrupt the launcher": lambda: _interrupt_launcher(signal.SIGINT),
    "kill the launcher": lambda: _interrupt_launcher(signal.SIGKILL),
    "terminate the launcher": lambda: _interrupt_launcher(signal.SIGTERM),
}


if __name__ == "__main__":
    fail(sys.argv[1], int(sys.argv[2]))()
    from meshwright.cli.main import main

    sys.argv = ["meshwright", *sys.argv[3:]]
    main()

"""``meshwright`` with a rank that fails in its second step: ``python -m tests.cli.failing HOW RANK VERB ARGUMENT...``."""

import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from meshwright.train.start.ending import SAME

MESSAGE = "a cat sat on the cable"


def fail(how: str, rank: int) -> Callable[[], None]:
    """What makes a rank fail, or be asked to end; to be called in the process that starts the ranks, or in each of them."""

    def patch() -> None:
        from meshwright.train.trainer import Trainer

        plain = Trainer.train_step

        def train_step(self: Trainer) -> None:
            if self.step == 1 and self.rank == rank:
                HOW[how]()
            plain(self)

        Trainer.train_step = train_step

    return patch


def in_the_schedule(rank: int, do: Callable[[], None]) -> Callable[[], None]:
    """What makes a rank do something in the second step of a pipeline, before the backward of the second microbatch."""

    def patch() -> None:
        import torch.distributed as dist

        from meshwright.distributed.pipeline.scheduled_stages import _Stage

        plain, before = _Stage.backward_one_chunk, []

        def backward_one_chunk(self: Any, microbatch: int, *args: Any, **kwargs: Any) -> Any:
            if microbatch == 1:
                before.append(self)
                if len(before) == 2 and dist.get_rank() == rank:
                    do()
            return plain(self, microbatch, *args, **kwargs)

        _Stage.backward_one_chunk = backward_one_chunk

    return patch


def _raise() -> None:
    raise ValueError(MESSAGE)


def _raise_ours() -> None:
    from meshwright.errors import DataError

    raise DataError(MESSAGE)


def _end_launcher(number: int) -> None:
    """Twice: the first signal is a wish, for which a step that hangs has no end."""
    os.kill(os.getppid(), number)
    time.sleep(SAME + 0.5)
    os.kill(os.getppid(), number)
    time.sleep(60)


def _ask(name: str, launcher: bool) -> None:
    """A wish to end, on which the step goes on."""
    os.kill(os.getppid() if launcher else os.getpid(), signal.Signals[name])
    time.sleep(1)


HOW: dict[str, Callable[[], Any]] = {
    "raise": _raise,
    "raise ours": _raise_ours,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "abort": os.abort,
    "exit": lambda: os._exit(7),
    "sleep": lambda: time.sleep(60),
    "terminate all": lambda: (os.killpg(0, signal.SIGTERM), time.sleep(1)),
    "interrupt the launcher": lambda: _end_launcher(signal.SIGINT),
    "kill the launcher": lambda: _end_launcher(signal.SIGKILL),
    "terminate the launcher": lambda: _end_launcher(signal.SIGTERM),
    **{f"ask the launcher with {name}": functools.partial(_ask, name, True) for name in ("SIGTERM", "SIGINT", "SIGUSR1")},
    **{f"get {name}": functools.partial(_ask, name, False) for name in ("SIGTERM", "SIGINT", "SIGUSR1")},
}


if __name__ == "__main__":
    fail(sys.argv[1], int(sys.argv[2]))()
    from meshwright.cli.main import main

    sys.argv = ["meshwright", *sys.argv[3:]]
    main()

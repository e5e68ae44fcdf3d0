import faulthandler
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from meshwright.cli.main import main
from meshwright.ranks.forked import keep_inherited
from meshwright.train.start.prepare import prepare_run
from tests.train.conftest import corpus, tiny
from tests.train.runs import tiny_run, write_config

__all__ = ["corpus", "tiny"]


class Outcome(NamedTuple):
    """How a command ended; ``session`` is the number of its process group."""

    code: int
    out: str
    error: str
    seconds: float
    session: int


@pytest.fixture(autouse=True)
def records(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's audits are on record: there are none yet."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "meshwright" / "audits"


@pytest.fixture
def config(tmp_path: Path, corpus: Path) -> str:
    """The file of a tiny run."""
    return str(write_config(tmp_path, corpus))


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> None:
    """Import here, once, what every command needs: a fork starts with it."""
    import torch._dynamo  # noqa: F401

    prepare_run(tiny_run(tmp_path_factory.mktemp("warm"), corpus), 1)


class Command:
    """A command in a fork of this process.

    A fork, because it starts at once, inherits what a test has patched, and may train: a process that has trained cannot
    fork ranks any more.

    Args:
        folder: for its output.
        arguments: after ``meshwright``.
        before: called in the fork first.
        environment: set in the fork.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: object,
        before: Callable[[], None] | None = None,
        environment: Mapping[str, object] | None = None,
    ) -> None:
        self.begun = time.monotonic()
        self.files = tuple(Path(tempfile.mkdtemp(dir=folder), name) for name in ("out", "error"))
        self.process = os.fork()
        if self.process == 0:
            keep_inherited()
            os.environ.update({name: str(value) for name, value in (environment or {}).items()})
            _command([str(item) for item in arguments], self.files, before)

    def end(self, limit: float = 60) -> Outcome:
        """Wait for its end; after ``limit`` seconds it is killed."""
        while not (ended := os.waitpid(self.process, os.WNOHANG))[0]:
            time.sleep(0.01)
            if time.monotonic() - self.begun > limit:
                os.killpg(self.process, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(ended[1])
        return Outcome(code, *(file.read_text() for file in self.files), time.monotonic() - self.begun, self.process)


def all_gone(outcome: Outcome) -> None:
    """Wait until a command's workers have ended with it.

    Raises:
        AssertionError: after 20 s, with those that are left.
    """
    for _ in range(200):
        try:
            os.killpg(outcome.session, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    command = ["ps", "-o", "pid,ppid,stat,wchan:20,args", "-s", str(outcome.session)]
    left = subprocess.run(command, capture_output=True, text=True, check=False)
    os.killpg(outcome.session, signal.SIGKILL)
    raise AssertionError(f"workers outlived their launcher by 20 s:\n{left.stdout}")


@pytest.fixture
def start(tmp_path: Path, warm: None) -> Callable[..., Command]:
    """Starts a command in a fork: ``start("train", config, "--debug").end()``."""
    return functools.partial(Command, tmp_path)


@pytest.fixture
def meshwright(start: Callable[..., Command]) -> Callable[..., Outcome]:
    """Runs a command in a fork to its end: ``meshwright("train", config, "--debug")``."""
    return lambda *arguments, **keywords: start(*arguments, **keywords).end()


def _command(arguments: list[str], files: tuple[Path, ...], before: Callable[[], None] | None) -> None:
    """What the fork does; it does not return."""
    code = 99
    try:
        os.setsid()
        for number, file in enumerate(files, start=1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
        faulthandler.disable()  # pytest's
        sys.argv = ["meshwright", *arguments]
        if before is not None:
            before()
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

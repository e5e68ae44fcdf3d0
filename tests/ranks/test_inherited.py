"""A forked worker leaves what it has inherited alone: the destructor of a process group would abort it, or never return."""

import gc
import os
from pathlib import Path

from meshwright.ranks.pool import Pool
from tests.harness import run_ranks


class Group:
    """What a process group is to the collector: an object in a cycle, which its destructor notes."""

    def __init__(self, file: Path) -> None:
        self.file, self.own = file, self

    def __del__(self) -> None:
        with self.file.open("a") as file:
            file.write(f"{os.getpid()}\n")


def collected(*_: object) -> int:
    return gc.collect()


def test_garbage_of_the_parent_stays_where_it_is(tmp_path: Path) -> None:
    file = tmp_path / "collected"
    gc.disable()
    try:
        Group(file)
        run_ranks(collected, 2, group=False)
        with Pool(1) as pool:
            pool.run(collected)
        assert not file.exists()
    finally:
        gc.enable()
    gc.collect()
    assert file.read_text() == f"{os.getpid()}\n"

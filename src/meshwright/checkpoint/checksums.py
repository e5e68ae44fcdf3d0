"""The SHA-256 of every file of a checkpoint: summed while it is written, compared before anything is loaded.

They lie beside the files, as ``sha256sum --check SHA256SUMS`` reads them.
"""

import hashlib
import io
import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

__all__ = ["NAME", "SummingFiles", "append", "damage", "listed", "share", "sizes", "sum_of"]

NAME = "SHA256SUMS"


class _SummingFile(io.BufferedWriter):
    """A new file that knows the SHA-256 of what was written to it, whatever the disk made of it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.sum = hashlib.sha256()

    def write(self, content: Any) -> int:
        """Write behind what is there, which is all that DCP does."""
        self.sum.update(content)
        return super().write(content)


class SummingFiles(FileSystem):
    """DCP's file system. It keeps the sums of the files that were written through it.

    Attributes:
        sums: name to SHA-256 in hexadecimal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """Open a file, to be summed if it is written."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _SummingFile(path) as written:
            yield written
        self.sums[Path(path).name] = written.sum.hexdigest()


def sum_of(path: Path) -> str:
    """SHA-256 of a file.

    Raises:
        OSError: if it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def append(checkpoint: Path, sums: Mapping[str, str]) -> None:
    """Add the sums of some files of a checkpoint, by their paths in it, and have them on the disk."""
    with (checkpoint / NAME).open("a") as file:
        file.writelines(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
        file.flush()
        os.fsync(file.fileno())


def listed(checkpoint: Path) -> dict[str, str]:
    """Path in the checkpoint to SHA-256 of each of its files.

    Raises:
        ValueError: a list with a line that is none.
        OSError: there is none, or it cannot be read.
    """
    found = {}
    for number, line in enumerate((checkpoint / NAME).read_text().splitlines(), start=1):
        digest, separator, name = line.partition("  ")
        inside = name and not Path(name).is_absolute() and ".." not in Path(name).parts
        if not separator or not inside or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise ValueError(f"line {number} is no sum of a file")
        found[name] = digest
    return found


def damage(checkpoint: Path, sums: Mapping[str, str]) -> list[str]:
    """What is wrong with some files of a checkpoint, a line for each that is missing or is not what was written.

    Raises:
        OSError: a file that cannot be read, which says nothing of its bytes: the mount may be broken, or a right missing.
    """
    found = []
    for name, expected in sums.items():
        try:
            if sum_of(checkpoint / name) != expected:
                found.append(f"{name} is not what was written (its SHA-256 differs)")
        except FileNotFoundError:
            found.append(f"{name} is missing")
    return found


def sizes(checkpoint: Path, names: Iterable[str]) -> dict[str, int]:
    """Bytes of some files of a checkpoint, 0 for those that are missing.

    Raises:
        OSError: where the system cannot tell.
    """
    found = {}
    for name in names:
        try:
            found[name] = (checkpoint / name).stat().st_size
        except FileNotFoundError:
            found[name] = 0
    return found


def share(sizes: Mapping[str, int], rank: int, ranks: int) -> list[str]:
    """The files that one of several ranks verifies, so that all have about as many bytes to read.

    Args:
        sizes: the same on all ranks, or a file might be nobody's.
        rank: whose share.
        ranks: how many share.
    """
    loads, mine = [0] * ranks, []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        lightest = loads.index(min(loads))
        loads[lightest] += sizes[name] + 1
        if lightest == rank:
            mine.append(name)
    return mine

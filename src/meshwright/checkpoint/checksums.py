"""SHA-256 checksums of all files of a checkpoint: computed while a file is written, compared before anything is loaded.

They are in a file of the checkpoint, in the format of ``sha256sum --check SHA256SUMS``.
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
    """A new file that computes the SHA-256 of what is written to it, independent of what the disk stores."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.sum = hashlib.sha256()

    def write(self, content: Any) -> int:
        """Append to the file, which is the only way in which DCP writes."""
        self.sum.update(content)
        return super().write(content)


class SummingFiles(FileSystem):
    """DCP's file system, which also keeps the checksums of the files that were written through it.

    Attributes:
        sums: file name to SHA-256 in hexadecimal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """Open a file. If it is opened for writing, its checksum is computed."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _SummingFile(path) as written:
            yield written
        self.sums[Path(path).name] = written.sum.hexdigest()


def sum_of(path: Path) -> str:
    """Return the SHA-256 of a file.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def append(checkpoint: Path, sums: Mapping[str, str]) -> None:
    """Append the checksums of some files of a checkpoint to its list, and wait until they are on disk.

    Args:
        checkpoint: the checkpoint.
        sums: path in the checkpoint to SHA-256.
    """
    with (checkpoint / NAME).open("a") as file:
        file.writelines(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
        file.flush()
        os.fsync(file.fileno())


def listed(checkpoint: Path) -> dict[str, str]:
    """Return path in the checkpoint to SHA-256, of all files in its list.

    Raises:
        ValueError: a line of the list is no checksum of a file.
        OSError: there is no list, or it cannot be read.
    """
    sums = {}
    for number, line in enumerate((checkpoint / NAME).read_text().splitlines(), start=1):
        digest, separator, name = line.partition("  ")
        inside = name and not Path(name).is_absolute() and ".." not in Path(name).parts
        if not separator or not inside or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise ValueError(f"line {number} is not a file's checksum and name")
        sums[name] = digest
    return sums


def damage(checkpoint: Path, sums: Mapping[str, str]) -> list[str]:
    """Return what is wrong with some files of a checkpoint: one line for each file that is missing or not what was written.

    Raises:
        OSError: a file cannot be read. This does not say whether its bytes are right: the mount may be broken, or a permission
            missing.
    """
    damages = []
    for name, expected in sums.items():
        try:
            if sum_of(checkpoint / name) != expected:
                damages.append(f"{name} is not what was written (its SHA-256 differs)")
        except FileNotFoundError:
            damages.append(f"{name} is missing")
    return damages


def sizes(checkpoint: Path, names: Iterable[str]) -> dict[str, int]:
    """Return the sizes of some files of a checkpoint in bytes, 0 for missing files.

    Raises:
        OSError: the system cannot get the size of a file.
    """
    bytes_of = {}
    for name in names:
        try:
            bytes_of[name] = (checkpoint / name).stat().st_size
        except FileNotFoundError:
            bytes_of[name] = 0
    return bytes_of


def share(sizes: Mapping[str, int], rank: int, ranks: int) -> list[str]:
    """Return the files that one of several ranks verifies, so that all ranks read about the same number of bytes.

    Args:
        sizes: file name to bytes; the same on all ranks, otherwise a file might be in no rank's share.
        rank: the rank.
        ranks: number of ranks.
    """
    loads, own = [0] * ranks, []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        lightest = loads.index(min(loads))
        loads[lightest] += sizes[name] + 1
        if lightest == rank:
            own.append(name)
    return own

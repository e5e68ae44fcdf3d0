"""SHA-256 of the files of a token store, block by block: computed from what is written, compared before a run reads them.

Blocks can be read by several threads, a sample of them says something about a large file, and a message can say where it is
damaged.
"""

import hashlib
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypedDict

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from meshwright.errors import DataError, number_of

__all__ = ["BLOCK", "FileSums", "SummedFile", "damage", "sizes_differ", "sums_of"]

BLOCK = 16 * 2**20
"""Bytes of a block; the last one of a file may have fewer."""
SAMPLED = 16
"""Blocks of a file that are read if only a sample is asked for: the first, the last, and some at equal distances."""
LARGE = 2**30
"""Bytes to read from which on a progress bar is drawn."""
THREADS = 8


class FileSums(TypedDict):
    """What a file must be."""

    bytes: int
    sha256: list[str]
    """Of each block, in hexadecimal."""


class SummedFile:
    """A new file that computes the digests of its blocks from what is written to it, not from what the disk stores."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._blocks: list[str] = []
        self._block, self._room, self._bytes = hashlib.sha256(), BLOCK, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def write(self, content: Any) -> int:
        """Append to the file."""
        view = memoryview(content).cast("B")
        self._file.write(view)
        self._bytes += (count := len(view))
        while len(view) >= self._room:
            self._block.update(view[: self._room])
            view = view[self._room :]
            self._blocks.append(self._block.hexdigest())
            self._block, self._room = hashlib.sha256(), BLOCK
        self._block.update(view)
        self._room -= len(view)
        return count

    @property
    def sums(self) -> FileSums:
        """Digests of what was written so far."""
        rest = [self._block.hexdigest()] if self._room < BLOCK else []
        return {"bytes": self._bytes, "sha256": self._blocks + rest}


def sums_of(path: Path) -> FileSums:
    """Return the digests of a file as it is on disk."""
    size = path.stat().st_size
    return {"bytes": size, "sha256": [_read((path, number)) for number in range(-(-size // BLOCK))]}


def sizes_differ(directory: Path, files: Mapping[str, FileSums]) -> list[str]:
    """Return a line for each file that is missing or has another size.

    Raises:
        DataError: the system cannot get the size of a file.
    """
    lines = []
    for name, sums in files.items():
        path = directory / name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            lines.append(f"{path} is missing")
        except OSError as error:
            raise _unreadable(path, error) from error
        else:
            if size != sums["bytes"]:
                lines.append(f"{path} has {size:,} bytes instead of {sums['bytes']:,}")
    return lines


def damage(directory: Path, files: Mapping[str, FileSums], *, fast: bool = False) -> tuple[list[str], str]:
    """Compare files with their digests.

    Args:
        directory: where they are; their sizes are right.
        files: name to what the file must be.
        fast: read only a sample of the blocks of a large file.

    Returns:
        A line for each file that is not what was written; and, for a sample, how much was read.

    Raises:
        DataError: a file cannot be read. This does not say whether its bytes are right.
    """
    blocks = [(directory / name, number) for name, sums in files.items() for number in _chosen(len(sums["sha256"]), fast)]
    wrong: dict[Path, int] = {}
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool, _bar(len(blocks) * BLOCK) as bar:
        task = bar.add_task("checking tokens", total=len(blocks) * BLOCK)
        for (path, number), digest in zip(blocks, pool.map(_read, blocks), strict=True):
            if digest != files[path.name]["sha256"][number]:
                wrong.setdefault(path, number)
            bar.advance(task, BLOCK)
    lines = [
        f"{path} is not what was written: the SHA-256 of its bytes from {number * BLOCK:,} on differs"
        for path, number in wrong.items()
    ]
    total = sum(len(sums["sha256"]) for sums in files.values())
    return lines, f"--fast: {len(blocks):,} of {number_of(total, 'block')} of the tokens in {directory} checked" if fast else ""


def _chosen(count: int, fast: bool) -> list[int]:
    """Return the numbers of the blocks to read, among `count`."""
    if not fast or count <= SAMPLED:
        return list(range(count))
    return [place * (count - 1) // (SAMPLED - 1) for place in range(SAMPLED)]


def _read(block: tuple[Path, int]) -> str:
    path, number = block
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(number * BLOCK)
            digest, left = hashlib.sha256(), BLOCK
            while left and (content := file.read(left)):  # a raw read may return less than it is asked for
                digest.update(content)
                left -= len(content)
        return digest.hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        "data.store.unreadable", f"{path}: cannot be read: {error.strerror or error}; whether it is damaged is not known"
    )


def _bar(size: int) -> Progress:
    """Return a bar that rank 0 draws in a terminal, and that leaves nothing there; it is shown only for many bytes."""
    shown = size >= LARGE and os.environ.get("RANK", "0") == "0" and sys.stderr.isatty()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown)

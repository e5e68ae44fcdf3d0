"""Files that a run leaves: their permissions, those of the umask, and how one directory takes the place of another."""

import ctypes
import os
import shutil
import stat
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["honour_umask", "put_in_place", "save_tensors", "write_shared", "write_whole"]


def honour_umask(path: Path) -> None:
    """Give a file, or a directory with all that is in it, the permissions of a new one.

    safetensors and ``tempfile`` create files and directories that only their owner can read. Links are left as they are.

    Args:
        path: a file or a directory that this process wrote.
    """
    mask = os.umask(0o077)  # there is no way to only read it; another thread's file is private for this moment, never too open
    os.umask(mask)
    inside = path.rglob("*") if path.is_dir() else ()
    for item in (path, *inside):
        if not item.is_symlink():
            special = stat.S_IMODE(item.stat().st_mode) & ~0o777  # such as the bit that keeps the group of a directory
            item.chmod(special | (0o777 if item.is_dir() else 0o666) & ~mask)


def write_whole(file: Path, content: str | bytes) -> None:
    """Write a small file under another name and rename it, so that a crash leaves the old content or the new one."""
    beside = file.with_name(f".{file.name}.tmp")
    beside.write_bytes(content.encode() if isinstance(content, str) else content)
    beside.replace(file)


def write_shared(file: Path, content: str) -> None:
    """Write a small file that several processes may write at once, and make its directory: one content remains, complete."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f"{uuid.uuid4().hex}.tmp")
    try:
        beside.write_text(content)
        beside.replace(file)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def save_tensors(tensors: "Mapping[str, torch.Tensor]", file: Path) -> None:
    """Write tensors as one file of safetensors, which whoever may read the files beside it can read too."""
    from safetensors.torch import save_file

    save_file(dict(tensors), file, metadata={"format": "pt"})
    honour_umask(file)


_HERE, _EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE of renameat2(2)."""


def put_in_place(complete: Path, final: Path, aside: Path) -> None:
    """Rename a complete directory; one that is in its place is removed then.

    Where the system can exchange two paths in one step, one of the two is there at each moment. Elsewhere the old one is put
    ``aside`` first, and put back if the second step fails. After a kill between the two steps it is there.

    Raises:
        OSError: from renaming.
    """
    if final.exists() and _exchanged(complete, final):
        shutil.rmtree(complete, ignore_errors=True)
        return
    if final.exists():
        final.rename(aside)
    try:
        complete.rename(final)
    except OSError:
        if aside.exists():
            aside.rename(final)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two paths in one step; ``False`` where this system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return rename is not None and rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0

"""Files that a run leaves: their permissions, those of the umask, and how one directory takes the place of another."""

import ctypes
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["exchange", "honour_umask", "save_tensors"]


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


def save_tensors(tensors: "Mapping[str, torch.Tensor]", file: Path) -> None:
    """Write tensors as one file of safetensors, which whoever may read the files beside it can read too."""
    from safetensors.torch import save_file

    save_file(dict(tensors), file, metadata={"format": "pt"})
    honour_umask(file)


_HERE, _EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE of renameat2(2)."""


def exchange(one: Path, other: Path) -> bool:
    """Exchange two paths in one step, so that at each moment both exist.

    Returns:
        ``False`` where this system or the file system cannot; then nothing was changed.
    """
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return rename is not None and rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0

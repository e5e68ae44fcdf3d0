"""Files that a run leaves: their permissions are those of the umask, whatever library wrote them."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["honour_umask", "save_tensors", "write_whole"]


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


def save_tensors(tensors: "Mapping[str, torch.Tensor]", file: Path) -> None:
    """Write tensors as one file of safetensors, which whoever may read the files beside it can read too."""
    from safetensors.torch import save_file

    save_file(dict(tensors), file, metadata={"format": "pt"})
    honour_umask(file)

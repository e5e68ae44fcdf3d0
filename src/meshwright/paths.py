"""Paths that a user writes: which can be one at all, and which can only be a directory of this machine."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

__all__ = ["PathText", "no_directory"]

LONGEST_NAME, LONGEST_PATH = 255, 4096
"""Bytes of a file's name, and of a path: the limits of Linux."""

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def _possible(value: str) -> str:
    """Refuse what no call of the system takes as a path, so that no later call meets it."""
    problem = None
    if not value.strip():
        problem = "is empty"
    elif "\0" in value:
        problem = "contains a NUL character, which is illegal in a path"
    elif len(value.encode(errors="replace")) > LONGEST_PATH or any(
        len(name.encode(errors="replace")) > LONGEST_NAME for name in value.split("/")
    ):
        problem = f"is too long for a path; legal are {LONGEST_PATH} bytes, {LONGEST_NAME} of them in a name"
    else:
        try:
            value.encode()
            Path(value).expanduser()
        except (RuntimeError, UnicodeError):
            problem = "is no legal path: the user after ~ is unknown, or it is not valid Unicode"
    if problem is not None:
        raise PydanticCustomError("path", "{problem}", {"problem": problem})
    return value


PathText = Annotated[str, AfterValidator(_possible)]
"""Text that can be a path (or a glob, or a name of the hub): not empty, no longer than a path may be."""


def no_directory(knob: str, value: str) -> str | None:
    """The message for a value that can only be a directory and is none.

    Args:
        knob: the key that holds it.
        value: a directory, or a name of the hub: ``name`` or ``owner/name``.

    Returns:
        ``None`` where it is a directory, or may be a name of the hub.
    """
    path = Path(value).expanduser()
    if path.is_dir() or (_HUB_NAME.fullmatch(value) and ".." not in value and not path.exists()):
        return None
    problem = "is a file, not a directory" if path.exists() else "no such directory"
    return f"{knob}={value!r}: {problem} (working directory {Path.cwd()})"

"""Where in a model's own code something happens, for messages."""

import sys
from pathlib import Path
from traceback import walk_stack, walk_tb

__all__ = ["place_now", "place_of_error"]

_NOT_ITS_OWN = {"torch", "meshwright"}


def place_of_error(error: BaseException) -> str:
    """Return file and line of the model's code where an error was raised, as `` at FILE:LINE``; empty: it has none."""
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    own = [f" at {Path(file).name}:{line}" for file, line in frames if _is_own(file)]
    return own[-1] if own else ""


def place_now() -> str:
    """Return file and line of the model's code that runs now, in the same form; for use inside of a trace."""
    frames = ((frame.f_code.co_filename, line) for frame, line in walk_stack(sys._getframe(1)))
    return next((f" at {Path(file).name}:{line}" for file, line in frames if _is_own(file)), "")


def _is_own(file: str) -> bool:
    return file.endswith(".py") and not _NOT_ITS_OWN & {*Path(file).parts}

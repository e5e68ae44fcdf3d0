"""The typed error tree.

Every error that a user can cause is a :class:`MeshwrightError`. It holds a list of problems, so that one run reports all
of them. The command line prints the problems without a traceback and exits with :attr:`MeshwrightError.exit_code`.
"""

from collections.abc import Iterable

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "LayoutError",
    "MeshwrightError",
    "ModelError",
    "NonFiniteError",
    "NotProvenError",
    "PlanError",
    "StoppedError",
    "UnsupportedError",
    "WorkerError",
]


class MeshwrightError(Exception):
    """A problem that the user can mend, or several.

    Args:
        problems: one message, or several that were found together. Each names the knob, its value and what is legal.
    """

    exit_code = 2

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type["MeshwrightError"], tuple[tuple[str, ...]]]:
        """Survive pickling, which is how an error of a worker reaches its launcher."""
        return (type(self), (self.problems,))


class LayoutError(MeshwrightError, ValueError):
    """Sizes of mesh axes that do not fit the world size, the model or each other."""


class PlanError(MeshwrightError, ValueError):
    """A spec and a model that do not resolve to a plan: a pattern without a match, a parameter claimed twice."""


class UnsupportedError(MeshwrightError, NotImplementedError):
    """A legal request that this version does not carry out."""


class ConfigError(MeshwrightError, ValueError):
    """A configuration that is wrong in itself: an unknown key, a wrong type, a missing file, a contradiction."""


class ModelError(MeshwrightError, ValueError):
    """A model that cannot be built, or weights that cannot be read into it."""


class DataError(MeshwrightError, ValueError):
    """Training data that cannot be used as asked."""


class CheckpointError(MeshwrightError, RuntimeError):
    """A checkpoint that is incomplete, of another model, or cannot be written."""


class NonFiniteError(MeshwrightError, ArithmeticError):
    """A loss or gradient norm that is NaN or infinite."""

    exit_code = 3


class NotProvenError(MeshwrightError, RuntimeError):
    """A layout whose audit, asked for before training, did not pass."""

    exit_code = 1


class StoppedError(MeshwrightError, RuntimeError):
    """A run that a signal ended early, with a complete checkpoint. The same command goes on from it."""

    exit_code = 75
    """EX_TEMPFAIL of sysexits.h: try again."""


class WorkerError(MeshwrightError, RuntimeError):
    """A worker process that failed. The message names its rank and carries its own error."""

    exit_code = 1

"""The typed error tree.

Every error that a user can cause is a :class:`MeshwrightError`. It holds a list of problems, so that one run reports all
of them. The command line prints the problems without a traceback and exits with :attr:`MeshwrightError.exit_code`.
Each problem is a :class:`Refusal`: prose with a code of :mod:`meshwright.error_codes`.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Self, overload

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "InterruptError",
    "LayoutError",
    "MeshwrightError",
    "MissingPlanError",
    "ModelError",
    "NonFiniteError",
    "NotProvenError",
    "PartError",
    "PlanError",
    "Problems",
    "Refusal",
    "StoppedError",
    "UnsupportedError",
    "WorkerError",
    "coded",
    "described",
    "during",
    "number_of",
    "shortened",
]

LONGEST_WORD, LONGEST_LINE = 300, 1500
"""Characters of a message that are shown whole. Longer text is somebody's value, or a list that is too long to read."""


OTHER = "other"
"""The code of a problem that has none of its own: one that a user's own code raises."""


class Refusal(str):
    """A problem as prose, with a code for programs. It is a string; what is made of it by string methods has no code.

    Args:
        code: a key of :data:`meshwright.error_codes.CODES`.
        text: names the knob, its value and what is legal.
    """

    code: str

    def __new__(cls, code: str, text: str) -> Self:
        """Make the string, and give it its code."""
        self = super().__new__(cls, text)
        self.code = code
        return self

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        """Keep the code in pickles and copies."""
        return (self.code, str(self))

    def within(self, before: str, after: str = "") -> "Refusal":
        """Return the same problem with more prose around it."""
        return Refusal(self.code, f"{before}{self}{after}")


class Problems(list[Refusal]):
    """Problems that are found one after another, and raised together."""

    def add(self, code: str, text: str) -> None:
        """Add one."""
        self.append(Refusal(code, text))


def coded(problem: str, code: str = OTHER) -> Refusal:
    """Return a problem with its code; a plain string gets the given one."""
    return problem if isinstance(problem, Refusal) else Refusal(code, problem)


def shortened(text: str) -> str:
    """A message in which what is too long to read is cut in its middle; the first and the last words stay."""
    words = re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda word: _cut(word.group(), LONGEST_WORD // 3), text)
    return "\n".join(_cut(line, LONGEST_LINE // 3) if len(line) > LONGEST_LINE else line for line in words.split("\n"))


def _cut(text: str, kept: int) -> str:
    return f"{text[:kept]}...({len(text) - 2 * kept:,} characters)...{text[-kept:]}"


def number_of(number: int, noun: str) -> str:
    """A number of things, in words that read well: ``1 rank``, ``2 ranks``, ``8 heads of a layer``, ``1,024 processes``."""
    thing, of, rest = noun.partition(" of ")
    plural = f"{thing}es" if thing.endswith(("s", "ch", "x")) else f"{thing}s"
    return f"{number:,} {thing if number == 1 else plural}{of}{rest}"


def described(error: BaseException, near: object = None) -> str:
    """What an exception of somebody else says, with its kind, its file and its cause, in one message that is never empty.

    Args:
        error: the exception.
        near: where files were read or written then, for an error of the system that does not name its file.
    """
    kind, text = type(error).__name__, " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        places = [repr(str(name)) for name in (error.filename, error.filename2) if name is not None]
        places = places or ([f"a file of {str(near)!r}"] if near is not None else [])
        text = ": ".join([error.strerror, *places])
    if text:
        return f"{kind}: {text}"
    cause = error.__cause__ or error.__context__
    return f"{kind} without a message" + (f"; after {described(cause)}" if cause is not None else "")


@contextmanager
def during(what: str) -> Iterator[None]:
    """Inside, an interruption by Ctrl-C gets a note of what it interrupted; the first note is the innermost.

    Args:
        what: words that can follow "interrupted while", such as "the data are read".
    """
    try:
        yield
    except KeyboardInterrupt as error:
        error.add_note(what)
        raise


class MeshwrightError(Exception):
    """A problem that the user can mend, or several.

    Args:
        problems: one problem, or several that were found together; or, with ``text``, the code of one. A problem that is a
            plain string, from a user's own code, gets the code ``other``.
        text: the message of one problem. It names the knob, its value and what is legal.
    """

    exit_code = 2

    @overload
    def __init__(self, problems: Refusal | Iterable[Refusal]) -> None: ...

    @overload
    def __init__(self, problems: str, text: str) -> None: ...

    def __init__(self, problems: str | Iterable[str], text: str | None = None) -> None:
        if text is not None:
            problems = Refusal(str(problems), text)
        found = map(coded, (problems,) if isinstance(problems, str) else problems)
        self.problems: tuple[Refusal, ...] = tuple(Refusal(problem.code, shortened(problem)) for problem in found)
        super().__init__("\n".join(self.problems))

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the problems, one for each."""
        return tuple(problem.code for problem in self.problems)

    def __reduce__(self) -> tuple[type["MeshwrightError"], tuple[tuple[Refusal, ...]]]:
        """Survive pickling, which is how an error of a worker reaches its launcher."""
        return (type(self), (self.problems,))


class LayoutError(MeshwrightError, ValueError):
    """Sizes of mesh axes that do not fit the world size, the model or each other."""


class PlanError(MeshwrightError, ValueError):
    """A spec and a model that do not resolve to a plan: a pattern without a match, a parameter claimed twice."""


class MissingPlanError(PlanError, AssertionError):
    """A model without tensor parallel styles, which is to be tensor parallel. An AssertionError in NeMo AutoModel."""


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


class PartError(MeshwrightError, RuntimeError):
    """A part of the user, such as an objective or a callback, that raised something or is not what it should be."""

    exit_code = 1


class StoppedError(MeshwrightError, RuntimeError):
    """A run that a signal ended early, with a complete checkpoint. The same command goes on from it."""

    exit_code = 75
    """EX_TEMPFAIL of sysexits.h: try again."""


class InterruptError(MeshwrightError, RuntimeError):
    """A command that Ctrl-C ended before it was done."""

    exit_code = 130


class WorkerError(MeshwrightError, RuntimeError):
    """A worker process that failed. The message names its rank and carries its own error."""

    exit_code = 1

"""Finds out whether a run's layout is proven: by the support matrix, which comes with the package, or by the user's own audit.

Records of audits are files in the user's cache directory, one for each claim and arithmetic; the last audit counts. No run
depends on a record: if one cannot be read or written, a line says so, and the run goes on.
"""

import json
import os
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from meshwright.files import write_shared
from meshwright.layout import AXES
from meshwright.train.config import RunConfig
from meshwright.train.proofs.claim import Claim, claim_of
from meshwright.train.proofs.shipped_cells import covering_cell, shipped_matrix
from meshwright.train.start.setup import RunSetup

__all__ = [
    "Record",
    "Source",
    "Standing",
    "State",
    "audit_arguments",
    "read_records",
    "record",
    "standing_of",
]


MOST_PROCESSES = 8
"""An audit uses as many processes as the run if the run has at most this many; otherwise the audit chooses the number."""

USUAL_TIME = "10 s to a minute"
"""What an audit of a small model takes on two cores, see docs/measurements.md."""

ARITHMETICS = ("float64", "float32", "bfloat16")


class State(StrEnum):
    """What is known about a layout."""

    ALONE = "one process"
    PROVEN = "proven"
    UNPROVEN = "unproven"
    FAILED = "FAIL"


@dataclass(frozen=True)
class Standing:
    """What is known about a layout, and the words that say it."""

    state: State
    words: str

    @property
    def line(self) -> str:
        """The line that is printed."""
        return f"{self.state}: {self.words}"


@dataclass(frozen=True)
class Source:
    """Where a configuration came from (a file and overrides), for the command that audits it."""

    path: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    """The outcome of an audit.

    Attributes:
        passed: whether the layout computes what one process does.
        verdict: last line of the audit's report.
        date: the day, as ``YYYY-MM-DD``.
        dtype: dtype of the arithmetic.
        layout: the layout that was audited, in words, with ``world_size`` processes.
        world_size: number of processes.
        steps: number of optimizer steps that were compared.
        worst: largest error of a gradient, relative to the gradient's largest entry; ``None``: no error was a number.
        seconds: how long the audit took.
        code: digest of the code that was audited, see :attr:`Claim.code`.
    """

    passed: bool
    verdict: str
    date: str
    dtype: str
    layout: str
    world_size: int
    steps: int
    worst: float | None
    seconds: float
    code: str

    @property
    def extent(self) -> str:
        """What was audited, in words: dtype, steps and layout."""
        return f"{self.dtype}, {self.steps} step{'s' if self.steps > 1 else ''}, {self.layout}"


# -- the records of a user ----------------------------------------------------------------------------------------------------


def cache_directory(of: str) -> Path:
    """Return a directory in the user's cache directory.

    By the XDG Base Directory Specification (freedesktop.org), ``XDG_CACHE_HOME`` counts only if it is an absolute path.

    Raises:
        RuntimeError: the user has no home directory.
    """
    directory = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(directory) if directory.startswith("/") else Path.home() / ".cache") / "meshwright" / of


def record(claim: Claim, entry: Record, say: Callable[[str], None]) -> None:
    """Write the outcome of an audit. It replaces an earlier record of the same claim and arithmetic.

    Args:
        claim: the claim that was audited.
        entry: the outcome.
        say: called with a line if the record cannot be written.
    """
    content = json.dumps({**asdict(entry), "claim": asdict(claim)}, indent=1)
    try:
        write_shared(cache_directory("audits") / f"{claim.key}-{entry.dtype}.json", content)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        say(f"the verdict of the audit could not be recorded: {getattr(error, 'filename', None) or 'cache'}: {error}")


_KINDS: dict[str, Any] = {
    "passed": bool, "verdict": str, "date": str, "dtype": str, "layout": str, "steps": int, "worst": float | int | None,
    "seconds": float | int, "code": str,
}  # fmt: skip
"""Types of the values of a record that are used."""


def read_records(claim: Claim, say: Callable[[str], None]) -> list[Record]:
    """Return the records of audits of a claim, at most one for each arithmetic.

    Args:
        claim: the claim.
        say: called with a line for each record that cannot be read or is damaged.
    """
    records = []
    names = {item.name for item in fields(Record)}
    for dtype in ARITHMETICS:
        try:
            path = cache_directory("audits") / f"{claim.key}-{dtype}.json"
            content = json.loads(path.read_text())
            entry = Record(**{name: content[name] for name in names})
            if wrong := [name for name, kind in _KINDS.items() if not isinstance(getattr(entry, name), kind)]:
                raise ValueError(f"{wrong[0]} is of another type")
            records.append(entry)
        except FileNotFoundError:
            continue
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            say(f"a recorded audit is ignored: {path}: {type(error).__name__}: {error}")
    return records


# -- the matrix ---------------------------------------------------------------------------------------------------------------


# -- the standing -------------------------------------------------------------------------------------------------------------


def standing_of(setup: RunSetup, source: Source | None, say: Callable[[str], None]) -> Standing:
    """Return what is known about the layout of a run.

    Args:
        setup: the resolved run.
        source: where its configuration came from, for the command that would audit it.
        say: called with a line for each record, or matrix, that cannot be read and is ignored.
    """
    if setup.layout.world_size == 1:
        return Standing(State.ALONE, "nothing to prove")
    claim = claim_of(setup)
    where = f"{claim.family} on {' x '.join(claim.axes)}"
    command = _command(setup, source)
    records = read_records(claim, say)
    own = [entry for entry in records if entry.code == claim.code]
    if failed := next((entry for entry in own if not entry.passed), None):
        verdict = failed.verdict.removeprefix("FAIL: ")
        words = f"your audit of {failed.date} ({failed.extent}) found {where} wrong: {verdict}; audit it again: {command}"
        return Standing(State.FAILED, words)
    if not own:
        records += read_records(claim.with_several_microbatches, say)
        own = [entry for entry in records if entry.code == claim.code and entry.passed]
    if own:
        best = own[0]
        worst = "" if best.worst is None else f", the worst gradient off by {best.worst:.1e}"
        return Standing(State.PROVEN, f"{where}, by your audit of {best.date} ({best.extent}{worst})")
    try:
        cell = covering_cell(claim, shipped_matrix())
    except (OSError, ValueError, KeyError, TypeError) as error:
        say(f"the support matrix is ignored: {type(error).__name__}: {error}")
        cell = None
    current = cell is not None and cell.get("digest") == claim.code
    if not current and records:
        old = f"your audit of {records[0].date} ({records[0].extent}) is of an earlier version of Meshwright's code"
        return Standing(State.UNPROVEN, f"{old}; an audit took {records[0].seconds:.0f} s; prove it: {command}")
    if cell is None:
        return Standing(State.UNPROVEN, f"no audit on record of {where} with these options and versions; prove it: {command}")
    page = cell.get("page", f"support matrix of {shipped_matrix().get('date')}")
    if not current:
        old = f"the {page} ({cell['family']}, {cell['layout']}) is of an earlier version of Meshwright's code"
        return Standing(State.UNPROVEN, f"{old}; an audit takes {USUAL_TIME}; prove it: {command}")
    if cell["failed"]:
        return Standing(State.FAILED, f"the {page} found {where} wrong: {cell['failed']}; audit it: {command}")
    return Standing(State.PROVEN, f"{where}, by the {page} ({cell['family']}, {cell['layout']})")


def audit_arguments(setup: RunSetup) -> tuple[RunConfig, int | None]:
    """Return the configuration and the number of processes with which an audit has the same axes above 1 as a run.

    The number is ``None`` where the audit chooses it. Then an axis that the run infers to be 1 is set to 1, so that it is not
    inferred again from another number of processes.
    """
    config, world_size = setup.config, setup.layout.world_size
    if world_size <= MOST_PROCESSES:
        nproc, layout = world_size, config.layout
    else:
        sizes = setup.layout.sizes()
        inferred = {axis: 1 for axis in AXES if getattr(config.layout, axis) in (None, -1) and sizes[axis] == 1}
        nproc, layout = None, config.layout.model_copy(update=inferred)
    device = "cpu" if config.launch.device == "cpu" else "auto"  # there may be fewer GPUs here than an audit has processes
    launch = config.launch.model_copy(update={"nproc": None, "device": device})
    return config.model_copy(update={"layout": layout, "launch": launch}), nproc


def _command(setup: RunSetup, source: Source | None) -> str:
    before = setup.config
    config, nproc = audit_arguments(setup)
    parts = ["meshwright", "audit", source.path if source else "CONFIG", *(source.overrides if source else ())]
    if nproc is None:
        parts += [f"layout.{axis}=1" for axis in AXES if getattr(before.layout, axis) != getattr(config.layout, axis)]
        parts += ["launch.nproc=null"] if before.launch.nproc is not None else []
    parts += ["--nproc", str(nproc)] if nproc else []
    parts += ["--dtype", "float32"] if setup.plan.options.compile else []  # an audit in float64 compiles nothing
    return shlex.join(parts)

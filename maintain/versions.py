"""Versions: an environment for each supported pair of torch and transformers, and a subset of the tests in it.

From the root of the repository: ``python -m maintain.versions``. An environment takes some 10 minutes; torch for CUDA, which
PyPI has for most releases, takes gigabytes of disk. Environments that are there are used again. Prints a table for
``docs/measurements.md``.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from meshwright.distributed._torch_compat import MINIMUM_TORCH
from meshwright.models._transformers_compat import MINIMUM_TRANSFORMERS

__all__ = ["main"]

ROOT = Path(__file__).parents[1]
NEWEST = ""
"""No bound: what pip finds."""
SUBSET = (
    "tests/test_device.py",
    "tests/distributed",
    "tests/ranks",
    "tests/checkpoint",
    "tests/models",
    "tests/train/test_layouts.py",
)
"""What depends most on torch and transformers: units, slices, pipelines, processes, files, and the trainer on each axis."""
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


class Environment(NamedTuple):
    """What is installed beside Meshwright.

    Attributes:
        python: an interpreter.
        torch: a version, or :data:`NEWEST`.
        transformers: a version, or :data:`NEWEST`.
    """

    python: str
    torch: str
    transformers: str

    @property
    def name(self) -> str:
        """A name for its folder."""
        version = _said(self.python, "import sys; print(*sys.version_info[:2], sep='.')")
        return f"python-{version}-torch-{self.torch or 'newest'}-transformers-{self.transformers or 'newest'}"


def pinned(package: str) -> str:
    """Return the version of a package that ``constraints.txt`` pins."""
    found = re.search(rf"^{package}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None, package
    return found.group(1)


def environments(pythons: Sequence[str]) -> list[Environment]:
    """Return the oldest pair, the pinned one and the newest with the first interpreter, and the pinned one with the others."""
    oldest = Environment(pythons[0], ".".join(map(str, MINIMUM_TORCH)), ".".join(map(str, MINIMUM_TRANSFORMERS)))
    tested = (pinned("torch"), pinned("transformers"))
    newest = Environment(pythons[0], NEWEST, NEWEST)
    return [oldest, *(Environment(python, *tested) for python in pythons), newest]


def make(environment: Environment, folder: Path) -> Path:
    """Make an environment where there is none, and return its interpreter.

    Raises:
        CalledProcessError: pip failed, with its output.
    """
    place = folder / environment.name
    python = place / "bin" / "python"
    if (place / "complete").exists():
        return python
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([environment.python, "-m", "venv", place], check=True)
    tested = (environment.torch, environment.transformers) == (pinned("torch"), pinned("transformers"))
    constraints = ["-c", str(ROOT / "constraints.txt")] if tested else []  # other versions need other packages beside them
    wanted = [f"{name}=={version}.*" if version.count(".") == 1 else f"{name}=={version}" if version else name
              for name, version in (("torch", environment.torch), ("transformers", environment.transformers))]  # fmt: skip
    for packages in (
        wanted[:1],
        [*wanted, "-e", f"{ROOT}[test]"],
    ):  # torch first: it is the one that must not be resolved again
        subprocess.run([python, "-m", "pip", "install", "-q", *constraints, *packages], check=True)
    (place / "complete").touch()
    return python


def run(python: Path, tests: Sequence[str]) -> str:
    """Run some tests in an environment, and return their last line."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([python, "-m", "pytest", "-v", *tests], cwd=ROOT, env=variables, capture_output=True, text=True)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]]
    return "; ".join([lines[-1].strip("= ") if not failed else f"{len(failed)} failed", *failed[:20]])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m maintain.versions", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/meshwright-versions"), help="where environments are kept")
    parser.add_argument("--python", nargs="*", default=None, help="interpreters; default: those of " + ", ".join(PYTHONS))
    parser.add_argument("--only", default="", help="a part of the names of environments, such as torch-2.11")
    parser.add_argument("tests", nargs="*", default=SUBSET, help="default: " + " ".join(SUBSET))
    given = parser.parse_args(arguments)
    pythons = given.python or [
        found for version in PYTHONS if (found := shutil.which(f"python{version}")) and _said(found, "") is not None
    ]
    print("| Python | torch | transformers | tests |\n|---|---|---|---|")
    for environment in environments(pythons or [sys.executable]):
        if given.only in environment.name:
            python = make(environment, given.folder)
            versions = _said(
                str(python),
                "import platform, torch, transformers as t; print(platform.python_version(), torch.__version__, t.__version__)",
            )
            print(f"| {' | '.join((versions or '').split())} | {run(python, given.tests)} |", flush=True)


def _said(python: str, script: str) -> str | None:
    """Return what a script prints; ``None``: the interpreter does not run."""
    done = subprocess.run([python, "-c", script], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    main()

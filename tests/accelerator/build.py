"""Builds the simulated accelerator once, into a folder that makes torch load it where it is on ``PYTHONPATH``.

The folder has the package ``simulated_accelerator`` and the metadata of its entry point ``torch.backends``. There is one for
each version of torch and of Python and each state of the sources, under ``MESHWRIGHT_TESTS_CACHE``, by default
``~/.cache/meshwright-tests``.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

HERE = Path(__file__).parent
PACKAGE = "simulated_accelerator"
COMPILERS = ("g++", "c++", "clang++")


class CannotBuildError(Exception):
    """Says why."""


def build() -> Path:
    """Return the folder for ``PYTHONPATH``; it is made first where there is none. Compiling takes about 40 s of one core.

    Raises:
        CannotBuildError: there is no compiler, or it failed.
    """
    cache = Path(os.environ.get("MESHWRIGHT_TESTS_CACHE") or Path.home() / ".cache" / "meshwright-tests")
    cache.mkdir(parents=True, exist_ok=True)
    native = sorted((HERE / "native").iterdir())
    version = f"torch-{torch.__version__}-{sys.implementation.cache_tag}"
    library = cache / f"{version}-{_digest(native)}{sysconfig.get_config_var('EXT_SUFFIX')}"
    folder = cache / f"{version}-{_digest([*native, HERE / 'module.py', HERE / 'build.py'])}"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be building the same
        if not library.exists():
            _compile(HERE / "native" / "collectives.cpp", library)
        if not folder.exists():
            _lay_out(library, folder)
    return folder


def _digest(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _compile(source: Path, library: Path) -> None:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), *COMPILERS))), None)
    if compiler is None:
        raise CannotBuildError(f"the simulated accelerator needs a C++ compiler: none of {', '.join(COMPILERS)} is here")
    home = Path(torch.__file__).parent
    include = (home / "include", home / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
    made = library.with_suffix(".part")
    command = [
        compiler, "-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-shared", "-w", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", *(f"-I{folder}" for folder in include),
        str(source), "-o", str(made), f"-L{home / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10",
        f"-Wl,-rpath,{home / 'lib'}",
    ]  # fmt: skip
    outcome = subprocess.run(command, capture_output=True, text=True)
    if outcome.returncode:
        raise CannotBuildError(f"the simulated accelerator does not compile:\n{outcome.stderr[:4000]}")
    made.rename(library)


def _lay_out(library: Path, folder: Path) -> None:
    parts = Path(tempfile.mkdtemp(dir=folder.parent))
    package, metadata = parts / PACKAGE, parts / f"{PACKAGE}-0.dist-info"
    package.mkdir()
    metadata.mkdir()
    os.link(library, package / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}")
    shutil.copy(HERE / "module.py", package / "__init__.py")
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\n{PACKAGE} = {PACKAGE}:register\n")
    parts.chmod(0o755)
    parts.rename(folder)


@contextmanager
def on_path(folder: Path, **variables: str) -> Iterator[None]:
    """Give processes that start inside the accelerator, and variables that its ``Settings`` read."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    # multiprocessing's spawned processes take over sys.path of this one, in place of what PYTHONPATH gave them.
    with patch.dict(os.environ, {"PYTHONPATH": path, **variables}), patch.object(sys, "path", [str(folder), *sys.path]):
        yield


if __name__ == "__main__":
    print(build())

"""Shared setup: one thread a process, no network, and the GPU tests skipped where there is none."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking for a GPU starts no driver, which no fork survives

import gc
import itertools
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

torch.set_num_threads(1)
# With torch for CUDA on a machine without a GPU, whoever enters this mode (DTensor and torch.compile do) gets a device with
# which backward has threads of its own, after which no ranks can be forked from this process.
FakeTensorMode.avoid_device_init = property(lambda mode: False)  # type: ignore[assignment]


def pytest_configure(config: pytest.Config) -> None:
    """Audits of tests go on no record of the user's. Workers share their traces, and nothing else."""
    own = Path(tempfile.mkdtemp(prefix="meshwright-tests-"))
    shared = Path(os.environ.setdefault("MESHWRIGHT_TESTS_TRACES", str(own / "traces")))
    shared.mkdir(exist_ok=True)
    (own / "meshwright").mkdir()
    (own / "meshwright" / "traces").symlink_to(shared)
    os.environ["XDG_CACHE_HOME"] = str(own)
    config.add_cleanup(lambda: shutil.rmtree(own, ignore_errors=True))


@pytest.hookimpl(optionalhook=True)  # one process without xdist
def pytest_xdist_auto_num_workers() -> int:
    """With ``-n auto``, three workers on two cores: many tests wait for processes that they start."""
    return 3 * (os.cpu_count() or 2) // 2


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_all_but_a_sample(items)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
    # Fastest first: whole commands last, and before them what waits for a build.
    items.sort(key=lambda item: 2 if item.get_closest_marker("command") else _is_of_accelerator(item))


def _is_of_accelerator(item: pytest.Item) -> bool:
    return item.path.parent.name == "accelerator"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the simulated accelerator beside other tests, because each of its own waits for it. What is loaded by now stays, so
    the garbage collector need not look at it again.
    """
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0" and any(map(_is_of_accelerator, session.items)):
        command = [sys.executable, "-m", "tests.accelerator.build"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}  # a test that needs it says why it is not there
        building = subprocess.Popen(command, cwd=session.config.rootpath, **quiet)
        session.config.add_cleanup(building.wait)
    gc.collect()
    gc.freeze()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None]:
    """A test is skipped whose run an older torch is refused for, which :mod:`maintain.versions` meets."""
    outcome = yield
    report = outcome.get_result()
    if report.failed and torch.__version__ < "2.13" and "take torch 2.13" in report.longreprtext:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: refused with torch {torch.__version__}")


def _mark_all_but_a_sample(items: list[pytest.Item]) -> None:
    """Mark as thorough all cases of a test with ``sampled(number)``, except for one of each of so many equal parts of them.

    Which one is drawn by its name, so that it need not be the first. Cases that are marked as thorough themselves do not count.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("thorough"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_test in cases.values():
        marker = of_test[0].get_closest_marker("sampled")
        assert marker is not None
        (number,) = marker.args
        bounds = [index * len(of_test) // number for index in range(number + 1)]
        for begin, end in itertools.pairwise(bounds):
            part = of_test[begin:end]
            drawn = min(part, key=lambda item: zlib.crc32(item.nodeid.encode()), default=None)
            for item in part:
                if item is not drawn:
                    item.add_marker(pytest.mark.thorough)

"""Shared setup: one thread a process, no network, and the GPU tests skipped where there is none."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import shutil
import tempfile

import pytest
import torch

torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """Audits of tests go on no record of the user's."""
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="meshwright-tests-")
    config.add_cleanup(lambda: shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
    # Fastest first: whole commands last.
    items.sort(key=lambda item: item.get_closest_marker("command") is not None)

"""Files that a run leaves can be read by whom the umask lets."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from meshwright.checkpoint.directory import latest
from meshwright.checkpoint.export import export_checkpoint
from meshwright.files import honour_umask, save_tensors
from meshwright.train.config import RunConfig
from tests.train.conftest import corpus, tiny
from tests.train.runs import train
from tests.train.test_pretrained import saved

__all__ = ["corpus", "tiny"]


@pytest.fixture(params=[0o002, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def others(folder: Path, umask: int) -> list[str]:
    """What does not have the permissions that a plain `open` or `mkdir` would have given it."""
    every = (folder, *folder.rglob("*"))
    return [str(path) for path in every if path.stat().st_mode & 0o777 != (0o777 if path.is_dir() else 0o666) & ~umask]


def test_private_files_and_folders_become_as_new_ones(tmp_path: Path, umask: int) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    handle, _ = tempfile.mkstemp(dir=folder)
    os.close(handle)
    secret = tmp_path / "secret"
    secret.touch(0o600)
    (folder / "link").symlink_to(secret)
    honour_umask(folder)
    (folder / "link").unlink()
    assert others(folder, umask) == []
    assert secret.stat().st_mode & 0o777 == 0o600
    assert os.umask(umask) == umask
    save_tensors({"a": torch.ones(1)}, folder / "a.safetensors")
    assert others(folder, umask) == []


@pytest.mark.parametrize("adapted", [True, False], ids=["adapter", "model"])
def test_all_that_a_run_and_its_exports_leave(tiny: Callable[..., RunConfig], tmp_path: Path, adapted: bool) -> None:
    saved(tmp_path / "model")
    before = os.umask(0o002)
    try:
        tune = (f"model={{path: '{tmp_path / 'model'}'}}", "adapter={rank: 4}") if adapted else ()
        config = tiny(*tune, "training.steps=1")
        train(config)
        checkpoint = latest(config.directory / "checkpoints")
        assert checkpoint is not None
        export_checkpoint(checkpoint, config.directory / "merged", "bfloat16")
        if adapted:
            export_checkpoint(checkpoint, config.directory / "adapter", adapter=True)
    finally:
        os.umask(before)
    assert others(config.directory, 0o002) == []
    assert AutoTokenizer.from_pretrained(config.directory / "merged")

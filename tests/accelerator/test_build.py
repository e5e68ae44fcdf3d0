"""The build, and what the environment says to it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.accelerator.build import HERE, CannotBuildError, build, on_path
from tests.accelerator.workers import Workers


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MESHWRIGHT_TESTS_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CannotBuildError, match="needs a C"):
        build()


def test_what_does_not_compile_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MESHWRIGHT_TESTS_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(CannotBuildError, match="does not compile"):
        build()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_it_is_built_once(accelerator: Path) -> None:
    assert build() == accelerator


def test_no_name_of_the_device_is_built_in(accelerator: Path) -> None:
    for file in (HERE / "native").iterdir():
        assert not re.search(r"\bsim(ccl)?\b", file.read_text()), file
    with Workers(1, accelerator, "other") as workers:
        workers.run(_other)


def _other(device: torch.device) -> None:
    import torch.distributed as dist

    assert device == torch.device("other", 0)
    assert torch.accelerator.current_accelerator() == torch.device("other")
    assert dist.get_default_backend_for_device("other") == "otherccl"
    tensor = torch.ones(3).other()
    assert tensor.is_other
    dist.all_reduce(tensor)
    with pytest.raises(RuntimeError, match="aten::mm got a tensor on cpu beside other:0"):
        tensor.view(1, 3) @ torch.ones(3, 1)
    assert [report.kind for report in torch.other.reports.take()] == ["mixed"]


def test_settings(accelerator: Path, tmp_path: Path) -> None:
    script = """
import torch
assert torch.accelerator.device_count() == 3
(torch.ones(2, 2, device="sim:2") @ torch.ones(2, 2)).sum().item()
"""
    with on_path(
        accelerator, ACCELERATOR_DEVICES="3", ACCELERATOR_LOG=f"{tmp_path}/log-%r", ACCELERATOR_MIXING="report", RANK="5"
    ):
        subprocess.run([sys.executable, "-c", script], check=True, timeout=100)
    lines = [json.loads(line) for line in (tmp_path / "log-5").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["mixed", "wait"]
    assert all("<string>:4" in line["stack"][0] for line in lines)

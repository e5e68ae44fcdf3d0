"""The door to devices, on a machine that has none but the CPU. tests/accelerator has one."""

import os
from pathlib import Path

import pytest
import torch

from meshwright import device
from meshwright.device import Ability
from meshwright.errors import UnsupportedError
from meshwright.train.config import load_config
from meshwright.train.start.processes import adapted
from tests.harness import refuses

EXAMPLE = Path(__file__).parents[1] / "examples" / "quickstart.yaml"
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(torch.accelerator.device_count() > 0, reason="there is an accelerator here")


def test_here_is_the_cpu_alone() -> None:
    assert device.accelerator() is None
    assert device.default_kind() == "cpu"
    assert device.claim("cpu", 3) == CPU
    assert device.backend("cpu") == "gloo"
    assert device.own_backends() == ()
    assert device.kind_of_backend("gloo") == "cpu"
    assert device.kind_of_backend("nccl") is None
    assert device.memory_in_use(CPU) > 2**20
    assert device.peak_memory(CPU) is None
    assert not device.profiled(CPU)
    rows = torch.ones(3)
    assert device.pinned(rows, CPU) is rows


@pytest.mark.parametrize("ask", [lambda: device.claim("tpu", 0), lambda: device.backend("tpu")])
def test_a_kind_that_is_not_here_is_refused_with_those_that_are(ask) -> None:
    with refuses(UnsupportedError, "worker.device") as caught:
        ask()
    assert "legal here: cpu" in str(caught.value)


def test_what_a_device_lacks_is_replaced_and_said() -> None:
    config = load_config(EXAMPLE, ["parallel.compile=true"])
    assert adapted(config, "cpu") == (config, [])
    assert not any(device.able("tpu", ability) for ability in Ability)
    changed, lines = adapted(config, "tpu")
    assert changed.optimizer.fused is False
    assert changed.parallel.compile is False
    assert [line.partition(":")[0] for line in lines] == [
        "tpu has no fused AdamW",
        "torch.compile has no kernels for tpu",
        "torch has no pinned memory for tpu",
    ]
    eager, said = adapted(load_config(EXAMPLE, ["parallel.compile=true", "optimizer.fused=false"]), "tpu")
    assert eager.optimizer.fused is False
    assert len(said) == 2


def test_random_numbers_leave_no_trace_inside_a_fork() -> None:
    before = device.rng_state(CPU)
    with device.fork_rng(CPU):
        torch.rand(3)
    assert torch.equal(before, device.rng_state(CPU))
    drawn = torch.rand(3)
    device.set_rng_state(before, CPU)
    assert torch.equal(drawn, torch.rand(3))


def test_a_seed_is_that_of_torch() -> None:
    with device.fork_rng(CPU):
        torch.manual_seed(7)
        drawn = torch.rand(3)
        device.seed_generators(7, CPU)
        assert torch.equal(drawn, torch.rand(3))


@pytest.mark.parametrize(("answer", "method"), [(None, "fork"), (3, "fork"), (0, "spawn")])
def test_a_driver_that_runs_forbids_forks(monkeypatch: pytest.MonkeyPatch, answer: int | None, method: str) -> None:
    """CUDA's driver is not loaded, is loaded (3: not initialized), or runs."""

    class Driver:
        def __init__(self, name: str, mode: int) -> None:
            assert (name, mode) == ("libcuda.so.1", os.RTLD_NOLOAD)
            if answer is None:
                raise OSError(name)

        def cuDeviceGetCount(self, number: object) -> int:
            return answer or 0

    monkeypatch.setattr(device, "count", lambda: 1)
    monkeypatch.setattr(device, "accelerator", lambda: "cuda")
    monkeypatch.setattr("ctypes.CDLL", Driver)
    assert device.start_method("cpu") == method
    assert device.start_method("cuda") == "spawn"
    monkeypatch.setattr(device, "accelerator", lambda: "npu")
    assert device.start_method("cpu") == "spawn"
    monkeypatch.setattr(device, "count", lambda: 0)
    assert device.start_method("cpu") == "fork"

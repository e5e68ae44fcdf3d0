"""A run tells what it was expected to take beside what it takes."""

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing import get_context

import pytest
import torch
from rich.console import Console

from meshwright.errors import MeshwrightError
from meshwright.plan.cost.hardware import known_hardware, load_hardware, name_of
from meshwright.trace.background import command
from meshwright.train import forecast
from meshwright.train.config import RunConfig
from meshwright.train.forecast import NICENESS, Expectation, compared, operations_of_step, part_of
from meshwright.train.start.prepare import prepare_run
from meshwright.train.start.run_files import Paths
from tests.harness import LIMIT
from tests.train.runs import rows, train

Tiny = Callable[..., RunConfig]


def test_operators_belong_to_parts() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    optimizer = torch.optim.AdamW([x], fused=True)
    query = torch.randn(1, 2, 4, 8, requires_grad=True)
    with torch.autograd.profiler.profile() as found:
        (
            torch.nn.functional.silu(x @ x.T).sum()
            + torch.nn.functional.scaled_dot_product_attention(query, query, query).sum()
        ).backward()
        optimizer.step()
    parts = {event.key: part_of(event.key) for event in found.key_averages()}
    assert parts["aten::mm"] == "products"
    assert parts["aten::silu_backward"] == "elementwise"
    assert parts["aten::_fused_adamw_"] == "update"
    attentions = [part for name, part in parts.items() if "scaled_dot_product" in name]
    assert len(attentions) >= 2
    assert set(attentions) == {"attention"}
    assert {part_of(name) for name in ("nccl:all_gather", "gloo:reduce", "c10d::allreduce_", "Optimizer.step#AdamW.step")} == {
        None
    }
    assert part_of("triton_poi_fused_silu_0") == "elementwise"
    assert part_of("fsdp::chunk_cat") == "elementwise"


def test_what_is_no_computation_is_waiting() -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(compared({"products": 0.1, "tp": 0.02, "bubble": 0.03}, {"products": 0.09, "waiting": 0.2, "update": 0.01}))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["products", "100", "90"] in lines
    assert ["waiting", "50", "200"] in lines
    assert ["all", "150", "300"] in lines
    assert lines[-1] == ["off", "most:", "waiting"]


def test_a_run_prints_both_and_knows_its_speed(
    tiny: Tiny, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on before the forecast is there; here, later steps wait for it, so that few are enough. It needs no GPU."""
    monkeypatch.setattr(forecast, "NICENESS", 0)  # here, other tests leave nothing to a process that lets them go first
    step = Expectation.step
    there = get_context("fork").Event()

    def after_the_forecast(expectation: Expectation) -> AbstractContextManager[None]:
        if expectation._left < 0:  # a step has run after those that warm up
            if expectation._process is not None:
                expectation._process.wait()
                there.set()
            there.wait(LIMIT)  # every rank waits here, because a collective of the others would not wait as long
        return step(expectation)

    monkeypatch.setattr(Expectation, "step", after_the_forecast)
    config = tiny("metrics.gpu=h100", "training.steps=20", "training.log_every=5", "training.eval_every=0")
    train(config, 2)
    printed = capfd.readouterr().out
    assert printed.count("A step, in ms") == 1, printed
    assert "off most: " in printed
    kept = json.loads(Paths(config.directory).forecast.read_text())  # what the page of the run is made of
    assert set(kept["measured"]) >= {"products", "elementwise", "waiting"}
    assert kept["forecast"]["products"] > 0
    steps = [row for row in rows(config) if "loss" in row]
    peak = 1e12 * load_hardware("h100").fp32_tflops
    for row in steps:
        assert row["mfu"] == pytest.approx(1e12 * row["model_tflops"] / peak)
    setup, *_ = prepare_run(config, 2)
    expected = operations_of_step(setup)
    assert expected is not None
    assert steps[-1]["model_tflops"] * 1e12 * 2 * steps[-1]["step_seconds"] == pytest.approx(expected)


def test_an_unknown_device_is_refused_before_any_process(tiny: Tiny) -> None:
    with pytest.raises(MeshwrightError, match=r"metrics\.gpu=h101: unknown; did you mean 'h100' or .*\? legal are a100, "):
        prepare_run(tiny("metrics.gpu=h101"), 2)


def test_devices_are_known_by_the_names_of_torch() -> None:
    assert name_of("NVIDIA H100 80GB HBM3") == "h100"
    assert name_of("NVIDIA H100 PCIe") is None
    assert all(name_of(load_hardware(name).torch_name) == name for name in known_hardware())


def test_the_process_of_the_forecast_lets_the_run_go_first(tiny: Tiny) -> None:
    setup, *_ = prepare_run(tiny("metrics.gpu=h100"), 2)
    setup.paths.config.parent.mkdir(parents=True, exist_ok=True)
    setup.paths.config.touch()
    expectation = Expectation(setup, torch.device("cpu"), command, speaks=True)
    try:
        assert expectation._process is not None
        assert os.getpriority(os.PRIO_PROCESS, expectation._process.pid) == os.getpriority(os.PRIO_PROCESS, 0) + NICENESS
    finally:
        expectation.close()

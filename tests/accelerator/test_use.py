"""What Meshwright asks of a device beside training: meshes, random numbers, checkpoints, exports, audits, calibration."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml

from meshwright import Layout, ParallelOptions, build_mesh, resolve
from meshwright.audit.case import local_part
from meshwright.checkpoint import state, storage
from meshwright.checkpoint.directory import latest
from meshwright.checkpoint.export import export_checkpoint, generate
from meshwright.checkpoint.staging import HostCopies
from meshwright.device import Ability, able, fork_rng, memory_in_use, rng_state, seed_generators
from meshwright.errors import MeshwrightError
from meshwright.models.weights.initial_values import initialize
from meshwright.plan.show.summary import human_bytes
from meshwright.ranks.pool import Pool
from meshwright.train.config import OptimizerConfig, RunConfig
from meshwright.train.host import host_lines
from meshwright.train.optimizer import build_optimizer
from meshwright.train.start.prepare import prepare_run
from meshwright.train.start.processes import adapted, device_kind
from tests.accelerator.build import on_path
from tests.accelerator.runs import train_on_device, train_with
from tests.accelerator.workers import Workers
from tests.tiny import make
from tests.train.runs import GPT2_WITH_DROPOUT, losses, rows

Tiny = Callable[..., RunConfig]


def test_a_mesh_is_of_the_accelerators_by_default(two: Workers) -> None:
    assert two.run(_device_of_mesh) == ["sim", "sim"]


def _device_of_mesh(device: torch.device) -> str:
    return build_mesh(Layout(dp_shard=2)).device_type


@pytest.mark.parametrize(("wish", "expected"), [("auto", "sim"), ("accelerator", "sim"), ("sim", "sim"), ("cpu", "cpu")])
def test_the_device_of_a_run(tiny: Tiny, two: Workers, wish: str, expected: str) -> None:
    assert two.run(_kind, tiny(f"launch.device={wish}")) == [expected, expected]


def test_a_device_that_is_not_here_is_refused_with_those_that_are(tiny: Tiny, two: Workers) -> None:
    said = r"launch\.device=cuda: its accelerators are sim on this machine; legal here: auto, cpu, accelerator, sim"
    with pytest.raises(MeshwrightError, match=said):
        two.run(_kind, tiny("launch.device=cuda"))


def _kind(device: torch.device, config: RunConfig) -> str:
    return device_kind(config, 2)


def test_what_the_device_has(two: Workers, tiny: Tiny) -> None:
    """It has all but kernels of torch.compile, without which a run says so and goes on."""
    for abilities, config, lines in two.run(_abilities, tiny("parallel.compile=true")):
        assert abilities == {Ability.FUSED: True, Ability.FLOAT64: True, Ability.PINNED: True, Ability.COMPILED: False}
        assert not config.parallel.compile
        assert lines == ["torch.compile has no kernels for sim: nothing is compiled (parallel.compile=false)"]


def _abilities(device: torch.device, config: RunConfig) -> Any:
    return {ability: able("sim", ability) for ability in Ability}, *adapted(config, "sim")


def test_the_optimizer_is_fused(two: Workers) -> None:
    assert all(two.run(_fused))


def _fused(device: torch.device) -> bool:
    model, spec = make("plain", meta=True)
    plan = resolve(spec, model, Layout(), ParallelOptions(), world_size=1)
    optimizer = build_optimizer(model.to_empty(device=device), OptimizerConfig(), plan.parameters)
    return all(group["fused"] for group in optimizer.param_groups)


def test_a_seed_is_that_of_torch_for_host_and_device(two: Workers) -> None:
    assert all(two.run(_seeds_alike))


def _seeds_alike(device: torch.device) -> bool:
    def drawn(seed: Callable[[], object]) -> list[torch.Tensor]:
        with fork_rng(device):
            seed()
            return [torch.rand(3), torch.rand(3, device=device).cpu()]

    pairs = zip(drawn(lambda: torch.manual_seed(7)), drawn(lambda: seed_generators(7, device)), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def test_initialization_leaves_the_generators_as_they_were(two: Workers) -> None:
    assert all(two.run(_same_generators))


def _same_generators(device: torch.device) -> bool:
    model, _ = make("llama", meta=True)
    before = (rng_state(device), rng_state(torch.device("cpu")))
    initialize(model, device, seed=3)
    assert all(parameter.device == device for parameter in model.parameters())
    return all(map(torch.equal, before, (rng_state(device), rng_state(torch.device("cpu")))))


def test_random_states_come_back(two: Workers) -> None:
    assert all(two.run(_drawn_again))


def _drawn_again(device: torch.device) -> bool:
    states = state.rng_tensors(5, device)
    assert states.keys() == {"rng.5.cpu", "rng.5.sim"}
    first = torch.rand(4, device=device)
    state.set_rng(states, 5, device)
    return torch.equal(first, torch.rand(4, device=device))


def test_a_run_with_dropout_resumes_as_if_nothing_had_happened(tiny: Tiny, two: Workers, cpu_pool: Pool) -> None:
    """Also on the CPU and back, where the random numbers are others and the values of the weights are not."""
    every = (GPT2_WITH_DROPOUT, "checkpoint.every=2", "checkpoint.keep=null", "training.log_every=1", "training.steps=6")
    whole = tiny(*every, name="whole")
    train_with(two, whole)
    middle = whole.directory / "checkpoints" / "step-00000002"
    assert {name for name in storage.contents(middle) if name.startswith("rng.")} == {
        f"rng.{rank}.{kind}" for rank in (0, 1) for kind in ("cpu", "sim")
    }
    again = tiny(*every, f"checkpoint.resume={middle}", name="again")
    train_with(two, again)
    assert losses(again) == losses(whole)[2:]

    across = (*every[:-1], f"checkpoint.resume={middle}")
    on_cpu = tiny(*across, "training.steps=4", name="cpu")
    train_with(cpu_pool, on_cpu)
    back = tiny(*every, f"checkpoint.resume={on_cpu.directory / 'checkpoints' / 'step-00000004'}", name="back")
    train_with(two, back)
    assert [*losses(on_cpu), *losses(back)] == pytest.approx(losses(whole)[2:], rel=0.05)  # other dropout


def test_memory_is_the_device_s(tiny: Tiny, two: Workers) -> None:
    config = tiny("training.steps=1", "training.log_every=1")
    train_with(two, config)
    shown = [row["memory_bytes"] for row in rows(config) if "memory_bytes" in row]
    assert 0 < shown[-1] < 2**24 < memory_in_use(torch.device("cpu"))


def test_an_export_generates_on_the_device(tiny: Tiny, tmp_path: Path, two: Workers) -> None:
    config = tiny("training.steps=2")
    train_with(two, config)
    checkpoint = latest(config.directory / "checkpoints")
    assert checkpoint is not None
    export_checkpoint(checkpoint, tmp_path / "export")
    text = generate(tmp_path / "export", "abc", max_new_tokens=4, temperature=0.0)
    assert [text, text] == two.run(_generated, tmp_path / "export")


def _generated(device: torch.device, directory: Path) -> str:
    first = torch.device("sim", 0)
    torch.get_device_module(first).reset_peak_memory_stats(first)
    before = memory_in_use(first)
    text = generate(directory, "abc", max_new_tokens=4, temperature=0.0)
    assert memory_in_use(first) > before
    return text


@pytest.fixture
def command(accelerator: Path, tmp_path: Path) -> Callable[..., str]:
    """Runs a command of Meshwright in a process that has the accelerator, and returns what it prints."""

    def run(*arguments: object) -> str:
        with on_path(accelerator):
            line = [sys.executable, "-m", "meshwright", *map(str, arguments)]
            done = subprocess.run(line, env=os.environ, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.command
def test_an_audit_on_the_device(tiny: Tiny, tmp_path: Path, command: Callable[..., str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tiny().model_dump(mode="json")))
    said = command("audit", file, "--device", "sim", "--nproc", 2, "--drawn")
    assert "PASS: LlamaForCausalLM, 2 ranks (dp_shard=2), float64: 21 gradients as in one process" in said


@pytest.mark.command
def test_the_device_is_calibrated(tiny: Tiny, tmp_path: Path, command: Callable[..., str]) -> None:
    file, found = tmp_path / "run.yaml", tmp_path / "sim.yaml"
    file.write_text(yaml.safe_dump(tiny().model_dump(mode="json")))
    command("calibrate", file, found, "--nproc", 2)
    values = yaml.safe_load(found.read_text())
    assert values["name"].startswith("sim, calibrated ")
    assert 0 < values["bf16_tflops"] < 100


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", [("layout.dp_shard=2",), ("layout.dp_shard=1", "layout.tp=2")], ids=["shard 2", "tp 2"])
def test_a_save_in_the_background_waits_once(tiny: Tiny, two: Workers, layout: tuple[str, ...]) -> None:
    """Its buffers on the host are used again, and hold what the plan says."""
    config = tiny(*layout, "training.steps=4", "checkpoint.every=2", "checkpoint.keep=null", "checkpoint.asynchronous=true")
    setup, *_ = prepare_run(config, 2)
    (line,) = host_lines(config, setup.plan)
    for waits, held, reused in two.run(_staged, config, prepare_run(config, 2)[2].directory):
        assert waits == [1, 1]
        assert reused
        if "layout.tp=2" not in layout:  # a rank may have fewer bytes than the fullest
            assert human_bytes(held) in line
    blocking = tiny(*layout, "training.steps=4", "checkpoint.every=2", "checkpoint.keep=null", name="blocking")
    train_with(two, blocking)
    for step in (2, 4):
        ours, theirs = (_values(one, step) for one in (config, blocking))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def _staged(device: torch.device, config: RunConfig, store: Path) -> tuple[list[int], int, bool]:
    """Waits of each staging, bytes of the tensors that it copied, and whether the second one has the buffers of the first."""
    simulated, waits, seen = torch.get_device_module(device), [], []
    stage = HostCopies.stage

    def counted(self: HostCopies, tensors: dict[str, Any]) -> dict[str, Any]:
        simulated.reports.take()
        copies = stage(self, tensors)
        waits.append(len(simulated.reports.take("wait")))
        seen.append({name: local_part(copy) for name, copy in copies.items() if not name.startswith("rng.")})
        assert all(copy.device.type == "cpu" and copy.is_pinned() for copy in seen[-1].values())
        return copies

    with patch.object(HostCopies, "stage", counted):
        train_on_device(device, config, store, None)
    held = sum(copy.nbytes for name, copy in seen[0].items() if not name.endswith(".step"))
    return waits, held, {copy.data_ptr() for copy in seen[0].values()} == {copy.data_ptr() for copy in seen[1].values()}


def _values(config: RunConfig, step: int) -> dict[str, torch.Tensor]:
    """What a checkpoint holds, whole."""
    directory = config.directory / "checkpoints" / f"step-{step:08d}"
    names = {name: found for name, found in storage.contents(directory).items() if not name.startswith("rng.")}
    tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in names.items()}
    storage.read(directory, tensors)
    return tensors

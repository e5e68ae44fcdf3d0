"""Modules that an objective adds to the model: on every axis against one process, learned, saved, resumed, exported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from meshwright.audit.conduct import audit
from meshwright.checkpoint.directory import latest
from meshwright.checkpoint.export import export_checkpoint
from meshwright.checkpoint.storage import contents
from meshwright.errors import CheckpointError, MeshwrightError
from meshwright.objectives import Batch, Objective, given
from meshwright.plan.axes.pipeline.stage_plan import elsewhere
from meshwright.train.config import RunConfig
from meshwright.train.start.setup import RunSetup, make_setup
from tests.audit.conftest import auditor, folder
from tests.harness import refuses, run_ranks
from tests.objectives.parts import Heads, Preference, Scale
from tests.objectives.test_given import LORA, PLACES, compare
from tests.objectives.test_trial import config
from tests.train.conftest import corpus, tiny
from tests.train.runs import losses, rows, train
from tests.train.test_engine import LAYOUTS, RARE, make, own

__all__ = ["auditor", "corpus", "folder", "tiny"]

Tiny = Callable[..., RunConfig]
HEADS = "training.objective=tests.objectives.parts:Heads"


def audited(auditor: Any, folder: Path, label: str, name: str, **options: Any) -> None:
    family = "mixtral" if "ep" in label else "llama"
    compare(auditor, folder, PLACES[label], name, family, chunks=name == "Preference" and "pp" not in label, **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("label", "name"), [("cp 2", "Heads"), ("tp 2 seq", "Heads")])
def test_ranks_that_share_sequences_or_features(auditor: Any, folder: Path, label: str, name: str) -> None:
    audited(auditor, folder, label, name)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["Heads", "Preference"])
@pytest.mark.parametrize(
    "label",
    ["shard 2", "replicate 2", "tp 2", "pp 2", "ep 2", "cp 2 x tp 2", "cp 2 x shard 2", "2 x shard 2", "tp 2 x shard 2"],
)
def test_every_axis(auditor: Any, folder: Path, label: str, name: str) -> None:
    audited(auditor, folder, label, name)


@pytest.mark.thorough
@pytest.mark.parametrize("label", ["shard 2", "tp 2", "pp 2"])
def test_beside_adapters(auditor: Any, folder: Path, label: str) -> None:
    audited(auditor, folder, label, "Preference", adapter=LORA)


def test_a_whole_audit(tmp_path: Path) -> None:
    """The model of the ranks is read from files, which do not have them; and the verdict is that of the run's model."""
    run = config(tmp_path, "Heads", "layout.tp=2", "data.packing=pad", "parallel.freeze=['objective.token.0.*']")
    report = audit(run, nproc=2, drawn=True)
    assert report.passed, report.verdict
    assert report.worst_gradient < 1e-12
    assert {"objective.scale.log", "objective.head.weight"} <= {row.name for row in report.rows}


# -- a run --------------------------------------------------------------------------------------------------------------------


def added_in(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    return {key: shape for key, (shape, _) in contents(checkpoint).items() if key.startswith("model.objective.")}


def newest(run: RunConfig) -> Path:
    found = latest(run.directory / "checkpoints")
    assert found is not None
    return found


def test_learned_resumed_on_another_layout_and_exported(tiny: Tiny, tmp_path: Path) -> None:
    same = (HEADS, "schedule.kind=constant", "checkpoint.every=3", "optimizer.lr=0.002")
    whole, parts = tiny(*same, name="whole"), tiny(*same, "training.steps=3", name="parts")
    expected = train(whole)
    assert any("value" in row for row in rows(whole))
    train(parts, 2)
    again = tiny(*same, "layout.tp=2", "parallel.sequence_parallel=true", name="parts")
    train(again, 2)
    assert losses(again) == pytest.approx(expected, rel=2e-4)
    assert added_in(newest(again)) == {
        "model.objective.head.weight": (3, 32),
        "model.objective.head.bias": (3,),
        "model.objective.scale.log": (1,),
        "model.objective.token.0.weight": (6, 32),
        "model.objective.token.0.bias": (6,),
        "model.objective.token.2.weight": (1, 6),
        "model.objective.token.2.bias": (1,),
    }
    export_checkpoint(newest(again), tmp_path / "exported")
    beside = load_file(tmp_path / "exported" / "objective" / "objective.safetensors")
    assert {f"model.objective.{name}": tuple(value.shape) for name, value in beside.items()} == added_in(newest(again))
    assert abs(float(beside["scale.log"]) - 0.5) > 0.002
    _, told = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not told["unexpected_keys"]
    assert not told["missing_keys"]
    with refuses(CheckpointError, "checkpoint.model"):
        train(tiny(*same[1:], name="whole"))


def test_first_values_do_not_depend_on_the_layout_or_the_files(tiny: Tiny, tmp_path: Path) -> None:
    one = (HEADS, "training.steps=1", "checkpoint.every=1", "optimizer.lr=1e-9")
    made = tiny(*one, "callbacks=[{use: ema, with: {decay: 0.5}}]", name="made")
    train(made, 2)
    export_checkpoint(newest(made), tmp_path / "exported", average="ema")
    first = load_file(tmp_path / "exported" / "objective" / "objective.safetensors")
    assert float(first["scale.log"]) == pytest.approx(0.5)
    read = tiny(*one, f"model={{path: '{tmp_path / 'exported'}'}}", "layout.pp=2", name="read")
    train(read, 2)
    adapter = "adapter={rank: 2, targets: all-linear}"
    adapted = tiny(*one, f"model={{path: '{tmp_path / 'exported'}'}}", adapter, name="adapted")
    train(adapted)
    for run, folder_name, alone in ((read, "of-read", False), (adapted, "merged", False), (adapted, "adapter", True)):
        export_checkpoint(newest(run), tmp_path / folder_name, adapter=alone)
        values = load_file(tmp_path / folder_name / "objective" / "objective.safetensors")
        assert values.keys() == first.keys()
        for name, value in values.items():
            assert torch.allclose(value, first[name], atol=1e-6), name


# -- an engine ----------------------------------------------------------------------------------------------------------------


def steps(rank: int, layout: str, options: dict[str, Any]) -> tuple[list[float], float, list[str]]:
    ranks = 2 if "dp_" in layout else 1
    engine = make(layout, 4 // ranks, objective=Heads(), **options)
    found = [engine.step(own(engine, 0)) for _ in range(6)]
    with refuses(MeshwrightError, "engine.loss") as caught:
        engine.step(own(engine, 0), Preference())
    assert "parameters of its own, scale" in str(caught.value)
    return [one.loss for one in found], found[0].gradient_norm, [name for name, _ in engine.weights()]


def learns(layout: str, options: dict[str, Any]) -> None:
    alone, norm, names = run_ranks(steps, 1, "", {})[0]
    assert alone[-1] < 0.9 * alone[0]
    assert not [name for name in names if "objective" in name]
    for losses_, norm_, names_ in run_ranks(steps, 4 if layout.startswith("pp=2,") else 2, layout, options):
        assert norm_ == pytest.approx(norm, rel=1e-12)
        assert losses_[:2] == pytest.approx(alone[:2], rel=1e-10)
        assert losses_ == pytest.approx(alone, rel=1e-7)  # Adam enlarges the rounding of small gradients
        assert names_ == names


@pytest.mark.parametrize("name", ["dp_shard", "pp"])
def test_an_engine_has_them_by_its_objective(name: str) -> None:
    learns(*LAYOUTS[name])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["dp_replicate", "pp interleaved", "pp zbv", "pp dualpipe_v", "pp cp", "pp tp"])
def test_engines_on_other_layouts(name: str) -> None:
    learns(*RARE[name])


# -- in the plan --------------------------------------------------------------------------------------------------------------


def planned(tmp_path: Path, *overrides: str, world_size: int = 2) -> RunSetup:
    return make_setup(config(tmp_path, "Heads", "data.packing=pad", *overrides), world_size, planning=True)


def test_they_are_rows_of_the_plan(tmp_path: Path) -> None:
    found = planned(
        tmp_path,
        "parallel.freeze=['objective.token.0.*']",
        "optimizer.groups=[{match: objective.head, lr: 10x}]",
        "parallel.param_dtype=bfloat16",
    ).plan
    rows_of = {row.name: row for row in found.parameters if row.name.startswith("objective.")}
    assert {name: (row.decayed, row.rate) for name, row in rows_of.items() if row.trainable} == {
        "objective.head.weight": (True, 10),
        "objective.head.bias": (False, 10),
        "objective.scale.log": (False, 1),
        "objective.token.2.weight": (True, 1),
        "objective.token.2.bias": (False, 1),
    }
    assert rows_of["objective.head.weight"].placements == (("dp_shard", "Shard(0)"),)
    units = {unit.name: unit for unit in found.units if unit.kind == "added"}
    assert units.keys() == {"objective.head", "objective.scale", "objective.token"}
    assert {unit.param_dtype for unit in units.values()} == {"float32"}
    assert {name: unit.places for name, unit in units.items()} == {
        "objective.head": 2, "objective.scale": 1, "objective.token": 1
    }  # fmt: skip


def test_they_are_on_the_last_stage(tmp_path: Path) -> None:
    plan = planned(tmp_path, "layout.pp=2").plan
    assert {row.stages for row in plan.parameters if row.name.startswith("objective.")} == {(1,)}
    assert "objective" in elsewhere(plan, [0])
    assert "objective" not in elsewhere(plan, [1])


def test_they_are_units_of_their_own(tmp_path: Path) -> None:
    with refuses(MeshwrightError, "fsdp.exclude_units") as caught:
        planned(tmp_path, "parallel.exclude_units=[objective.head]")
    assert "'objective.head' is called by the objective" in str(caught.value)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * self.weight


class Scalar(Scale):
    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.empty(()))


class Forgets(Scale):
    def reset_parameters(self) -> None:
        pass


class Adds(Objective):
    """It adds what it is given, and calls what is there."""

    def __init__(self, added: Any, calls: str = "scale", reads: bool = False) -> None:
        self.given, self.calls, self.reads = added, calls, reads

    def modules(self, model: Any) -> Any:
        return {name: make_() for name, make_ in self.given.items()} if isinstance(self.given, dict) else self.given

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        values, scale = given.log_probs(model, batch), given.module(model, self.calls)
        return (-(values * scale.log.exp() if self.reads else scale(values)).sum(),)  # type: ignore[union-attr, operator]


@pytest.mark.parametrize(
    ("objective", "code", "words"),
    [
        (Adds({"scale": Scale}), "", ""),
        (Adds(Scale()), "objective.modules", "modules returned Scale; legal is a mapping"),
        (Adds({"scale": lambda: 3}), "objective.modules", "modules['scale']: is int"),
        (Adds({"a.b": Scale}), "objective.modules", "'a.b' is no name"),
        (Adds({"keys": Scale}), "objective.modules", "'keys' is no name"),
        (Adds({"scale": Bare}), "objective.modules", "scale: Bare has parameters; it needs reset_parameters"),
        (Adds({"scale": lambda: nn.BatchNorm1d(3)}), "objective.modules", "scale.running_mean: is a buffer"),
        (Adds({"scale": Scalar}), "fsdp.scalar", "'objective.scale.log' is a scalar"),
        (Adds({"scale": Forgets}), "model.initial_values", "scale.log"),
        (Adds({"scale": Scale}, "skale"), "objective.modules", "'skale' is not added by the objective; added are: scale"),
        (Adds({"scale": Scale, "other": Scale}), "objective.modules", "its loss does not depend on other.log"),
        (Adds({"scale": Scale}, reads=True), "objective.modules", "reads scale.log without calling its module"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_added_is_refused(tmp_path: Path, objective: Objective, code: str, words: str) -> None:
    run = config(tmp_path, "focal")
    if not code:
        assert make_setup(run, 2, objective_given=objective).objective.module_runs == {"scale": (1, 1)}
        return
    with refuses(MeshwrightError, code) as caught:
        make_setup(run, 2, objective_given=objective)
    assert words in str(caught.value)

"""Optimizers beside AdamW: on layouts they do what they do in one process; what does not is found and named."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from maintain.cells import Variant, family_case
from meshwright.audit.conduct import Auditor
from meshwright.distributed.update.flagged import local
from meshwright.plan.given.closed_choices import SyncPolicy
from meshwright.train.config import OptimizerConfig
from tests.audit.conftest import auditor, folder
from tests.distributed.update.test_sharded_muon import PLANTS
from tests.objectives.test_given import PLACES
from tests.train.test_groups import goes_on

__all__ = ["auditor", "folder"]

KINDS: dict[str, dict[str, Any]] = {
    "lion": {"kind": "lion", "lr": 1e-3},
    "sgd": {"kind": "sgd", "lr": 0.1, "with": {"momentum": 0.9, "nesterov": True}},
    "adafactor": {"kind": "adafactor", "lr": 0.01, "groups": [{"match": "**.embed_tokens", "kind": "adamw", "lr": "0.1x"}]},
    "muon": {"kind": "muon", "lr": 0.01, "with": {"dtype": "float64", "bucket": 2000}},
    "whole": {"use": f"{__name__}:ByWholeNorm", "lr": 0.01, "weight_decay": 0.0},
    "shard": {"use": f"{__name__}:ByNormOfShard", "lr": 0.01, "weight_decay": 0.0},
}


class ByWholeNorm(torch.optim.Optimizer):
    """Each parameter moves by the rate, along an average of its gradients; right on shards, as DTensors reduce."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def norm(self, moved: torch.Tensor) -> torch.Tensor:
        found = moved.norm()
        return found.full_tensor() if isinstance(found, torch.distributed.tensor.DTensor) else found

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                average.mul_(0.9).add_(parameter.grad)
                parameter.sub_(average * (group["lr"] / self.norm(average).clamp(min=1e-12)))


class ByNormOfShard(ByWholeNorm):
    """The planted bug: what is not elementwise, and not reduced."""

    def norm(self, moved: torch.Tensor) -> torch.Tensor:
        return local(moved).norm()


def audited(auditor: Auditor, folder: Path, kind: str, label: str, plants: Any = ()) -> Any:
    place = PLACES[label]
    case = family_case("mixtral" if label.startswith("ep") else "llama", place, VARIANT, folder)
    config = case.config.model_copy(update={"optimizer": OptimizerConfig.model_validate(KINDS[kind])})
    return auditor.audit(replace(case, config=config), place.world_size, plants=plants)


VARIANT = Variant(SyncPolicy.REDUCE_EACH, "float64", 2, False, False)
DEFAULT = {("lion", "shard 2"), ("muon", "ep 2"), ("adafactor", "tp 2"), ("whole", "shard 2")}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "label"),
    [
        pytest.param(kind, label, marks=() if (kind, label) in DEFAULT else pytest.mark.thorough)
        for kind in KINDS
        if kind != "shard"
        for label in ("shard 2", "tp 2", "pp 2", "cp 2", "ep 2")
    ],
)
def test_they_are_those_of_one_process(auditor: Auditor, folder: Path, kind: str, label: str) -> None:
    report = audited(auditor, folder, kind, label)
    assert report.passed, report.verdict


def test_an_optimizer_of_the_user_that_reads_shards_is_named(auditor: Auditor, folder: Path) -> None:
    report = audited(auditor, folder, "shard", "shard 2")
    assert not report.passed
    assert f"optimizer {__name__}:ByNormOfShard changes it: of shards it computes something else" in report.verdict


def forgets_the_state(trainer: Any) -> None:
    """In the second step, the moment of one parameter is that of another."""

    def swap(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        held = [state for parameter, state in optimizer.state.items() if parameter.ndim == 1]
        held[0]["exp_avg"].copy_(held[1]["exp_avg"])

    trainer.optimizer.register_step_post_hook(swap)


def test_a_moment_of_another_parameter_is_found(auditor: Auditor, folder: Path) -> None:
    report = audited(auditor, folder, "lion", "shard 2", plants=[forgets_the_state])
    assert not report.passed
    assert "exp_avg" in report.verdict
    assert "norm.weight" in report.verdict


def planted(name: str, trainer: Any) -> None:
    """In each update there is a bug."""
    step = trainer.optimizer.step

    def wrong(*arguments: Any) -> None:
        with PLANTS[name](trainer.rank):
            step(*arguments)

    trainer.optimizer.step = wrong


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("momentum of another owner", "shard 2"),
        pytest.param("order of a bucket swapped", "shard 2", marks=pytest.mark.thorough),
        pytest.param("Newton-Schulz on slices", "tp 2", marks=pytest.mark.thorough),
        pytest.param("factor of the shape of a slice", "tp 2", marks=pytest.mark.thorough),
    ],
)
def test_a_bug_that_is_planted_in_muon_is_named(auditor: Auditor, folder: Path, name: str, label: str) -> None:
    report = audited(auditor, folder, "muon", label, plants=[partial(planted, name)])
    assert not report.passed
    assert "model.layers." in report.verdict
    assert "the first gradients agree" in report.verdict


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["lion", "sgd", "adafactor", "muon"])
def test_they_resume_on_another_layout(tmp_path: Path, kind: str) -> None:
    goes_on(
        tmp_path, f"optimizer.kind={kind}", "optimizer.lr=0.001", *(["optimizer.with.momentum=0.9"] if kind == "sgd" else [])
    )

"""Learning rate over the steps, and which parameters are decayed."""

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.given.spec import ParallelSpec
from meshwright.plan.resolver import resolve
from meshwright.plan.result.sharding_plan import ParameterRow
from meshwright.train.config import OptimizerConfig, ScheduleConfig
from meshwright.train.learning_rate import learning_rate, set_learning_rate
from meshwright.train.optimizer import build_optimizer

PEAK = 0.4


def rates(steps: int, **schedule: object) -> list[float]:
    return [learning_rate(step, steps, PEAK, ScheduleConfig(**schedule)) for step in range(steps)]


def test_warmup_is_linear_and_reaches_the_peak_in_its_last_step() -> None:
    for kind in ("cosine", "linear", "constant"):
        assert rates(10, kind=kind, warmup_steps=4)[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_constant() -> None:
    assert rates(5, kind="constant") == [PEAK] * 5


def test_linear_ends_at_the_final_ratio() -> None:
    assert rates(5, kind="linear", final_ratio=0.2) == pytest.approx([0.4, 0.32, 0.24, 0.16, 0.08])
    assert rates(5, kind="linear", final_ratio=0)[-1] == 0


def test_cosine() -> None:
    found = rates(9, kind="cosine", final_ratio=0.1)
    assert found[0] == PEAK
    assert found[4] == pytest.approx(PEAK * 0.55)  # half way
    assert found[-1] == pytest.approx(PEAK * 0.1)
    assert found == sorted(found, reverse=True)
    assert found[2] == pytest.approx(PEAK * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))))


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_decay_starts_at_the_peak_after_warmup_and_stays_at_its_end(kind: str) -> None:
    schedule = ScheduleConfig(kind=kind, warmup_steps=3, final_ratio=0.5)
    assert learning_rate(3, 10, PEAK, schedule) == PEAK
    assert learning_rate(9, 10, PEAK, schedule) == pytest.approx(PEAK / 2)
    assert learning_rate(25, 10, PEAK, schedule) == pytest.approx(PEAK / 2)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (3, 3), (3, 8), (4, 3)])
def test_short_runs_have_finite_rates(steps: int, warmup: int) -> None:
    for kind in ("cosine", "linear", "constant"):
        found = rates(steps, kind=kind, warmup_steps=warmup)
        assert all(0 < rate <= PEAK * (1 + 1e-12) for rate in found), found


def rows(built: nn.Module, **options: object) -> tuple[ParameterRow, ...]:
    return resolve(ParallelSpec("plain", layers=()), built, Layout(), ParallelOptions(**options), world_size=1).parameters


def model() -> nn.Module:
    built = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    built[1].weight.requires_grad_(False)
    return built


def test_matrices_are_decayed_vectors_are_not_and_frozen_ones_are_left_out() -> None:
    built = model()
    optimizer = build_optimizer(built, OptimizerConfig(lr=0.1, weight_decay=0.3, betas=(0.7, 0.8), eps=1e-6), rows(built))
    decayed, plain = optimizer.param_groups
    assert [p is built[0].weight for p in decayed["params"]] == [True]
    assert {id(p) for p in plain["params"]} == {id(p) for p in (built[1].bias, built[2].weight, built[2].bias)}
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert all((g["lr"], g["betas"], g["eps"], g["fused"]) == (0.1, (0.7, 0.8), 1e-6, True) for g in optimizer.param_groups)
    assert not build_optimizer(built, OptimizerConfig(fused=False), rows(built)).param_groups[0]["fused"]


def test_without_vectors_there_is_one_group() -> None:
    built = nn.Linear(2, 2, bias=False)
    optimizer = build_optimizer(built, OptimizerConfig(), rows(built))
    assert len(optimizer.param_groups) == 1


def test_what_the_plan_excepts_is_not_decayed() -> None:
    built = model()
    (group,) = build_optimizer(built, OptimizerConfig(), rows(built, no_decay=("0.weight",))).param_groups
    assert group["weight_decay"] == 0.0
    assert len(group["params"]) == 4


def test_a_trained_parameter_without_a_row_is_named() -> None:
    built = model()
    with pytest.raises(PlanError, match=r"no row for the trained parameter '2\.bias'"):
        build_optimizer(built, OptimizerConfig(), rows(built)[:-1])


def test_set_learning_rate_reaches_every_group() -> None:
    built = model()
    optimizer = build_optimizer(built, OptimizerConfig(), rows(built))
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_step_is_that_of_adamw() -> None:
    """Two steps by hand: Loshchilov and Hutter 2019, algorithm 2."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, 2.0)
    optimizer = build_optimizer(layer, OptimizerConfig(lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.5), rows(layer))
    expected, first, second = 2.0, 0.0, 0.0
    for step, gradient in enumerate((3.0, -1.0), start=1):
        layer.weight.grad = torch.full_like(layer.weight, gradient)
        optimizer.step()
        first, second = 0.9 * first + 0.1 * gradient, 0.99 * second + 0.01 * gradient**2
        corrected = (first / (1 - 0.9**step)) / (math.sqrt(second / (1 - 0.99**step)) + 1e-8)
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * corrected
        assert layer.weight.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("adafactor", {"eps": (0.0, 1e-3)}, "optimizer.with.eps.0=0.0: input should be greater than 0"),
        ("adafactor", {"eps": (None, -1.0)}, "optimizer.with.eps.1=-1.0"),
        ("sgd", {"nesterov": True}, "optimizer.with: nesterov=true: needs a momentum above 0"),
        ("adamw4bit", {"block_size": 17}, "optimizer.with.block_size=17: input should be a multiple of 2"),
    ],
)
def test_options_that_would_do_nothing_or_break_numbers_are_refused(kind: str, options: dict[str, Any], words: str) -> None:
    """With eps 0, zeros of gradients give 0 / 0; blocks of 4 bits hold two numbers in a byte."""
    with pytest.raises(ValidationError) as caught:
        OptimizerConfig.model_validate({"kind": kind, "with": options})
    assert words in str(caught.value)

"""The numbers of a comparison, by hand."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

from meshwright.audit.compare import compare, weights_of_parts
from meshwright.audit.precision import KeepFloat64
from meshwright.audit.tolerance import Tolerances
from meshwright.train.config import OptimizerConfig
from tests.harness import run_ranks

TRUTH = torch.tensor([4.0, -2.0, 1.0, 0.0])


def test_a_factor_is_named_and_noise_is_not() -> None:
    error, ratio, residual, scale = compare(2 * TRUTH, TRUTH)
    assert (error, ratio, residual, scale) == (1.0, 2.0, 0.0, 4.0)
    error, ratio, residual, _ = compare(TRUTH + torch.tensor([0.0, 0.0, 0.0, 0.4]), TRUTH)
    assert error == pytest.approx(0.1)
    assert ratio == 1.0  # what is foreign does not move the factor
    assert residual > 0.05


def test_what_is_missing_or_not_finite_has_an_infinite_error() -> None:
    assert compare(None, TRUTH)[0] == math.inf
    assert compare(None, torch.zeros(3))[0] == 0.0  # nothing was due
    assert compare(torch.tensor([1.0, math.nan, 0.0, 0.0]), TRUTH)[0] == math.inf


def test_a_reference_of_zero_has_no_ratio_and_any_difference_is_an_error() -> None:
    zero = torch.zeros(4)
    error, ratio, *_ = compare(zero, zero)
    assert error == 0.0
    assert math.isnan(ratio)
    assert compare(TRUTH, zero)[0] == math.inf
    assert compare(1e-12 * TRUTH, zero, floor=1.0)[0] == pytest.approx(4e-12)  # noise, on the scale of the others


def test_a_reference_of_zero_may_differ_by_its_slack() -> None:
    """A parameter that does not move in one process may move by rounding on many."""
    still, moved = torch.zeros(3), torch.tensor([0.0, 1e-8, 0.0])
    assert compare(moved, still, slack=torch.tensor([0.0, 1e-7, 0.0]))[0] == pytest.approx(0.1)
    assert compare(moved, still, slack=torch.tensor([1.0, 0.0, 1.0]))[0] == math.inf


def test_a_reference_that_is_not_finite_passes_nothing() -> None:
    error = compare(torch.zeros(3), torch.tensor([0.0, math.nan, 0.0]), floor=1.0)[0]
    assert not error <= 1.0


def test_slack_is_entry_by_entry() -> None:
    found = TRUTH + torch.tensor([0.0, 0.0, 1.0, 0.0])
    assert compare(found, TRUTH)[0] == 0.25
    assert compare(found, TRUTH, slack=torch.tensor([0.0, 0.0, 96.0, 0.0]))[0] == pytest.approx(0.01)
    assert compare(found, TRUTH, slack=torch.tensor([96.0, 96.0, 0.0, 96.0]))[0] == 0.25


def test_weights_tell_which_parts_are_in_a_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(5, 7, generator=generator) for _ in range(4)]
    assert weights_of_parts(sum(parts), parts) == pytest.approx([1.0] * 4)
    assert weights_of_parts(parts[0] + 0.5 * parts[3], parts) == pytest.approx([1.0, 0.0, 0.0, 0.5], abs=1e-6)
    assert weights_of_parts(torch.randn(5, 7, generator=generator), parts) == ()  # it is not made of them


def test_a_part_that_does_not_touch_the_parameter_has_no_weight() -> None:
    parts = [TRUTH, torch.zeros(4)]
    weights = weights_of_parts(3 * TRUTH, parts)
    assert weights[0] == pytest.approx(3.0)
    assert math.isnan(weights[1])


def test_float64_stays_float64_where_models_ask_for_float32() -> None:
    value = torch.ones(3, dtype=torch.float64)
    with KeepFloat64():
        assert value.float().dtype == torch.float64
        assert value.to(torch.float32).dtype == torch.float64
        assert value.to(dtype=torch.float32).dtype == torch.float64
        assert torch.nn.functional.softmax(value, dim=-1, dtype=torch.float32).dtype == torch.float64
        assert value.to(torch.bfloat16).dtype == torch.bfloat16
        assert torch.arange(3).float().dtype == torch.float32
        assert value.long().float().dtype == torch.float32
    assert value.float().dtype == torch.float32


def recompute(rank: int) -> tuple[list[torch.dtype], torch.Tensor]:
    def layer(value: torch.Tensor) -> torch.Tensor:
        seen.append(value.float().dtype)
        return value.float() ** 2

    seen: list[torch.dtype] = []
    value = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with KeepFloat64():
        torch.utils.checkpoint.checkpoint(layer, value, use_reentrant=False).sum().backward()
    assert value.grad is not None
    return seen, value.grad


def test_recomputing_in_backward_stays_float64_too() -> None:
    ((seen, gradient),) = run_ranks(recompute, 1, group=False)
    assert seen == [torch.float64] * 2
    assert gradient.tolist() == [2.0] * 3


def test_parts_that_are_alike_or_nothing_but_rounding_get_no_weight() -> None:
    """Solved all the same they would weigh 1e12."""
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(30, generator=generator, dtype=torch.float64) for _ in range(2))
    twice = [one, one + 1e-14 * other]
    weights = weights_of_parts(one + 1e-3 * other, twice)
    assert len(weights) == 2
    assert all(map(math.isnan, weights))
    weights = weights_of_parts(2 * one + 1e-3 * other, [one, 1e-16 * other])
    assert weights[0] == pytest.approx(2.0, abs=1e-2)
    assert math.isnan(weights[1])


@pytest.mark.parametrize(
    ("kind", "options", "state", "floor"),
    [
        ("lion", {"betas": (0.9, 0.5)}, "exp_avg", 0.5),
        ("muon", {"momentum": 0.0}, "momentum_buffer", 1.0),
        ("adamw", {}, "exp_avg", 0.1),
    ],
)
def test_what_a_step_adds_to_a_moment_depends_on_the_options(
    kind: str, options: dict[str, Any], state: str, floor: float
) -> None:
    settings = OptimizerConfig.model_validate({"kind": kind, "with": options})
    tolerances = object.__new__(Tolerances)
    tolerances.rows = {"w": SimpleNamespace(update=next(iter(settings.updaters)), betas=None)}  # type: ignore[dict-item]
    assert tolerances.moment_floor("w", state, 2.0, settings) == pytest.approx(2 * floor)

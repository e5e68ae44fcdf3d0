"""Recording at borders of modules, and the comparison of what a rank holds with a whole."""

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.audit.borders import BorderRecorder, BorderRow, Point, border_error, part_of, worst_of_ranks
from meshwright.audit.causes.origin import origin_findings
from meshwright.audit.result import RankResult
from meshwright.layout import Layout
from meshwright.models.specs.registry import spec_of
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.resolver import resolve
from meshwright.plan.result.border_places import Portion, Side
from meshwright.plan.result.sharding_plan import ShardingPlan
from tests.tiny import tiny_model


class Residual(nn.Module):
    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.norm, self.inner, self.again = nn.LayerNorm(4), nn.Linear(4, 4), again

    def branch(self, value: torch.Tensor) -> torch.Tensor:
        return self.inner(self.norm(value))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + (checkpoint(self.branch, value, use_reentrant=False) if self.again else self.branch(value))


def recorded(again: bool = False, limit: int = 10**6, hooked: bool = True) -> tuple[BorderRecorder, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Residual(again), Residual(again))
    recorder = BorderRecorder(model, ["1", "1.norm", "1.inner", "2"] if hooked else [], (0, 2), limit)
    for _ in range(3):
        model(torch.randn(2, 3, 4)).square().sum().backward()
    recorder.close()
    return recorder, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_recording_changes_nothing_and_knows_each_tensor_once(again: bool) -> None:
    recorder, gradients = recorded(again)
    _, plain = recorded(again, hooked=False)
    assert all(torch.equal(one, other) for one, other in zip(gradients, plain, strict=True))
    assert recorder.tensors.keys() == {0, 2}
    first = recorder.tensors[0]
    assert len(first) == 4 * 4  # in and out, value and gradient
    assert [str(point) for point in first][:3] == ["1|0|input|.0|value", "1.norm|0|input|.0|value", "1.norm|0|output||value"]
    assert all(point.run == 0 for point in first)


def test_the_gradient_of_an_input_is_that_through_the_module_alone() -> None:
    first = recorded()[0].tensors[0]
    of = {(point.module, point.side): tensor for point, tensor in first.items() if point.gradient}
    past = of["1", Side.OUTPUT]  # what the residual hands on
    assert torch.allclose(of["1", Side.INPUT], of["1.norm", Side.INPUT] + past)
    assert torch.equal(of["1", Side.OUTPUT], of["2", Side.INPUT])


def test_what_is_beyond_the_limit_is_left_out_and_counted() -> None:
    recorder, _ = recorded(limit=3 * 2 * 3 * 4 * 4)
    assert [len(tensors) for tensors in recorder.tensors.values()] == [3, 3]
    assert recorder.left_out == 2 * (16 - 3)


TRUTH = torch.arange(2 * 5 * 3.0).reshape(2, 5, 3)


def test_parts_of_sequences_are_cut_out_of_the_whole() -> None:
    held = Portion(range(2), (range(3, 6),))  # of six positions, the last of which is padding
    padded = torch.cat([TRUTH, torch.full((2, 1, 3), -1.0)], dim=1)
    truth, found = part_of(TRUTH, padded[:, 3:], held) or pytest.fail("not comparable")
    assert torch.equal(truth, found)
    assert truth.shape == (2, 2, 3)
    flat, mine = part_of(TRUTH.flatten(0, 1), padded[:, 3:].flatten(0, 1), held) or pytest.fail("not comparable")
    assert torch.equal(flat, mine)
    two = Portion(range(2), (range(1), range(4, 5)))
    truth, found = part_of(TRUTH, TRUTH[:, [0, 4]], two) or pytest.fail("not comparable")
    assert torch.equal(truth, found)
    words = Portion(range(2), (range(5),), range(1, 3))
    truth, found = part_of(TRUTH, TRUTH[..., 1:], words) or pytest.fail("not comparable")
    assert torch.equal(truth, found)
    assert part_of(TRUTH, TRUTH[..., :2], Portion(range(2), (range(5),))) is None  # slices of features
    assert part_of(TRUTH, TRUTH[:, :2], held) is None


def test_errors_of_masks_and_of_what_is_not_a_number() -> None:
    mask = torch.tensor([0.0, -math.inf, 2.0])
    assert border_error(mask, mask, 0.0) == 0.0
    assert border_error(mask + torch.tensor([0.0, 0.0, 1.0]), mask, 0.0) == 0.5
    assert border_error(torch.tensor([0.0, -math.inf, math.nan]), mask, 0.0) == math.inf
    assert border_error(torch.tensor([0.0, 0.0, 2.0]), mask, 0.0) == math.inf
    masked_row = torch.tensor([1.0, math.nan])
    assert border_error(masked_row, masked_row.clone(), 0.0) == 0.0
    assert border_error(torch.tensor([1e-12]), torch.zeros(1), 1.0) == pytest.approx(1e-12)


def rows(rank: int, *wrong: int) -> RankResult:
    order = [
        ("1", Side.INPUT, False), ("1.norm", Side.INPUT, False), ("1.norm", Side.OUTPUT, False), ("1", Side.OUTPUT, False),
        ("1", Side.OUTPUT, True), ("1.norm", Side.OUTPUT, True), ("1.norm", Side.INPUT, True), ("1", Side.INPUT, True),
    ]  # fmt: skip
    points = [Point(module, 0, side, "", gradient) for module, side, gradient in order]
    return RankResult(
        rank, borders=[BorderRow(point, (rank + 1) * (index in wrong), 1e-9, rank) for index, point in enumerate(points)]
    )


def plan_of(pp: int = 1) -> ShardingPlan:
    model = tiny_model("llama", meta=True)
    return resolve(spec_of(model), model, Layout(dp_shard=1, pp=pp), ParallelOptions(microbatches=2))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ((2, 3, 5, 6), "forward diverges in 1.norm: its inputs agree, its output is off by 2 on ranks 0, 1"),
        ((3, 4), "forward diverges in 1: its inputs agree, its output is off by 2 on ranks 0, 1"),
        ((1, 2, 3), "forward diverges before 1.norm: all that was computed before agrees, but its input is off by 2"),
        ((6, 7), "backward diverges in 1.norm: the gradient of its output agrees, that of its input is off by 2 on ranks 0, 1"),
        ((5, 6, 7), "backward diverges behind 1.norm: forward agrees and so does all that backward computed before"),
    ],
    ids=str,
)
def test_the_first_module_that_parts_is_named(wrong: tuple[int, ...], words: str) -> None:
    (finding,) = origin_findings(plan_of(), [rows(0, *wrong), rows(1, *wrong)])
    assert words in finding.message


def test_the_rank_that_parts_first_is_named_and_a_loss_that_is_wrong_is_no_module() -> None:
    (finding,) = origin_findings(plan_of(), [rows(0, 3), rows(1, 2, 3)])
    assert finding.message.endswith("on rank 1")
    assert list(origin_findings(plan_of(), [rows(0, 4, 5, 6, 7), rows(1)])) == []
    assert list(origin_findings(plan_of(), [rows(0), rows(1)])) == []
    assert worst_of_ranks([*rows(0, 3).borders, *rows(1, 3).borders])[3].rank == 1


@pytest.mark.parametrize(("gradient", "first"), [(False, "model.layers.0"), (True, "model.layers.1")])
def test_stages_compute_one_after_the_other(gradient: bool, first: str) -> None:
    """Whatever the places of the rows among those of their ranks."""
    sides = (Side.OUTPUT, Side.INPUT) if gradient else (Side.INPUT, Side.OUTPUT)

    def on_stage(rank: int, wrong: int) -> RankResult:
        points = [Point(f"model.layers.{rank}", run, side, "", gradient) for run in range(2) for side in sides]
        return RankResult(rank, borders=[BorderRow(point, float(at == wrong), 0.1, rank) for at, point in enumerate(points)])

    wrong = (1, 3) if gradient else (3, 1)
    (finding,) = origin_findings(plan_of(pp=2), [on_stage(rank, at) for rank, at in enumerate(wrong)])
    assert finding.names == (first,)

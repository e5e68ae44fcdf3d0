"""Modules that stand in several places, or share their parameters: one unit, whose gradient is the sum over all places."""

import copy

import pytest
import torch
from torch import nn

from meshwright.distributed.comm_counter import CommCounter
from meshwright.distributed.conductor import parallelize
from meshwright.distributed.data.grad_sync import GradSync
from meshwright.distributed.mesh import build_mesh
from meshwright.distributed.slices import whole_tensor
from meshwright.layout import Layout
from meshwright.models.specs.registry import spec_of
from meshwright.plan.cost.price import totals
from meshwright.plan.given.closed_choices import SyncPolicy
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.resolver import resolve
from meshwright.plan.result.sharding_plan import ShardingPlan
from tests.harness import run_ranks

WIDTH = 8


class Block(nn.Module):
    def __init__(self, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.shared = shared

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + torch.tanh(self.first(hidden))
        return hidden if self.shared is None else hidden + self.shared(hidden)


class Stack(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.enter = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.leave(hidden)


def repeated() -> nn.Module:
    """One block object four times in a list, as in ALBERT."""
    return Stack([Block()] * 4)


def inside() -> nn.Module:
    """One module inside of two blocks of four, as in Zamba."""
    shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return Stack([Block(shared), Block(), Block(shared), Block()])


def tied() -> nn.Module:
    """Two modules with the same parameters, as transformers ties them."""
    first, second = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
    second[0].weight, second[0].bias = first[0].weight, first[0].bias
    return Stack([Block(first), Block(), Block(second), Block()])


class Headed(nn.Module):
    """A head whose name is the end of another one's: `head.weight` and `body.head.weight` are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, WIDTH)
        self.body = nn.ModuleDict({"head": nn.Linear(WIDTH, WIDTH), "up": nn.Linear(WIDTH, WIDTH)})
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight, self.head.bias = self.body["head"].weight, self.body["head"].bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.body["up"](torch.tanh(self.body["head"](self.enter(inputs)))))


def planned(model: nn.Module, **options: object) -> ShardingPlan:
    chosen = ParallelOptions(param_dtype=None, microbatches=2, **options)  # type: ignore[arg-type]
    return resolve(spec_of(model), model, Layout(dp_shard=2), chosen)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", list(SyncPolicy))
@pytest.mark.parametrize("make", [repeated, inside, tied, Headed])
def test_the_gradient_is_the_sum_over_all_places(make: object, policy: SyncPolicy) -> None:
    def on_rank(rank: int) -> None:
        torch.manual_seed(0)
        whole = make().double()  # type: ignore[operator]
        model = copy.deepcopy(whole)
        plan = planned(model, sync=policy, reduce_dtype=None)
        parallelize(model, plan, build_mesh(plan.layout, "cpu"))
        data = torch.randn(2, 2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        for part in data.flatten(0, 1):
            whole(part).square().sum().backward()
        sync = GradSync.from_plan(model, plan)
        for step in range(2):
            model.zero_grad(set_to_none=True)
            with CommCounter() as counter:
                for _, part in sync.microbatches(data[rank]):
                    model(part).square().sum().backward()
            if step:  # in the first, FSDP prepares itself
                due = totals(plan).traffic
                counts = counter.counts
                assert (counts["all_gather"], counts["reduce_scatter"]) == (due.all_gathers, due.reduce_scatters)
        truth = {name: parameter.grad for name, parameter in whole.named_parameters()}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            torch.testing.assert_close(whole_tensor(parameter.grad), truth[name], msg=lambda text, name=name: f"{name}: {text}")

    run_ranks(on_rank, 2)


def test_the_plan_says_what_is_one_unit() -> None:
    plan = planned(repeated())
    assert [unit.name for unit in plan.units] == ["", "layers.0"]
    assert plan.unit("layers.0").places == 4
    plan = planned(inside())
    assert "layers.0.shared" in [unit.name for unit in plan.units]
    assert "unit 'layers.0.shared': it stands in 2 places, and is one unit for all of them" in plan.remarks
    plan = planned(tied())
    assert plan.unit("layers.2.shared").part_of == "layers.0.shared"
    assert ShardingPlan.from_json(plan.to_json()) == plan

"""Learning rates of parameters that a group of the optimizer names."""

import torch
from torch import nn

from meshwright.layout import Layout
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.given.spec import ParallelSpec
from meshwright.plan.resolver import resolve


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(8, 8, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.w(hidden)


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Staged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage() for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            hidden = stage(hidden)
        return hidden


def test_of_layers_inside_of_layers_the_outer_ones_count() -> None:
    spec = ParallelSpec(family="staged", layers=("stages.*", "stages.*.blocks.*"))
    options = ParallelOptions(param_dtype=None, groups=(("**", 1.0, 0.5, None, ()),))
    plan = resolve(spec, Staged(), Layout(), options, world_size=2)
    assert {row.name: row.rate for row in plan.parameters} == {
        "stages.0.blocks.0.w.weight": 0.5, "stages.0.blocks.1.w.weight": 0.5,
        "stages.1.blocks.0.w.weight": 1.0, "stages.1.blocks.1.w.weight": 1.0,
    }  # fmt: skip

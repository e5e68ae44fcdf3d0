"""Learning rates of parameters that a group of the optimizer names."""

import torch
from torch import nn

from meshwright.layout import Layout
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.given.spec import ParallelSpec
from meshwright.plan.resolver import resolve


class Stack(nn.Module):
    """Modules that run one after another, in a list with a name."""

    def __init__(self, name: str, *parts: nn.Module) -> None:
        super().__init__()
        self.add_module(name, nn.ModuleList(parts))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for part in next(self.children()):
            hidden = part(hidden)
        return hidden


def test_of_layers_inside_of_layers_the_outer_ones_count() -> None:
    blocks = [[nn.Linear(8, 8, bias=False) for _ in range(2)] for _ in range(2)]
    model = Stack("stages", *(Stack("blocks", *own) for own in blocks))
    spec = ParallelSpec(family="staged", layers=("stages.*", "stages.*.blocks.*"))
    options = ParallelOptions(param_dtype=None, groups=(("**", 1.0, 0.5, None, ()),))
    plan = resolve(spec, model, Layout(), options, world_size=2)
    assert {row.name: row.rate for row in plan.parameters} == {
        "stages.0.blocks.0.weight": 0.5, "stages.0.blocks.1.weight": 0.5,
        "stages.1.blocks.0.weight": 1.0, "stages.1.blocks.1.weight": 1.0,
    }  # fmt: skip

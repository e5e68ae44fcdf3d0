"""torch.compile, layer by layer, after everything else was carried out.

A layer is one graph. One with experts is not: they are an FSDP unit inside it, whose hooks no graph can hold. So its parts are
compiled, each as one graph: attention, norms, a dense MLP, and the experts themselves. What chooses experts runs as it is, so
that activation checkpointing can keep its choice, and so do dispatch and experts over `ep`, whose shapes are other ones in
every microbatch.
"""

from collections.abc import Iterator

import torch
from torch import nn

from meshwright.plan.sharding_plan import ShardingPlan

__all__ = ["compile_layers"]


def compile_layers(model: nn.Module, plan: ShardingPlan) -> None:
    """Compile what the plan says: the forward of a module is replaced on its instance."""
    experts = {model.get_submodule(row.module) for row in plan.experts}
    as_it_is = {model.get_submodule(row.router) for row in plan.experts if row.router}
    if plan.layout.ep > 1:
        as_it_is |= experts
    for row in plan.experts:
        if not row.router:  # any of what is beside the experts may be what chooses them
            as_it_is |= set(model.get_submodule(row.module.rpartition(".")[0]).children()) - experts
    for unit in plan.units:
        if unit.compile:
            for part in _parts(model.get_submodule(unit.name), experts):
                if part not in as_it_is:
                    part.forward = torch.compile(part.forward, backend=plan.options.compile_backend)


def _parts(module: nn.Module, experts: set[nn.Module]) -> Iterator[nn.Module]:
    """The largest modules that have no experts in them, and experts."""
    if module in experts or experts.isdisjoint(module.modules()):
        yield module
        return
    for child in module.children():
        if any(True for _ in child.parameters()):
            yield from _parts(child, experts)

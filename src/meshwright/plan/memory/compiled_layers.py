"""Which modules are compiled: layers, each by one ``torch.compile``, which is meant to give one graph (breaks are allowed).

A layer with experts cannot be one graph: its experts are an FSDP unit inside it, and FSDP's hooks cannot be in a graph. So the
parts of such a layer are compiled, each by itself: attention, norms, a dense MLP, and the experts. The module
that chooses experts is not compiled, so that activation checkpointing can keep its choice. Over `ep`, dispatch and experts are
not compiled either, because their shapes change in every microbatch.
"""

from collections.abc import Collection, Iterator

from meshwright.plan.draft import Draft
from meshwright.plan.given.closed_choices import ActivationCheckpointing
from meshwright.plan.given.inspection import Inspection
from meshwright.plan.given.names import holder_of, within
from meshwright.plan.memory.recompute import parts_of_layer
from meshwright.plan.result.program import Compile
from meshwright.plan.result.sharding_plan import ShardingPlan

__all__ = ["compile_actions"]


def compile_actions(draft: Draft, plan: ShardingPlan, *, inside: bool) -> Iterator[Compile]:
    """Yield the modules that are compiled, each by itself.

    Args:
        draft: a draft that has the facts of the model.
        plan: a plan that has its rows.
        inside: ``True``: the modules that are compiled before a checkpoint is put around them. These are the recomputed layers
            under tensor parallel, because torch 2.13 cannot compile a checkpoint around slices, and would run the layer
            uncompiled without a message. ``False``: all others; the recomputed ones are compiled with their checkpoint.
    """
    experts = {row.module for row in plan.experts}
    as_it_is = {row.router for row in plan.experts if row.router}
    if plan.layout.ep > 1:
        as_it_is |= experts
    for row in plan.experts:
        if not row.router:  # any module next to the experts may be their router
            as_it_is |= {*draft.model.children(holder_of(row.module))} - experts
    for unit in plan.units:
        mode = unit.activation_checkpointing
        if not unit.compile or inside != (bool(plan.tensor_parallel) and mode is not ActivationCheckpointing.NONE):
            continue
        alone = inside and mode is ActivationCheckpointing.SUBMODULE
        for layer_part in parts_of_layer(draft.model, unit.name) if alone else (unit.name,):
            for part in _parts(draft.model, layer_part, experts):
                if part not in as_it_is:
                    yield Compile(part, plan.options.compile_backend)


def _parts(model: Inspection, module: str, experts: Collection[str]) -> Iterator[str]:
    """Yield the largest modules that have no experts inside, and the experts."""
    if module in experts or not any(within(mixture, [module]) for mixture in experts):
        yield module
        return
    for child in model.children(module):
        if model.holds_parameters(child):
            yield from _parts(model, child, experts)

"""resolve(): spec x model x layout x options -> ShardingPlan.

Passes find the fields of a draft, one after another. Then the program is written, in the one order in which a model is
parallelized.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from meshwright.errors import LayoutError, Refusal
from meshwright.layout import Layout
from meshwright.once import once_for_each
from meshwright.plan.axes.context.mixers import mixer_actions, resolve_mixers
from meshwright.plan.axes.context.sharing import attention_actions, resolve_attentions
from meshwright.plan.axes.data.parameters import (
    arrange_parameters,
    assign_units,
    choose_trained,
    freeze_actions,
    leave_out_units,
    pack_actions,
    parameter_rows,
)
from meshwright.plan.axes.data.prefetch import check_prefetch, prefetch_actions
from meshwright.plan.axes.data.twin_stacks import choose_twins, pair_units
from meshwright.plan.axes.data.unit_choice import choose_policies, choose_units
from meshwright.plan.axes.data.units import complete_units, unit_actions
from meshwright.plan.axes.experts import expert_parallel_actions, resolve_experts
from meshwright.plan.axes.pipeline.stage_plan import resolve_stages
from meshwright.plan.axes.tensor.choose import resolve_tensor_parallel, tensor_parallel_actions
from meshwright.plan.draft import Draft, Found
from meshwright.plan.given.inspection import Inspection, inspect_model
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.given.spec import ParallelSpec
from meshwright.plan.memory.compiled_layers import compile_actions
from meshwright.plan.memory.loss_chunks import loss_actions, resolve_loss
from meshwright.plan.memory.recompute import checkpointing_modes, recompute_actions
from meshwright.plan.remembered_passes import Pass, RememberedPasses
from meshwright.plan.result.border_places import tokens_of_units
from meshwright.plan.result.rows import UnitRow
from meshwright.plan.result.sharding_plan import LAYER, ShardingPlan
from meshwright.plan.update.rates import choose_rates
from meshwright.plan.update.rules import choose_forms, choose_rules
from meshwright.plan.update.weight_decay import choose_decayed

__all__ = ["resolve"]


def _enter_tokens(draft: Draft) -> Found[dict[str, UnitRow]]:
    """Find which tokens enter each unit: of its rows, a plan needs those of modules for it."""
    units, modules = tuple(draft.units.values()), (draft.tensor.rows, draft.experts)
    plan = ShardingPlan(draft.spec.family, draft.layout, draft.options, draft.layers, (), units, *modules)
    return Found({unit.name: unit for unit in tokens_of_units(plan)})


_PASSES: tuple[tuple[tuple[str, Pass], ...], ...] = (
    (
        ("units", choose_units),
        ("twins", pair_units),
        ("units", leave_out_units),
        ("unit_of", assign_units),
        ("trained", choose_trained),
        ("decay_rules", choose_decayed),
        ("rates", choose_rates),
        ("policies", choose_policies),
        ("", check_prefetch),
        ("modes", checkpointing_modes),
        ("tensor", resolve_tensor_parallel),
        ("experts", resolve_experts),
        ("attentions", resolve_attentions),
        ("mixers", resolve_mixers),
        ("stages", resolve_stages),
        ("rules", choose_rules),
        ("forms", choose_forms),
        ("loss", resolve_loss),
    ),
    (("units", _enter_tokens), ("arranged", arrange_parameters), ("rows", parameter_rows), ("units", choose_twins)),
    (("units", complete_units),),
)
"""Groups of passes, each with the field of the draft that it finds. All problems of a group are in one report."""


def resolve(
    spec: ParallelSpec,
    model: nn.Module | Inspection,
    layout: Layout,
    options: ParallelOptions | None = None,
    *,
    world_size: int | None = None,
    remembered: RememberedPasses | None = None,
    program: bool = True,
) -> ShardingPlan:
    """Resolve a spec against a model, a layout and options.

    Args:
        spec: what the family declares.
        model: the model, or its facts (:func:`~meshwright.plan.given.inspection.inspect_model`). A model on the meta device
            needs no memory; only names, shapes, dtypes, ties, ``requires_grad``, code and configs are read.
        layout: sizes; unresolved ones are inferred from ``world_size``.
        options: the choices; ``None``: the defaults.
        world_size: number of ranks; required if the layout is not resolved.
        remembered: what passes found in other plans of this model with this spec; it gets what they find here.
        program: whether the program is written. A plan without one can be priced, and not carried out.

    Raises:
        LayoutError: sizes that do not fit the world size or the model.
        PlanError: patterns without a match, modules or parameters that two rules claim, parameters that cannot be sharded. All
            of them are in one report.
    """
    facts = model if isinstance(model, Inspection) else inspect_model(spec, model)
    if world_size is None:
        try:
            world_size = layout.world_size
        except LayoutError as error:
            raise LayoutError([*error.problems, Refusal("layout.world_size", "or pass world_size")]) from None
    draft = Draft(spec, facts, layout.resolve(world_size, facts.sizes), options or ParallelOptions())
    for group in _PASSES:
        for name, find in group:
            draft = draft.extended(name, find(draft) if remembered is None else remembered.find(find, draft))
        draft.refuse()
    units, layers = _in_order(draft.units)
    plan = ShardingPlan(
        spec.family,
        draft.layout,
        draft.options,
        layers,
        draft.rows,
        units,
        draft.tensor.rows,
        draft.experts,
        draft.attentions,
        draft.stages.rows,
        draft.loss,
        tp_level=draft.tensor.level,
        tp_passed_over=draft.tensor.passed_over,
        remarks=(*spec.remarks, *draft.remarks),
        mixers=draft.mixers,
        flags_of_use=(not spec.uses_all_parameters or bool(draft.options.sharded_by)) and draft.layout.size("dp_cp") > 1,
    )
    cut = () if draft.stages.cut is None else (draft.stages.cut,)
    if not program:
        return replace(plan, program=cut)
    actions = (
        *cut,
        *mixer_actions(plan),  # inside of what tensor parallel puts around a mixer
        *tensor_parallel_actions(draft, plan),
        *expert_parallel_actions(draft, plan),
        *attention_actions(draft, plan),
        *compile_actions(draft, plan, inside=True),
        *loss_actions(plan),
        *recompute_actions(draft, plan),
        *freeze_actions(plan),
        *pack_actions(plan),
        *unit_actions(plan),
        *prefetch_actions(plan),
        *compile_actions(draft, plan, inside=False),
    )
    return replace(plan, program=actions)


@once_for_each
def _in_order(units: Mapping[str, UnitRow]) -> tuple[tuple[UnitRow, ...], tuple[str, ...]]:
    """Return the rows of units, and the names of layers: those of plans that share their units are the same objects."""
    return tuple(units.values()), tuple(unit.name for unit in units.values() if unit.kind == LAYER)

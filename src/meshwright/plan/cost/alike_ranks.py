"""Ranks of a pipeline that hold the same: what is added up for one of them need not be added up for the others."""

from collections.abc import Hashable
from dataclasses import fields
from operator import attrgetter

from meshwright.plan.axes.pipeline.stage_plan import first_trained, stages_of_rank
from meshwright.plan.given.names import nearest
from meshwright.plan.result.rows import ParameterRow, UnitRow
from meshwright.plan.result.sharding_plan import ROOT, ShardingPlan

__all__ = ["alike_rank"]

_OF_PARAMETER = attrgetter(*(item.name for item in fields(ParameterRow) if item.name not in ("name", "unit", "stage")))
_OF_UNIT = attrgetter(*(item.name for item in fields(UnitRow) if item.name not in ("name", "parameters")))
"""What rows say beside names."""


def alike_rank(plan: ShardingPlan, rank: int) -> int:
    """Return the first rank of `pp` whose stages have the same rows as those of a rank, under other names.

    Stages at the ends of the model, and those with something outside of their layers, are like no other.
    """
    return plan.once(_alike_ranks)[rank] if plan.stages else rank


def _alike_ranks(plan: ShardingPlan) -> list[int]:
    contents = _contents_of_stages(plan)
    first: dict[tuple[Hashable, ...], int] = {}
    ranks = range(plan.layout.size("pp"))
    return [first.setdefault(tuple(contents[stage] for stage in stages_of_rank(plan, rank)), rank) for rank in ranks]


def _contents_of_stages(plan: ShardingPlan) -> list[Hashable]:
    """Return for each stage what rows say of its layers, in order; or its number, if it is like no other."""
    of_layers: dict[str, list[Hashable]] = {layer: [] for layer in plan.layers}
    alone = {*range(first_trained(plan) + 1), len(plan.stages) - 1}
    for row in plan.parameters:
        layer = nearest(row.name, of_layers)
        if not layer or row.aliases or row.copies:
            alone.update(row.stages)
        else:
            of_layers[layer].append((row.name.removeprefix(layer), row.unit.removeprefix(layer), _OF_PARAMETER(row)))
    for unit in plan.units:
        layer = unit.name if unit.name in of_layers else nearest(unit.name, of_layers)
        if unit.twin_of or unit.part_of or not (layer or unit.name == ROOT):
            return list(range(len(plan.stages)))
        if layer:
            of_layers[layer].append((unit.name.removeprefix(layer), _OF_UNIT(unit)))
    return [
        stage if stage in alone else tuple(tuple(of_layers[layer]) for layer in row.layers)
        for stage, row in enumerate(plan.stages)
    ]

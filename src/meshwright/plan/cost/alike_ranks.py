"""Ranks of a pipeline that hold the same: what is added up for one of them need not be added up for the others."""

from collections.abc import Hashable

from meshwright.plan.axes.pipeline.stage_plan import first_trained, stages_of_rank
from meshwright.plan.result.alike_layers import alike_layers
from meshwright.plan.result.plan_rows import PlanRows
from meshwright.plan.result.sharding_plan import ROOT, ShardingPlan

__all__ = ["alike_rank"]


def alike_rank(plan: ShardingPlan, rank: int) -> int:
    """Return the first rank of `pp` whose stages have the same rows as those of a rank, under other names.

    Stages at the ends of the model, and those with something outside of their layers, are like no other.
    """
    return plan.shared.once(_alike_ranks)[rank] if plan.stages else rank


def _alike_ranks(rows: PlanRows) -> list[int]:
    contents = _contents_of_stages(rows)
    first: dict[tuple[Hashable, ...], int] = {}
    ranks = range(1 + max(stage.rank for stage in rows.stages))
    return [first.setdefault(tuple(contents[stage] for stage in stages_of_rank(rows, rank)), rank) for rank in ranks]


def _contents_of_stages(rows: PlanRows) -> list[Hashable]:
    """Return for each stage the kinds of its layers, in order; or its number, if it is like no other."""
    alike = alike_layers(rows)
    if any(unit.name != ROOT for unit in alike.units_outside) or any(unit.twin_of or unit.part_of for unit in rows.units):
        return list(range(len(rows.stages)))
    alone = {*range(first_trained(rows) + 1), len(rows.stages) - 1}
    tied = [rows.parameters[place] for place in rows.arrangement.tied]
    alone.update(stage for row in (*alike.parameters_outside, *tied) for stage in row.stages)
    kinds = dict(zip(rows.layers, alike.kinds, strict=True))
    return [stage if stage in alone else tuple(kinds[layer] for layer in row.layers) for stage, row in enumerate(rows.stages)]

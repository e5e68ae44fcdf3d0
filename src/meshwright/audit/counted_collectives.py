"""What is wrong with the numbers of collectives of a step."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

from meshwright.audit.causes.findings import Finding, Kind
from meshwright.audit.result import RankResult
from meshwright.layout import Layout
from meshwright.plan.axes.context.sharing import context_counts
from meshwright.plan.axes.experts import expert_parallel_counts
from meshwright.plan.axes.pipeline.stage_plan import pipeline_counts, stages_of_rank
from meshwright.plan.axes.pipeline.stage_rows import on_stages
from meshwright.plan.axes.tensor.traffic import tensor_parallel_counts
from meshwright.plan.cost.activation_traffic import objective_bytes, objective_counts
from meshwright.plan.cost.price import totals_of_rank
from meshwright.plan.result.sharding_plan import ShardingPlan

__all__ = ["by_axis", "wrong_counts"]


def wrong_counts(plan: ShardingPlan, ranks: Sequence[RankResult]) -> Iterator[Finding]:
    """Yield a finding for each axis on which a rank made other collectives in a step than the plan says."""
    kinds = ("all_gather", "reduce_scatter", "all_reduce")

    @cache
    def due_on(stage_rank: int) -> tuple[dict[str, Counter[str]], Counter[str]]:
        traffic, own = totals_of_rank(plan, stage_rank).traffic, on_stages(plan, stages_of_rank(plan, stage_rank))
        due = {"dp": Counter({kind: getattr(traffic, f"{kind}s") for kind in kinds})}
        due["dp"].update(objective_counts(own))
        due |= {"tp": tensor_parallel_counts(own), "cp": context_counts(own), "pp": pipeline_counts(plan, stage_rank)}
        for axis, more in expert_parallel_counts(own).items():
            due.setdefault(axis, Counter()).update(more)
        sizes = Counter({kind: getattr(traffic, f"{kind}_bytes") for kind in kinds})
        sizes.update({kind: size for kind, size in objective_bytes(own).items() if size is not None and objective_counts(own)})
        return due, sizes

    # The planned counts of tensor, context and expert parallel assume that nothing is recomputed, and that gradients flow
    # everywhere.
    frozen = any(not row.trainable and plan.unit(row.unit).forwards for row in plan.parameters)
    known = not objective_counts(plan) or None not in objective_bytes(plan).values()
    exact = not frozen and not any(unit.activation_checkpointing for unit in plan.units)
    for step, result in [(step, rank_result) for rank_result in ranks for step in range(len(rank_result.counts))]:
        wrong = []
        due, sizes = due_on(plan.layout.coordinates(result.rank)["pp"])
        counts, sizes_made = result.counts[step], result.bytes[step]
        narrower = plan.layout.coordinates(result.rank)["tp"] > 0  # the plan describes the rank with the widest slices
        for axes in _together([*due, *axis_names(plan.layout, result.rank).values(), *counts]):
            names = [name for name in counts if set(name.split("+")) <= axes]
            counted, counted_bytes = _added(counts, names), _added(sizes_made, names)
            planned = _added(due, axes)
            for kind in dict.fromkeys([*planned, *counted]):
                if not exact and (axes & {"tp", "cp"} or ("ep" in axes and kind not in kinds)):
                    continue
                count, size = counted[kind], counted_bytes[kind]
                # Other bytes depend on the batch.
                comparable = kind in kinds and "dp" in axes and not axes & {"pp", "tp", "cp"} and known
                if count != planned[kind] or (comparable and not (size == sizes[kind] or (narrower and size < sizes[kind]))):
                    collectives = f"{count} {kind} of {size:,} bytes over {'+'.join(sorted(axes))}"
                    wrong.append(
                        f"{collectives} where the plan has {planned[kind]}" + (f" of {sizes[kind]:,}" if comparable else "")
                    )
        if wrong:
            yield Finding(Kind.COLLECTIVES, f"rank {result.rank} in step {step + 1} made {'; '.join(wrong)}", kinds)
            return


def _added(counts: Mapping[str, Counter[str]], names: Iterable[str]) -> Counter[str]:
    total: Counter[str] = Counter()
    for name in names:
        total.update(counts.get(name, {}))
    return total


def _together(names: Iterable[str]) -> list[set[str]]:
    """Return the axes in groups. Axes with the same ranks somewhere are in one group: their collectives look alike there."""
    groups: list[set[str]] = []
    for name in names:
        axes = set(name.split("+"))
        touching = [other for other in groups if other & axes]
        groups = [other for other in groups if not other & axes] + [axes.union(*touching)]
    return groups


def axis_names(layout: Layout, rank: int) -> dict[tuple[int, ...], str]:
    """Return, for each group of ranks that ``rank`` is in (a tuple of ranks), the name of its axes."""
    names_of: dict[tuple[int, ...], list[str]] = {}
    data = ("dp_replicate", "dp_shard", "dp_shard_cp", "dp_cp", "ep_shard")
    axes = {**dict.fromkeys(data, "dp"), "ep": "ep", "cp": "cp", "tp": "tp", "pp": "pp"}
    for axis, name in axes.items():
        ranks = tuple(layout.group(axis, rank))
        if len(ranks) > 1 and name not in names_of.setdefault(ranks, []):
            names_of[ranks].append(name)
    return {ranks: "+".join(names) for ranks, names in names_of.items()}


def by_axis(layout: Layout, rank: int, group_counts: Mapping[tuple[int, ...], Counter[str]]) -> dict[str, Counter[str]]:
    """Return counts by mesh axis, of counts by the ranks of a group."""
    names = axis_names(layout, rank)
    axis_counts: dict[str, Counter[str]] = {}
    for ranks, counts in group_counts.items():
        axis_counts.setdefault(names.get(ranks, str(ranks)), Counter()).update(counts)
    return axis_counts

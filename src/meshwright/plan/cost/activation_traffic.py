"""What the activations of a plan cost to communicate: collectives and bytes over `pp`, `tp`, `cp` and `ep`, in closed form."""

from collections import Counter
from collections.abc import Mapping

from meshwright.plan.axes.context.sharing import context_bytes, context_counts
from meshwright.plan.axes.data.unit_traffic import unit_traffic
from meshwright.plan.axes.experts import expert_parallel_bytes, expert_parallel_counts
from meshwright.plan.axes.pipeline.stage_plan import pipeline_messages, stages_of_rank
from meshwright.plan.axes.pipeline.stage_rows import rows_on_stages
from meshwright.plan.axes.tensor.traffic import tensor_parallel_bytes, tensor_parallel_counts
from meshwright.plan.cost.price import fullest_rank
from meshwright.plan.given.closed_choices import ActivationCheckpointing
from meshwright.plan.given.options import NF4
from meshwright.plan.result.axis_traffic import AxisTraffic
from meshwright.plan.result.sharding_plan import ShardingPlan, itemsize

__all__ = ["activation_traffic", "kinds_of_collectives", "objective_bytes", "objective_counts", "repeated_share"]

REPEATED = {"ep": 0.5, "cp": 0.5}
"""Share of a layer's collectives that recomputation repeats: those of its forward."""

SLICED = {
    ActivationCheckpointing.FULL: (3 / 8, 1 / 4),
    ActivationCheckpointing.SELECTIVE: (3 / 8, 1 / 4),
    ActivationCheckpointing.SUBMODULE: (1 / 4, 0.0),
}
"""The same over ``tp``, with `sequence_parallel` and without. torch stops to recompute when all is there that backward needs
(``_StopRecomputationError`` in torch/utils/checkpoint.py), so the last collective of what is recomputed is not repeated."""


def repeated_share(plan: ShardingPlan, axis: str) -> float:
    """Return the share of the collectives of activations over an axis that recomputation repeats, over all layers."""
    modes = [unit.activation_checkpointing for unit in plan.units if unit.kind == "layer"]
    again = [mode for mode in modes if mode in SLICED]
    if axis == "tp":
        return sum(SLICED[mode][0 if plan.options.sequence_parallel else 1] for mode in again) / max(1, len(modes))
    return REPEATED.get(axis, 0.0) * len(again) / max(1, len(modes))


def activation_traffic(plan: ShardingPlan) -> list[AxisTraffic]:
    """Return the collectives of activations, and of gradients that are summed over ``tp``; empty if none of the axes is used.

    With stages, they are those of the rank of ``pp`` that stores the most.

    The numbers assume that everything is trained, nothing is recomputed, and every module computes in ``param_dtype``.
    """
    rank = fullest_rank(plan)
    sent, bytes_sent = pipeline_messages(plan, rank)
    messages = [AxisTraffic("pp", "send", sent, bytes_sent)] if sent else []
    plan = rows_on_stages(plan, stages_of_rank(plan, rank))
    calls: dict[str, Counter[str]] = {}
    if plan.tensor_parallel:
        calls["tp"] = tensor_parallel_counts(plan)
    for axis, of in expert_parallel_counts(plan).items():
        calls.setdefault(axis, Counter()).update(of)
    if plan.layout.size("cp") > 1:
        calls["cp"] = context_counts(plan)
    if gathered := objective_counts(plan):
        calls["dp"] = gathered
    sizes: dict[str, Mapping[str, int | None]] = {"dp": objective_bytes(plan)}
    if plan.options.tokens is not None:
        sizes.update(_sizes(plan, plan.options.tokens))
    return messages + [
        AxisTraffic(axis, kind, count, sizes[axis].get(kind, 0) if axis in sizes else None)
        for axis, of in calls.items()
        for kind, count in sorted(of.items())
    ]


def kinds_of_collectives(plan: ShardingPlan) -> set[str]:
    """Return the kinds of collectives that a step makes on any axis; all-reduces are in all."""
    units = [unit_traffic(plan, unit) for unit in plan.fsdp_units]
    sharded = {"all_gather", "reduce_scatter"} if any(unit.all_gathers or unit.reduce_scatters for unit in units) else set()
    return {"all_reduce", *sharded, *(item.kind for item in activation_traffic(plan) if item.calls)}


def objective_counts(plan: ShardingPlan) -> Counter[str]:
    """Return the collectives of an objective over data ranks in an optimizer step."""
    options = plan.options
    if not options.objective_gathers or plan.layout.size("dp") == 1:
        return Counter()
    calls = {"all_gather": options.objective_gathers, "all_reduce": options.objective_reductions}
    return Counter({kind: options.microbatches * count for kind, count in calls.items() if count})


def objective_bytes(plan: ShardingPlan) -> dict[str, int | None]:
    """Return the bytes of these collectives, those of the larger buffer of each; ``None``: the plan does not know them."""
    options = plan.options
    sizes = {"all_gather": options.objective_gathered, "all_reduce": options.objective_reduced}
    ranks = plan.layout.size("dp")
    return {kind: None if size is None else options.microbatches * ranks * size for kind, size in sizes.items()}


def _sizes(plan: ShardingPlan, tokens: int) -> dict[str, Counter[str]]:
    options = plan.options
    compute = itemsize(options.param_dtype or next((row.dtype for row in plan.parameters if row.dtype != NF4), "float32"))
    sizes = {"tp": tensor_parallel_bytes(plan, tokens, compute)}
    for axis, of in expert_parallel_bytes(plan, tokens, compute).items():
        sizes.setdefault(axis, Counter()).update(of)
    scaled = {axis: Counter({kind: options.microbatches * size for kind, size in of.items()}) for axis, of in sizes.items()}
    return {**scaled, "cp": context_bytes(plan, tokens)}

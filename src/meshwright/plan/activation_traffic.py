"""What the activations of a plan cost to communicate: collectives and bytes over `pp`, `tp`, `cp` and `ep`, in closed form."""

from collections import Counter
from dataclasses import dataclass

from meshwright.plan.context_parallel import context_bytes, context_counts
from meshwright.plan.expert_parallel import expert_parallel_counts
from meshwright.plan.moves import Move
from meshwright.plan.options import NF4
from meshwright.plan.pipeline import on_stages, pipeline_messages, stages_of_rank
from meshwright.plan.price import LOSS_PARALLEL, MOVED, fullest_rank, tensor_parallel_counts
from meshwright.plan.sharding_plan import ShardingPlan, itemsize

__all__ = ["AxisTraffic", "activation_traffic"]


@dataclass(frozen=True)
class AxisTraffic:
    """The collectives of one kind over one axis in one optimizer step, on one rank.

    Attributes:
        axis: ``pp``, ``tp``, ``cp`` or ``ep``.
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all`` or ``send``.
        calls: number of calls.
        size: bytes of the larger buffer of each call, added up; ``None`` if the plan does not know the batch. If tokens are
            routed, the load is assumed to be balanced.
    """

    axis: str
    kind: str
    calls: int
    size: int | None


def activation_traffic(plan: ShardingPlan) -> list[AxisTraffic]:
    """Return the collectives of activations, and of gradients that are summed over ``tp``; empty if none of the axes is used.

    With stages, they are those of the rank of ``pp`` that stores the most.

    The numbers assume that everything is trained, nothing is recomputed, and every module computes in ``param_dtype``.
    """
    rank = fullest_rank(plan)
    sent, bytes_sent = pipeline_messages(plan, rank)
    messages = [AxisTraffic("pp", "send", sent, bytes_sent)] if sent else []
    plan = on_stages(plan, stages_of_rank(plan, rank))
    calls: dict[str, Counter[str]] = {}
    if plan.tensor_parallel:
        calls["tp"] = tensor_parallel_counts(plan)
    for axis, of in expert_parallel_counts(plan).items():
        calls.setdefault(axis, Counter()).update(of)
    if plan.layout.size("cp") > 1:
        calls["cp"] = context_counts(plan)
    sizes = None if plan.options.tokens is None else _sizes(plan, plan.options.tokens)
    return messages + [
        AxisTraffic(axis, kind, count, None if sizes is None else sizes.get(axis, Counter())[kind])
        for axis, of in calls.items()
        for kind, count in sorted(of.items())
    ]


def _sizes(plan: ShardingPlan, tokens: int) -> dict[str, Counter[str]]:
    options = plan.options
    compute = itemsize(options.param_dtype or next((row.dtype for row in plan.parameters if row.dtype != NF4), "float32"))
    tp = plan.layout.size("tp")
    sizes: dict[str, Counter[str]] = {"tp": Counter(), "ep": Counter()}
    rows = {name: row for row in plan.parameters for name in (row.name, *row.aliases)}
    for row in plan.tensor_parallel:
        enters, leaves = row.features
        runs = plan.runs(row.module)
        chunks = plan.loss.chunks if plan.loss is not None and plan.loss.module == row.module else 1
        weights = options.experts_of_token or 0 if row.style == "moe_tp_experts" else 0
        for move, width in ((row.entry, enters + weights), (row.exit, leaves)):
            if move in (Move.GATHER_FEATURES, Move.SPLIT_FEATURES):
                width = -(-width // tp) * tp  # slices of equal size are gathered
            share = tp if move is Move.EXCHANGE_FEATURES else 1
            for kind, times in zip(MOVED.get(move, (None, None)), runs, strict=True):
                if kind is not None:
                    sizes["tp"][kind] += times * tokens * width * compute // share
        for name in row.sums:
            summed = rows.get(f"{row.module}.{name}")
            sizes["tp"]["all_reduce"] += chunks * summed.numel * compute if summed is not None else 0
            if summed is not None and row.style == "dora_columns":
                sizes["tp"]["all_reduce"] += runs[0] * summed.numel * max(compute, itemsize("float32"))
        if row.exit is Move.VOCABULARY:
            sizes["tp"]["all_reduce"] += (LOSS_PARALLEL + 1) * tokens * itemsize("float32")
    for mixture in plan.experts if plan.layout.ep > 1 else ():
        forwards, backwards = plan.runs(mixture.module)
        share = plan.layout.size(mixture.token_axis) if mixture.token_axis else 1
        routed = tokens * (options.experts_of_token or 1) // share
        sizes["ep"]["all_to_all"] += 2 * (forwards + backwards) * routed * mixture.features * compute
        if mixture.token_axis:
            gathered = (
                tokens * (mixture.features * (forwards + backwards) + backwards * (options.experts_of_token or 1)) * compute
            )
            sizes.setdefault(mixture.token_axis, Counter())["all_gather"] += gathered
    scaled = {axis: Counter({kind: options.microbatches * size for kind, size in of.items()}) for axis, of in sizes.items()}
    return {**scaled, "cp": context_bytes(plan, tokens)}

"""What tensor parallel costs to communicate: the collectives of each move, their number and their bytes."""

from collections import Counter

from meshwright.plan.axes.tensor.move_kinds import Move
from meshwright.plan.axes.tensor.styles import NORM
from meshwright.plan.result.sharding_plan import ShardingPlan, itemsize

__all__ = ["MOVED", "tensor_parallel_bytes", "tensor_parallel_counts"]

MOVED = {
    Move.ENTER: (None, "all_reduce"),
    Move.ENTER_LAST: (None, "all_reduce"),
    Move.LEAVE: ("all_reduce", None),
    Move.SUM: ("all_reduce", "all_reduce"),
    Move.GATHER_FEATURES: ("all_gather", None),
    Move.SPLIT_FEATURES: (None, "all_gather"),
    Move.EXCHANGE_FEATURES: ("all_to_all", "all_to_all"),
    Move.GATHER_SEQUENCE: ("all_gather", "reduce_scatter"),
    Move.GATHER_TOKENS: ("all_gather", "reduce_scatter"),
    Move.GATHER_SEQUENCE_WHOLE: ("all_gather", None),
    Move.SPLIT_SEQUENCE: (None, "all_gather"),
    Move.SCATTER_SEQUENCE: ("reduce_scatter", "all_gather"),
}
"""The collective of each move in forward, and in backward."""

LOSS_PARALLEL = 2
"""Number of all-reduces of a cross-entropy over a sharded vocabulary: one for the largest logit, then one for sums."""


def tensor_parallel_counts(plan: ShardingPlan) -> Counter[str]:
    """Return the collectives over ``tp`` of one optimizer step on one rank, by kind. Their bytes depend on the batch.

    The counts assume that everything is trained and nothing is recomputed. A module that no gradient flows through has fewer
    collectives, recomputation has more.
    """
    counts: Counter[str] = Counter()
    for row in plan.tensor_parallel:
        chunks = plan.loss.chunks if plan.loss is not None and plan.loss.module == row.module else 1
        forwards, backwards = (runs * chunks for runs in plan.runs(row.module))
        # Two tensors enter experts: the hidden state and the weights of the routing.
        for move, times in ((row.entry, 2 if row.style == "moe_tp_experts" else 1), (row.exit, 1)):
            forward, backward = MOVED.get(move, (None, None))
            counts[forward or ""] += times * forwards
            counts[backward or ""] += times * backwards
        counts["all_gather"] += forwards if row.entry is Move.GATHER_TOKENS else 0  # the numbers of the chosen experts
        counts["all_reduce"] += forwards if row.style == "dora_columns" else 0  # the norms of rows
        counts["all_reduce"] += (forwards + backwards) * sum(row.parts) if row.style == NORM else 0  # its means
        counts["all_reduce"] += chunks * (len(row.sums) + (LOSS_PARALLEL if row.exit is Move.VOCABULARY else 0))
    return Counter({kind: count * plan.options.microbatches for kind, count in counts.items() if kind and count})


def tensor_parallel_bytes(plan: ShardingPlan, tokens: int, compute: int) -> Counter[str]:
    """Return the bytes of these collectives in one microbatch, of the larger buffer of each call.

    Args:
        plan: the plan.
        tokens: tokens of a microbatch on a rank.
        compute: bytes of a number in the dtype of compute.
    """
    options, tp = plan.options, plan.layout.size("tp")
    sizes: Counter[str] = Counter()
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
                    sizes[kind] += times * tokens * width * compute // share
        if row.entry is Move.GATHER_TOKENS:
            sizes["all_gather"] += runs[0] * tokens * weights * itemsize("int64")
        for name in row.sums:
            summed = rows.get(f"{row.module}.{name}")
            sizes["all_reduce"] += chunks * summed.numel * compute if summed is not None else 0
            if summed is not None and row.style == "dora_columns":
                sizes["all_reduce"] += runs[0] * summed.numel * max(compute, itemsize("float32"))
        if row.style == NORM:  # a number of each token; norms compute in float32
            sizes["all_reduce"] += sum(runs) * sum(row.parts) * tokens * max(compute, itemsize("float32"))
        if row.exit is Move.VOCABULARY:
            sizes["all_reduce"] += (LOSS_PARALLEL + 1) * tokens * itemsize("float32")
    return sizes

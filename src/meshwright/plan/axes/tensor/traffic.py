"""What tensor parallel costs to communicate: the collectives of each move, their number and their bytes."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import NamedTuple

from meshwright.once import once_for_each
from meshwright.plan.axes.tensor.move_kinds import Move
from meshwright.plan.axes.tensor.styles import NORM
from meshwright.plan.result.arrangement import Arrangement
from meshwright.plan.result.plan_rows import PlanRows
from meshwright.plan.result.rows import LossRow
from meshwright.plan.result.sharding_plan import ShardingPlan, TensorParallelRow, itemsize

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

_BESIDE_NAME = attrgetter(*(item.name for item in fields(TensorParallelRow) if item.name != "module"))

LOSS_PARALLEL = 2
"""Number of all-reduces of a cross-entropy over a sharded vocabulary: one for the largest logit, then one for sums."""


def tensor_parallel_counts(plan: ShardingPlan) -> Counter[str]:
    """Return the collectives over ``tp`` of one optimizer step on one rank, by kind. Their bytes depend on the batch.

    The counts assume that everything is trained and nothing is recomputed. A module that no gradient flows through has fewer
    collectives, recomputation has more.
    """
    counts: Counter[str] = Counter()
    for row, _, (forwards, backwards), chunks, rows in plan.shared.once(_alike, plan.loss):
        of_row: Counter[str] = Counter()
        # Two tensors enter experts: the hidden state and the weights of the routing.
        for move, times in ((row.entry, 2 if row.style == "moe_tp_experts" else 1), (row.exit, 1)):
            forward, backward = MOVED.get(move, (None, None))
            of_row[forward or ""] += times * chunks * forwards
            of_row[backward or ""] += times * chunks * backwards
        of_row["all_gather"] += chunks * forwards if row.entry is Move.GATHER_TOKENS else 0  # the numbers of the chosen experts
        of_row["all_reduce"] += chunks * forwards if row.style == "dora_columns" else 0  # the norms of rows
        of_row["all_reduce"] += chunks * (forwards + backwards) * sum(row.parts) if row.style == NORM else 0  # its means
        of_row["all_reduce"] += chunks * (len(row.sums) + (LOSS_PARALLEL if row.exit is Move.VOCABULARY else 0))
        counts.update({kind: rows * count for kind, count in of_row.items()})
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
    for row, summed, runs, chunks, rows in plan.shared.once(_alike, plan.loss):
        of_row: Counter[str] = Counter()
        enters, leaves = row.features
        weights = options.experts_of_token or 0 if row.style == "moe_tp_experts" else 0
        for move, width in ((row.entry, enters + weights), (row.exit, leaves)):
            if move in (Move.GATHER_FEATURES, Move.SPLIT_FEATURES):
                width = -(-width // tp) * tp  # slices of equal size are gathered
            share = tp if move is Move.EXCHANGE_FEATURES else 1
            for kind, times in zip(MOVED.get(move, (None, None)), runs, strict=True):
                if kind is not None:
                    of_row[kind] += times * tokens * width * compute // share
        if row.entry is Move.GATHER_TOKENS:
            of_row["all_gather"] += runs[0] * tokens * weights * itemsize("int64")
        of_row["all_reduce"] += chunks * sum(summed) * compute
        if row.style == "dora_columns":
            of_row["all_reduce"] += runs[0] * sum(summed) * max(compute, itemsize("float32"))
        if row.style == NORM:  # a number of each token; norms compute in float32
            of_row["all_reduce"] += sum(runs) * sum(row.parts) * tokens * max(compute, itemsize("float32"))
        if row.exit is Move.VOCABULARY:
            of_row["all_reduce"] += (LOSS_PARALLEL + 1) * tokens * itemsize("float32")
        sizes.update({kind: rows * size for kind, size in of_row.items()})
    return sizes


class _Alike(NamedTuple):
    """Modules of which rows say the same beside names.

    Attributes:
        row: the row of the first one.
        summed: the elements of each parameter whose gradients it sums.
        runs: forwards and backwards in a microbatch.
        chunks: chunks of the loss.
        rows: number of the modules.
    """

    row: TensorParallelRow
    summed: tuple[int, ...]
    runs: tuple[int, int]
    chunks: int
    rows: int


def _alike(rows: PlanRows, loss: LossRow | None) -> list[_Alike]:
    """Return the modules that compute with slices or have a move, each kind once."""
    kinds = _by_kind(rows.tensor_parallel)
    of_units = {(unit.forwards * unit.places, unit.places) for unit in rows.units}
    same = next(iter(of_units)) if len(of_units) == 1 else None
    alike: list[_Alike] = []
    for (row, modules), summed in zip(kinds, _summed(rows.arrangement, kinds), strict=True):
        if same is not None and (loss is None or loss.module not in modules):
            alike += [_Alike(row, own, same, 1, number) for own, number in Counter(summed).items()]
            continue
        ones = Counter(
            (own, same or rows.runs(module), loss.chunks if loss is not None and loss.module == module else 1)
            for module, own in zip(modules, summed, strict=True)
        )
        alike += [_Alike(row, *one, number) for one, number in ones.items()]
    return alike


@once_for_each
def _summed(
    arrangement: Arrangement, kinds: Sequence[tuple[TensorParallelRow, tuple[str, ...]]]
) -> list[list[tuple[int, ...]]]:
    """Return for each module of each kind the elements of each parameter whose gradients it sums; 0: it is in another stage."""
    if not any(row.sums for row, _ in kinds):
        return [[()] * len(modules) for _, modules in kinds]
    elements = {name: entry.numel for entry in arrangement.entries for name in (entry.name, *entry.aliases)}
    return [[tuple([elements.get(f"{module}.{name}", 0) for name in row.sums]) for module in modules] for row, modules in kinds]


@once_for_each
def _by_kind(rows: Sequence[TensorParallelRow]) -> list[tuple[TensorParallelRow, tuple[str, ...]]]:
    """Return the first row of each kind, and the modules whose rows say the same beside their name."""
    kinds: dict[Hashable, list[TensorParallelRow]] = {}
    for row in rows:
        kinds.setdefault(_BESIDE_NAME(row), []).append(row)
    return [(same[0], tuple(row.module for row in same)) for same in kinds.values()]

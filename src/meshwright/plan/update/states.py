"""What an optimizer keeps for a parameter, in bytes of a rank, and what ranks send in an update: closed forms of each kind."""

from collections import Counter
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from meshwright.layout import Layout
from meshwright.plan.result.axis_traffic import AxisTraffic
from meshwright.plan.result.rows import ParameterRow
from meshwright.plan.result.sharding_plan import ShardingPlan, itemsize
from meshwright.plan.update.matrices import Form, own_spans
from meshwright.plan.update.muon_choice import held_of, indices_of_rank
from meshwright.plan.update.muon_cost import UpdateTraffic, traffic_of

__all__ = [
    "ALL",
    "COLUMNS",
    "LEAST_IN_BLOCKS",
    "ONE",
    "ROWS",
    "in_blocks",
    "kept_words",
    "orthogonalised",
    "state_bytes",
    "update_traffic",
]

ALL, ROWS, COLUMNS, ONE = "all", "rows", "columns", "one"
"""What a tensor of the state has a number of: each entry of the parameter, each row, each column, or the parameter."""


LEAST_IN_BLOCKS = 4096
"""Numbers of a shard below which torchao keeps its moments as they are, here in at least single precision."""


def state_bytes(plan: ShardingPlan, row: ParameterRow) -> int:
    """Return the bytes of the state of a parameter on the rank that stores the most. Counters of steps are not counted."""
    if not row.trainable:
        return 0
    rule = plan.options.rules[row.update]
    options = dict(rule.options)
    if (of_shard := _BYTES_OF_SHARD.get(rule.kind)) is not None:
        return max(of_shard(numbers, row, options) for numbers in _shards(plan, row))
    return _BYTES[rule.kind](row, options)


def _updates(plan: ShardingPlan) -> list[str]:
    """Return the names of the rules that update something."""
    return list(dict.fromkeys(row.update for row, _ in plan.shared.ways if row.trainable))


def kept_words(plan: ShardingPlan) -> str:
    """Return what the optimizers of a plan keep, in words."""
    rules = [plan.options.rules[name] for name in _updates(plan)]
    said = [_WORDS[rule.kind](dict(rule.options)) if rule.kind else rule.name for rule in rules]
    return "; ".join(said)


def update_traffic(plan: ShardingPlan) -> list[AxisTraffic]:
    """Return the collectives of an update on one rank. Those of an optimizer of the user are not known."""
    found: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for name in _updates(plan):
        rule = plan.options.rules[name]
        if (of_rule := _TRAFFIC.get(rule.kind)) is None:
            continue
        rows = [row for row in plan.parameters if row.update == name]
        for item in of_rule(plan.layout, rows, dict(rule.options)):
            found[item.axis, item.kind] += item.calls
            sizes[item.axis, item.kind] += item.size or 0
    return [AxisTraffic(*key, calls, sizes[key]) for key, calls in found.items()]


def _moments(number: int) -> Callable[[ParameterRow, Mapping[str, Any]], int]:
    return lambda row, options: number * row.bytes_per_rank


def _of_sgd(row: ParameterRow, options: Mapping[str, Any]) -> int:
    return row.bytes_per_rank if options["momentum"] else 0


def _of_adafactor(row: ParameterRow, options: Mapping[str, Any]) -> int:
    numbers = [ROWS, COLUMNS] if len(row.local_shape) > 1 else [ALL]
    return max(4, itemsize(row.dtype)) * sum(_number(row.local_shape, kept) for kept in numbers)


def _in_blocks(bits: int, table: int) -> Callable[[int, ParameterRow, Mapping[str, Any]], int]:
    """Return the bytes of torchao's two moments: codes, a scale of 4 bytes a block, and a table of what the codes mean."""

    def of_shard(numbers: int, row: ParameterRow, options: Mapping[str, Any]) -> int:
        if not _has_blocks(numbers, options):
            return 2 * max(4, itemsize(row.dtype)) * numbers
        return 2 * (numbers * bits // 8 + 4 * (numbers // options["block_size"]) + table)

    return of_shard


def _shards(plan: ShardingPlan, row: ParameterRow) -> set[int]:
    """Return the numbers of entries of the shards of a parameter. A smaller one may have more bytes, if it has no blocks."""
    fullest = prod(row.local_shape)
    held = held_of(row, plan.layout, Form())
    ranks = prod(size for name, size in held.axes if name not in held.replicas)
    if fullest * ranks == prod(row.shape):
        return {fullest}
    first = (0,) * len(held.axes)
    places = [(*first[:axis], index, *first[axis + 1 :]) for axis, (_, size) in enumerate(held.axes) for index in range(size)]
    return {fullest} | {prod(sum(end - begin for begin, end in own_spans(held, dim, at)) for dim in range(3)) for at in places}


def in_blocks(row: ParameterRow, options: Mapping[str, Any]) -> bool:
    """Return whether torchao keeps the moments of a parameter in blocks (``_AdamBase._new_buffer`` of torchao 0.18)."""
    return _has_blocks(prod(row.local_shape), options)


def _has_blocks(numbers: int, options: Mapping[str, Any]) -> bool:
    return numbers >= LEAST_IN_BLOCKS and numbers % int(options["block_size"]) == 0


def _of_user(row: ParameterRow, options: Mapping[str, Any]) -> int:
    states = options["matrix"] if len(row.local_shape) > 1 else options["vector"]
    return sum((size or itemsize(row.dtype)) * _number(row.local_shape, kept) for kept, size in states)


def _number(shape: tuple[int, ...], kept: str) -> int:
    left = {ALL: shape, ROWS: shape[:-1], COLUMNS: (*shape[:-2], *shape[-1:]), ONE: ()}
    return prod(left[kept])


def _rounds_of_adafactor(layout: Layout, rows: list[ParameterRow], options: Mapping[str, Any]) -> list[AxisTraffic]:
    """Two rounds of sums (:mod:`meshwright.distributed.update.adafactor`), each an all-reduce for an axis and a dtype."""
    sizes: dict[tuple[str, int], int] = {}
    for row in rows:
        shape, width = row.local_shape, max(4, itemsize(row.dtype))
        last, before, around = len(shape) - 1, len(shape) - 2, prod(shape[:-2])
        for axis, placement in row.placements:
            if placement == "Replicate()":
                continue
            axis = "dp_shard_cp" if axis == "dp_shard" else axis
            dim = int(placement.partition("(")[2].partition(",")[0].rstrip(")"))
            numbers = 2  # the sizes of the parameter and of its update
            if len(shape) > 1:
                numbers += _number(shape, ROWS) * (dim == last) + (_number(shape, COLUMNS) + around) * (dim == before)
                numbers += around * (dim in (last, before))
            sizes[axis, width] = sizes.get((axis, width), 0) + numbers * width
    return [AxisTraffic(axis, "all_reduce", 2, size) for (axis, _), size in sizes.items()]


def _of_muon(layout: Layout, rows: list[ParameterRow], options: Mapping[str, Any]) -> UpdateTraffic:
    held = [held_of(row, layout, row.form or Form()) for row in rows]
    return traffic_of(
        held,
        indices_of_rank(layout),
        itemsize(options["dtype"]),
        [itemsize(row.dtype) for row in rows],
        steps=options["ns_steps"],
        nesterov=options["nesterov"],
        bucket=options["bucket"],
    )


def _exchanges_of_muon(layout: Layout, rows: list[ParameterRow], options: Mapping[str, Any]) -> list[AxisTraffic]:
    """Two all-to-alls a bucket, over the ranks that have parts of a matrix (:mod:`meshwright.plan.update.muon`)."""
    names = {"dp_shard": "dp_shard_cp"}
    groups = _of_muon(layout, rows, options).groups
    return [AxisTraffic(" x ".join(names.get(axis, axis) for axis in axes), "all_to_all", *own) for axes, *own in groups]


def orthogonalised(plan: ShardingPlan) -> dict[str, UpdateTraffic]:
    """Return what Muon costs the rank that it costs most, for each dtype that it computes in; empty: nothing is Muon's."""
    found = {}
    for name in _updates(plan):
        rule = plan.options.rules[name]
        if rule.kind == "muon":
            options = dict(rule.options)
            found[options["dtype"]] = _of_muon(plan.layout, [row for row in plan.parameters if row.update == name], options)
    return found


_TRAFFIC: dict[str, Callable[[Layout, list[ParameterRow], Mapping[str, Any]], list[AxisTraffic]]] = {
    "adafactor": _rounds_of_adafactor,
    "muon": _exchanges_of_muon,
}
"""The collectives of a kind for the parameters that it updates; the others have none."""

_BYTES_OF_SHARD: dict[str, Callable[[int, ParameterRow, Mapping[str, Any]], int]] = {
    "adamw8bit": _in_blocks(8, 4 * 256),
    "adamw4bit": _in_blocks(4, 4 * 16),
    "adamwfp8": _in_blocks(8, 0),
}

_BYTES: dict[str, Callable[[ParameterRow, Mapping[str, Any]], int]] = {
    "adamw": _moments(2),
    "adafactor": _of_adafactor,
    "lion": _moments(1),
    "muon": _moments(1),
    "sgd": _of_sgd,
    "": _of_user,
}

_WORDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "adamw": lambda options: "AdamW, two moments",
    "adamw8bit": lambda options: f"AdamW, two moments in 8 bits, blocks of {options['block_size']}",
    "adamw4bit": lambda options: f"AdamW, two moments in 4 bits, blocks of {options['block_size']}",
    "adamwfp8": lambda options: f"AdamW, two moments in fp8, blocks of {options['block_size']}",
    "adafactor": lambda options: "Adafactor, means of rows and columns",
    "lion": lambda options: "Lion, one moment",
    "muon": lambda options: "Muon, one moment",
    "sgd": lambda options: "SGD, momentum" if options["momentum"] else "SGD, nothing",
}

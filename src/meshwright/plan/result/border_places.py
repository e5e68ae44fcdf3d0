"""The borders of modules, and which part of a batch a rank has there. The plan determines both.

A *border* is where the input enters a module, or its output leaves it. Without tensor parallel, a rank has all tokens of its
microbatches at every border. Under sequence parallel, it has its slice of the positions from the first layer on to the last
norm. Inside the regions of tensor parallel (:mod:`meshwright.plan.axes.tensor.modules`) it has slices of features and partial
sums, which are the tokens of no process.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from torch import nn

from meshwright.layout import AXES
from meshwright.plan.axes.context.sharing import positions_of
from meshwright.plan.axes.tensor.move_kinds import Move
from meshwright.plan.axes.tensor.styles import FIRST, INNER, SECOND, SPAN
from meshwright.plan.given.names import holder_of, holders_of, inside, within
from meshwright.plan.result.sharding_plan import ADDED, ROOT, ShardingPlan, TensorParallelRow, UnitRow

__all__ = ["Portion", "Side", "borders", "first_microbatch", "portion_of_rank", "tokens_of_units"]


class Side(StrEnum):
    """A side of a module."""

    INPUT = "input"
    OUTPUT = "output"


@dataclass(frozen=True)
class Portion:
    """The part of a tensor [rows, positions, ...] that a rank has.

    Attributes:
        rows: rows of the microbatch.
        positions: ranges of positions that it has of each of these rows, piece by piece.
        words: range of the last dimension; ``None``: all of it.
    """

    rows: range
    positions: tuple[range, ...]
    words: range | None = None


def borders(plan: ShardingPlan, model: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules whose borders an audit records, in model order.

    These are units, layers and their direct children, regions of tensor parallel, mixtures and their routers; and, outside of
    the layers, every module without children: embeddings, the last norm, the head. What an objective added is left out: it is
    called with values of any shape.
    """
    layers = set(plan.layers)
    wanted = layers | {unit.name for unit in plan.units}
    wanted |= {row.module for row in plan.tensor_parallel if row.style in ("region", *SPAN)}
    wanted |= {name for row in plan.experts for name in (row.module, row.router)}
    added = [unit.name for unit in plan.units if unit.kind == ADDED]
    names = []
    for name, module in model.named_modules():
        parent, inner = holder_of(name), any(inside(name, layer) for layer in layers)
        leaf = not inner and next(module.children(), None) is None
        if within(name, added):
            continue
        if name and (name in wanted or parent in layers or leaf) and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            names.append(name)
    return tuple(names)


def tokens_of_units(plan: ShardingPlan) -> tuple[UnitRow, ...]:
    """Return the units of a plan, each with the tokens of its microbatch that enter it on a rank."""
    mixtures = {row.module for row in plan.experts} if plan.layout.ep > 1 else set()
    first = dict.fromkeys(AXES, 0)
    tp, cp = plan.layout.size("tp"), plan.layout.size("cp")
    length = plan.sequence_multiple

    def tokens(unit: UnitRow) -> str:
        if unit.name in mixtures:
            return "routed over ep"
        if unit.kind == ADDED:
            return "as the objective calls it"
        at_input = portion_of_rank(plan, unit.name, Side.INPUT, first, 1, length)
        part = at_input is not None and sum(map(len, at_input.positions)) < length // cp
        axes = [axis for axis, shared in (("cp", cp > 1), ("tp", part)) if shared]
        share = (tp if part else 1) * cp
        return f"1/{share} of each sequence ({', '.join(axes)})" if axes else "all"

    return tuple(unit if unit.tokens == (entering := tokens(unit)) else replace(unit, tokens=entering) for unit in plan.units)


def first_microbatch(plan: ShardingPlan, coordinates: Mapping[str, int]) -> int:
    """Return the index of a rank's first microbatch, among the microbatches of a step over all data ranks."""
    reader = coordinates["dp_replicate"] * plan.layout.size("dp_shard") + coordinates["dp_shard"]
    return reader * plan.options.microbatches


def portion_of_rank(
    plan: ShardingPlan, module: str, side: Side, coordinates: Mapping[str, int], rows: int, length: int, features: int = 0
) -> Portion | None:
    """Return which part of the hidden state of a microbatch a rank has at a border.

    Args:
        plan: the plan, with its layout.
        module: name of the module.
        side: side of the module.
        coordinates: axis to the position of the rank on it.
        rows: number of sequences in a microbatch.
        length: number of tokens in each sequence, including the padding for ``plan.sequence_multiple``.
        features: size of the last dimension; needed if logits stay sharded over the vocabulary.

    Returns:
        The part; ``None`` if the rank has slices of features or a partial sum, to which no tokens of a single process are
            equal.
    """
    balance, cp = plan.options.context_balance, plan.layout.size("cp")
    everything = Portion(range(rows), positions_of(length, cp, balance, coordinates["cp"]))
    ranks = plan.layout.size("tp")
    if ranks == 1:
        return everything
    own = plan.sliced_modules.get(module)
    holders = (*holders_of(module), *([ROOT] if module else []))
    around = [row for name in holders if (row := plan.sliced_modules.get(name)) and row.style in ("region", *SPAN)]
    if around:
        return everything if around[-1].entry is Move.GATHER_SEQUENCE_WHOLE else None
    if own is not None and side is Side.OUTPUT and own.exit is Move.VOCABULARY:
        width = -(-features // ranks)
        begin = min(coordinates["tp"] * width, features)
        return replace(everything, words=range(begin, min(begin + width, features)))
    if not plan.options.sequence_parallel:
        return everything
    if own is not None and (place := _in_span(own, side)):
        return everything if place == "on_whole" else None
    # The residual stream is split where it enters the first layer, and all-gathered where it leaves the last norm.
    cut = own is not None and side is Side.INPUT and own.entry is Move.SPLIT_SEQUENCE
    joined = own is not None and side is Side.OUTPUT and own.exit is Move.GATHER_SEQUENCE_WHOLE
    in_layers = within(module, plan.layers)
    if cut or joined or not (in_layers or (own is not None and own.style == "sequence_parallel")):
        return everything
    share = length // cp // ranks
    return Portion(range(rows), _slice(everything.positions, coordinates["tp"] * share, share))


def _in_span(row: TensorParallelRow, side: Side) -> str:
    """Return ``on_parts`` or ``on_whole`` if a side of a module of a span is in the span; otherwise it is empty."""
    if row.style in INNER:
        return row.style
    begins, ends = row.entry is not Move.NONE and side is Side.OUTPUT, row.exit is not Move.NONE and side is Side.INPUT
    if row.style in SPAN:
        return SPAN[row.style] if begins or ends else ""
    first = row.style in FIRST and row.entry is Move.GATHER_SEQUENCE and begins
    return "on_parts" if first or (row.style in SECOND and row.exit is Move.SCATTER_SEQUENCE and ends) else ""


def _slice(pieces: tuple[range, ...], begin: int, count: int) -> tuple[range, ...]:
    """Return the positions with the numbers ``begin`` to ``begin + count - 1`` among those of some pieces."""
    slices = []
    for piece in pieces:
        part = piece[max(0, begin) : max(0, begin + count)]
        if part:
            slices.append(part)
        begin -= len(piece)
    return tuple(slices)

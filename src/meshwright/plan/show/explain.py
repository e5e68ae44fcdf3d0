"""A plan as tables for people."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from meshwright.errors import number_of
from meshwright.plan.axes.context import gathered_bytes, unevenness
from meshwright.plan.axes.data.unit_traffic import unit_traffic
from meshwright.plan.axes.experts import expert_parallel_counts
from meshwright.plan.axes.pipeline.replay import replay_of_plan
from meshwright.plan.axes.pipeline.stage_plan import crossing_bytes, on_stages
from meshwright.plan.axes.tensor.move_kinds import Move
from meshwright.plan.axes.tensor.traffic import tensor_parallel_counts
from meshwright.plan.cost.activation_traffic import activation_traffic
from meshwright.plan.cost.price import Totals, totals
from meshwright.plan.given.closed_choices import ContextMethod, SyncPolicy
from meshwright.plan.given.names import generalize
from meshwright.plan.result.action_values import describe
from meshwright.plan.result.sharding_plan import (
    AttentionRow,
    ExpertsRow,
    ParameterRow,
    ShardingPlan,
    TensorParallelRow,
    UnitRow,
    itemsize,
)

__all__ = ["explain", "explain_program", "human_bytes"]

Row = TypeVar("Row", ParameterRow, UnitRow, TensorParallelRow, ExpertsRow, AttentionRow)


def human_bytes(size: float) -> str:
    """Return a number of bytes as text, such as ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def explain(plan: ShardingPlan, *, full: bool = False, parameters: bool = True) -> RenderableType:
    """Return the summary, the units and the parameters of a plan as tables.

    Args:
        plan: the plan to show.
        full: print one line for every row; otherwise rows that differ only in the number of their layer share a line.
        parameters: whether to show the parameters too.
    """
    tables = [_summary(plan), *([_stages(plan)] if plan.stages else []), _units(plan, full)]
    if plan.tensor_parallel:
        tables.append(_tensor_parallel(plan, full))
    if plan.experts:
        tables.append(_experts(plan, full))
    if plan.attentions:
        tables.append(_attentions(plan, full))
    if parameters:
        tables.append(_parameters(plan, full))
    return Group(*tables, *(escape(f"- {remark}") for remark in plan.remarks))


def explain_program(plan: ShardingPlan, *, full: bool = False) -> RenderableType:
    """Return the actions of a plan as a table, in the order in which they are performed.

    Args:
        plan: the plan to show.
        full: print one line for every action; otherwise actions that differ only in numbers within names share the line of the
            first.
    """
    table = Table(title=f"Program of {len(plan.program):,} actions", title_justify="left", box=SIMPLE_HEAD)
    for name in ("action", "of", "how"):
        table.add_column(name, overflow="fold")
    lines: Counter[tuple[str, ...]] = Counter()
    for action in plan.program:
        cells = (type(action).__name__, *describe(action))
        lines[cells if full else tuple(_NAME.sub(lambda name: generalize(name[0]), cell) for cell in cells)] += 1
    for (kind, subject, how), count in lines.items():
        table.add_row(kind, subject if count == 1 else f"{subject} ({count})", how)
    return table


_NAME = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+")
"""A dotted name."""


def _summary(plan: ShardingPlan) -> Table:
    total, options = totals(plan), plan.options
    traffic = total.traffic
    others = activation_traffic(plan)
    over = " over data ranks" if others else ""
    where = "host memory" if options.cpu_offload else "per rank"
    table = Table(
        title=f"Plan: {plan.family}, {number_of(plan.layout.world_size, 'rank')} ({plan.layout})", show_header=False, box=None
    )
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    share = 100 * total.trainable / total.parameters if total.parameters else 0
    for line in (
        ("parameters", f"{total.parameters:,}", f"{share:.4g} % trainable"),
        (f"parameters, {where}", human_bytes(total.parameter_bytes), _apart(total)),
        (f"gradients, {where}", human_bytes(total.gradient_bytes), "shards"),
        (f"optimizer state, {where}", human_bytes(total.optimizer_bytes), "AdamW, two moments"),
        ("largest gathered unit", human_bytes(total.largest_unit_bytes), total.largest_unit),
        ("gathered at the peak", human_bytes(total.gathered_peak_bytes), f"parameters that a rank holds{_ahead(plan)}"),
        (
            "unsharded gradients at the peak",
            human_bytes(total.unsharded_gradient_peak_bytes),
            f"{number_of(options.microbatches, 'microbatch')} a step",
        ),
        *(
            [
                (
                    "receive buffers",
                    human_bytes(total.receive_buffer_bytes),
                    "of hidden states and their gradients",
                )
            ]
            if total.receive_buffer_bytes
            else []
        ),
        *_logits(plan),
        (f"all-gathered{over} per step", human_bytes(traffic.all_gather_bytes), number_of(traffic.all_gathers, "collective")),
        (
            f"reduce-scattered{over} per step",
            human_bytes(traffic.reduce_scatter_bytes),
            number_of(traffic.reduce_scatters, "collective"),
        ),
        (
            f"all-reduced{over} per step",
            human_bytes(traffic.all_reduce_bytes),
            f"{number_of(traffic.all_reduces, 'collective')}{', one of them flags of use' if plan.flags_of_use else ''}",
        ),
    ):
        table.add_row(*line)
    for item in others:
        size = "depends on the batch" if item.size is None else human_bytes(item.size)
        calls = "messages" if item.kind == "send" else "collectives"
        balanced = ", if all experts get as many tokens" if item.axis == "ep" else ""
        table.add_row(f"{_DONE[item.kind]} over {item.axis} per step", size, f"{item.calls:,} {calls}{balanced}")
    return table


def _apart(total: Totals) -> str:
    """Return how many of the stored bytes are trained and frozen."""
    frozen = total.parameter_bytes - total.gradient_bytes
    if not frozen:
        return "shards as stored"
    return f"shards as stored: {human_bytes(total.gradient_bytes)} trained, {human_bytes(frozen)} frozen"


_DONE = {
    "all_reduce": "all-reduced",
    "all_gather": "all-gathered",
    "reduce_scatter": "reduce-scattered",
    "all_to_all": "exchanged (all-to-all)",
    "send": "sent from rank to rank",
}


def _logits(plan: ShardingPlan) -> list[tuple[str, str, str]]:
    """Return the line about a loss in chunks, if the number of tokens is known."""
    if plan.loss is None or plan.options.tokens is None:
        return []
    tokens = -(-plan.options.tokens // plan.loss.chunks)
    tp = plan.layout.size("tp") if any(row.exit is Move.VOCABULARY for row in plan.tensor_parallel) else 1
    size = tokens * -(-plan.loss.vocabulary // tp) * itemsize("float32")
    return [("logits of a chunk", human_bytes(size), f"in fp32; {number_of(plan.loss.chunks, 'chunk')} of {tokens:,} tokens")]


def _ahead(plan: ShardingPlan) -> str:
    """Return how far ahead units are gathered, if the options say it."""
    chosen = (("forward", plan.options.prefetch_forward), ("backward", plan.options.prefetch_backward))
    said = [f"{number} ahead in {where}" for where, number in chosen if number is not None]
    return "".join(f", {item}" for item in said)


def _units(plan: ShardingPlan, full: bool) -> Table:
    table = Table(title="Units", title_justify="left", box=SIMPLE_HEAD)
    for name in ("unit", "tokens", "reshard", "dtypes", "sync", "AC", "gathered", "AG", "RS|AR"):
        numeric = name in ("gathered", "AG", "RS|AR")
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")

    def cells(unit: UnitRow) -> tuple[str, ...]:
        traffic = unit_traffic(plan, unit)
        gathered = sum(row.gathered_bytes for row in plan.rows(unit))
        if unit.part_of:
            return unit.tokens, "", "", f"with {generalize(unit.part_of)}", str(unit.activation_checkpointing), "", "", ""
        return (
            unit.tokens,
            "yes" if unit.reshard_after_forward and unit.sync is not SyncPolicy.DEFER else "no",
            f"{_short(unit.param_dtype or 'stored')}/{_short(unit.reduce_dtype or 'same')}",
            str(unit.sync),
            str(unit.activation_checkpointing),
            human_bytes(gathered),
            str(traffic.all_gathers),
            str(max(traffic.reduce_scatters, traffic.all_reduces)),
        )

    for label, values in _folded(plan.units, cells, full):
        table.add_row(label or "(root)", *values)
    return table


_STYLES_OF = {
    "given": "as parallel.tp_plan says",
    "family": "as is best for this family",
    "model": "as transformers declares it for this model",
    "derived": "derived from what its layers compute",
}


def _tensor_parallel(plan: ShardingPlan, full: bool) -> Table:
    table = Table(title=f"Tensor parallel, {_STYLES_OF[plan.tp_level]}", title_justify="left", box=SIMPLE_HEAD)
    for name in ("module", "style", "in", "out", "gradients summed over tp"):
        table.add_column(name, overflow="fold")

    def cells(row: TensorParallelRow) -> tuple[str, ...]:
        return row.style, *(str(move) if move is not Move.NONE else "" for move in (row.entry, row.exit)), ", ".join(row.sums)

    for label, values in _folded(plan.tensor_parallel, cells, full):
        table.add_row(label, *values)
    counts = tensor_parallel_counts(plan)
    known = plan.tp_level == "family" or any(row.style == "region" for row in plan.tensor_parallel)
    trust = "" if known else "the inside of this family's layers is not known here: prove it with `meshwright audit`; "
    table.caption = trust + "per step: " + ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    return table


def _experts(plan: ShardingPlan, full: bool) -> Table:
    table = Table(title="Experts", title_justify="left", box=SIMPLE_HEAD)
    for name in ("mixture", "router", "experts", "on a rank", "tokens from"):
        table.add_column(name, justify="right" if name in ("experts", "on a rank") else "left", overflow="fold")

    def cells(row: ExpertsRow) -> tuple[str, ...]:
        tokens = (
            "this rank" if plan.layout.ep == 1 else "its part of tp, all ranks of ep" if row.token_axis else "all ranks of ep"
        )
        return generalize(row.router), str(row.experts), str(row.local), tokens

    for label, values in _folded(plan.experts, cells, full):
        table.add_row(label, *values)
    counts = [f"{count} {kind} over {axis}" for axis, of in expert_parallel_counts(plan).items() for kind, count in of.items()]
    table.caption = f"per step: {', '.join(counts)}" if counts else None
    return table


def _stages(plan: ShardingPlan) -> Table:
    options, runs = plan.options, plan.options.runs_per_step
    title = f"Pipeline: {options.pipeline_schedule}, {options.microbatches // runs} microbatches in a run"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in ("stage", "rank of pp", "layers", "work", "parameters, per rank"):
        table.add_column(name, justify="left" if name == "layers" else "right", overflow="fold")
    for row in plan.stages:
        size = sum(parameter.bytes_per_rank for parameter in on_stages(plan, [row.index]).parameters)
        layers = f"{row.layers[0]} to {row.layers[-1].rpartition('.')[2]}" if len(row.layers) > 1 else row.layers[0]
        table.add_row(str(row.index), str(row.rank), layers, f"{row.cost:.1%}", human_bytes(size))
    run, alone = replay_of_plan(plan), replay_of_plan(plan, even=True)
    lines = [f"{runs} runs a step"] if runs > 1 else []
    lines.append(f"idle {run.bubble:.1%} of a run, without messages ({alone.bubble:.1%} if all stages took equal time)")
    lines.append(f"microbatches alive on ranks of pp: {', '.join(f'{number:g}' for number in run.alive)}")
    if options.tokens is not None:
        lines.append(f"a hidden state at a cut: {human_bytes(crossing_bytes(plan))}")
    table.caption = "; ".join(lines) or None
    return table


def _attentions(plan: ShardingPlan, full: bool) -> Table:
    options, cp = plan.options, plan.layout.size("cp")
    title = f"Context parallel: {options.context_parallel}, {options.context_balance}"
    if cp == 1:
        title = "Attention that keeps packed documents apart, which the model's own does not"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in ("attention", "mask", "heads", "key/value heads", "sizes", "kernel", "in backward"):
        table.add_column(name, justify="right" if "heads" in name else "left", overflow="fold")

    def cells(row: AttentionRow) -> tuple[str, ...]:
        sizes = f"{row.key_size}" if row.key_size == row.value_size else f"{row.key_size}, values {row.value_size}"
        again = "gets keys again" if row.recompute else "keeps keys"
        kernel = row.kernel if row.method is not ContextMethod.RING else "blocks, merged in fp32"
        mask = f"{row.mask}{', sinks' if row.sinks else ''}"
        return mask, str(row.heads), str(row.kv_heads), sizes, kernel, again

    for label, values in _folded(plan.attentions, cells, full):
        table.add_row(label, *values)
    lines = [] if cp == 1 else [f"a sequence is padded to a multiple of {plan.sequence_multiple}"]
    if cp > 1:
        uneven = unevenness(range(1, 1024 * cp + 1), cp, options.context_balance)
        lines.append(f"one causal document: the rank with the most work has {uneven:.2f} of the mean")
    if cp > 1 and options.tokens is not None and (gathered := gathered_bytes(plan, options.tokens)):
        lines.append(f"gathered keys and values of an attention: {human_bytes(gathered)}")
    table.caption = "; ".join(lines) or None
    return table


def _parameters(plan: ShardingPlan, full: bool) -> Table:
    table = Table(title="Parameters", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))  # the table is wide
    for name in ("parameter", "shape", "dtype", "unit", "placements", "local shape", "per rank", "decay"):
        table.add_column(name, justify="right" if name == "per rank" else "left", overflow="fold")

    def cells(row: ParameterRow) -> tuple[str, ...]:
        return (
            _shape(row.shape),
            _short(row.dtype) + ("" if row.trainable else ", frozen"),
            generalize(row.unit) or "(root)" if not full else row.unit or "(root)",
            ", ".join(f"{axis}: {placement}" for axis, placement in row.placements) or "whole",
            _shape(row.local_shape),
            human_bytes(row.bytes_per_rank),
            row.update,
        )

    for label, values in _folded(plan.parameters, cells, full):
        table.add_row(label, *values)
    return table


def _short(dtype: str) -> str:
    """Return the usual short name of a dtype: bf16, fp32."""
    return dtype.replace("bfloat", "bf").replace("float", "fp")


def _shape(shape: Sequence[int]) -> str:
    return "x".join(str(size) for size in shape)


def _folded(rows: Iterable[Row], cells: Callable[[Row], tuple[str, ...]], full: bool) -> list[tuple[str, tuple[str, ...]]]:
    """Merge rows whose names differ only in numbers and whose cells are equal into one line, with their count."""
    if full:
        return [(_label(row), cells(row)) for row in rows]
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for row in rows:
        groups.setdefault((generalize(row.name), cells(row)), []).append(_label(row))
    return [
        (names[0] if len(names) == 1 else f"{pattern} ({len(names)})", values) for (pattern, values), names in groups.items()
    ]


def _label(row: ParameterRow | UnitRow | TensorParallelRow | ExpertsRow | AttentionRow) -> str:
    if isinstance(row, ParameterRow) and row.aliases:
        return f"{row.name} = {', '.join(row.aliases)}"
    return row.name

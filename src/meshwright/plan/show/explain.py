"""A plan as tables for people."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from meshwright.plan.axes.context.sharing import gathered_bytes, unevenness
from meshwright.plan.axes.data.unit_traffic import unit_traffic
from meshwright.plan.axes.experts import expert_parallel_counts
from meshwright.plan.axes.pipeline.replay import replay_of_plan
from meshwright.plan.axes.pipeline.stage_plan import crossing_bytes
from meshwright.plan.axes.pipeline.stage_rows import on_stages
from meshwright.plan.axes.tensor.move_kinds import Move
from meshwright.plan.axes.tensor.traffic import tensor_parallel_counts
from meshwright.plan.given.closed_choices import ContextMethod, SyncPolicy
from meshwright.plan.given.names import generalize
from meshwright.plan.given.sequence.mixer_shares import MixerShare
from meshwright.plan.result.action_values import describe
from meshwright.plan.result.context.canvas_rows import CanvasRow
from meshwright.plan.result.sharding_plan import (
    AttentionRow,
    ExpertsRow,
    ParameterRow,
    ShardingPlan,
    TensorParallelRow,
    UnitRow,
)
from meshwright.plan.show.context.mixer_table import mixer_tables
from meshwright.plan.show.summary import human_bytes, summary

__all__ = ["PARAMETER_COLUMNS", "UNIT_COLUMNS", "explain", "explain_program", "folded", "parameter_cells", "unit_cells"]

Row = TypeVar("Row", ParameterRow, UnitRow, TensorParallelRow, ExpertsRow, AttentionRow, MixerShare)


def explain(plan: ShardingPlan, *, full: bool = False, parameters: bool = True) -> RenderableType:
    """Return the summary, the units and the parameters of a plan as tables.

    Args:
        plan: the plan to show.
        full: print one line for every row; otherwise rows that differ only in the number of their layer share a line.
        parameters: whether to show the parameters too.
    """
    tables = [summary(plan), *([_stages(plan)] if plan.stages else []), _units(plan, full)]
    if plan.tensor_parallel:
        tables.append(_tensor_parallel(plan, full))
    if plan.experts:
        tables.append(_experts(plan, full))
    if plan.attentions:
        tables.append(_attentions(plan, full))
    if plan.mixers:
        tables += mixer_tables(plan, full, folded)
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


UNIT_COLUMNS = ("tokens", "reshard", "dtypes", "sync", "AC", "gathered", "AG", "RS|AR")
"""What :func:`unit_cells` says of a unit."""


def unit_cells(plan: ShardingPlan, unit: UnitRow) -> tuple[str, ...]:
    """Return what a plan says of a unit, as text."""
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


def _units(plan: ShardingPlan, full: bool) -> Table:
    table = Table(title="Units", title_justify="left", box=SIMPLE_HEAD)
    for name in ("unit", *UNIT_COLUMNS):
        numeric = name in ("gathered", "AG", "RS|AR")
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")

    for label, values in folded(plan.units, partial(unit_cells, plan), full):
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

    for label, values in folded(plan.tensor_parallel, cells, full):
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

    for label, values in folded(plan.experts, cells, full):
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
        sizes = dict.fromkeys(human_bytes(crossing_bytes(plan, row.index)) for row in plan.stages[1:])
        more = ", with what later layers read beside it" if plan.cut is not None and plan.cut.carried else ""
        lines.append(f"a hidden state at a cut{more}: {', '.join(sizes)}")
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

    for label, values in folded(plan.attentions, cells, full):
        table.add_row(label, *values)
    lines = [] if cp == 1 else [f"a sequence is padded to a multiple of {plan.sequence_multiple}"]
    if cp > 1:
        uneven = unevenness(range(1, 1024 * cp + 1), cp, options.context_balance)
        lines.append(f"one causal document: the rank with the most work has {uneven:.2f} of the mean")
    if cp > 1 and options.tokens is not None and (gathered := gathered_bytes(plan, options.tokens)):
        lines.append(f"gathered keys and values of an attention: {human_bytes(gathered)}")
    if over := next((row for row in plan.attentions if isinstance(row, CanvasRow)), None):
        most = "" if over.canvas is None else f" of at most {over.canvas[0]:,} columns"
        lines.append(
            f"a canvas{most} is cut as a sequence is; each of its passes gets the clean keys and values of other ranks too"
        )
    table.caption = "; ".join(lines) or None
    return table


PARAMETER_COLUMNS = ("shape", "dtype", "unit", "placements", "local shape", "per rank", "update", "decay")
"""What :func:`parameter_cells` says of a parameter."""


def parameter_cells(row: ParameterRow, *, full: bool = False) -> tuple[str, ...]:
    """Return what a plan says of a parameter, as text; ``full``: with the number of its unit."""
    return (
        _shape(row.shape),
        _short(row.dtype),
        generalize(row.unit) or "(root)" if not full else row.unit or "(root)",
        ", ".join(f"{axis}: {placement}" for axis, placement in row.placements) or "whole",
        _shape(row.local_shape),
        human_bytes(row.bytes_per_rank),
        row.update,
        row.decay_and_rate,
    )


def _parameters(plan: ShardingPlan, full: bool) -> Table:
    table = Table(title="Parameters", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))  # the table is wide
    for name in ("parameter", *PARAMETER_COLUMNS):
        table.add_column(name, justify="right" if name == "per rank" else "left", overflow="fold")

    for label, values in folded(plan.parameters, partial(parameter_cells, full=full), full):
        table.add_row(label, *values)
    return table


def _short(dtype: str) -> str:
    """Return the usual short name of a dtype: bf16, fp32."""
    return dtype.replace("bfloat", "bf").replace("float", "fp")


def _shape(shape: Sequence[int]) -> str:
    return "x".join(str(size) for size in shape)


def folded(rows: Iterable[Row], cells: Callable[[Row], tuple[str, ...]], full: bool) -> list[tuple[str, tuple[str, ...]]]:
    """Merge rows whose names differ only in numbers and whose cells are equal into one line, with their count."""
    if full:
        return [(_label(row), cells(row)) for row in rows]
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for row in rows:
        groups.setdefault((generalize(row.name), cells(row)), []).append(_label(row))
    return [
        (names[0] if len(names) == 1 else f"{pattern} ({len(names)})", values) for (pattern, values), names in groups.items()
    ]


def _label(row: ParameterRow | UnitRow | TensorParallelRow | ExpertsRow | AttentionRow | MixerShare) -> str:
    if isinstance(row, ParameterRow) and row.aliases:
        return f"{row.name} = {', '.join(row.aliases)}"
    return row.name

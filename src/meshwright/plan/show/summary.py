"""The summary of a plan: what a rank stores, holds at the peak and sends in a step, as a table."""

from rich.table import Table

from meshwright.errors import number_of
from meshwright.plan.axes.pipeline.stage_plan import stages_of_rank
from meshwright.plan.axes.pipeline.stage_rows import on_stages
from meshwright.plan.axes.tensor.move_kinds import Move
from meshwright.plan.cost.activation_traffic import activation_traffic
from meshwright.plan.cost.price import Totals, fullest_rank, totals
from meshwright.plan.result.sharding_plan import ShardingPlan, itemsize
from meshwright.plan.update.states import kept_words, orthogonalised, update_traffic

__all__ = ["human_bytes", "seconds_text", "summary", "two_digits"]


def two_digits(value: float) -> str:
    """Return a number with two significant digits, which is what a forecast has."""
    return f"{float(f'{value:.2g}'):,.0f}" if abs(value) >= 10 else f"{value:.2g}"


def seconds_text(seconds: float, digits: int = 3) -> str:
    """Return a time with its unit and some significant digits, such as ``12.3 ms``."""
    if seconds == 0:
        return "0"
    unit, size = next(((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if abs(seconds) >= size), ("µs", 1e-6))
    value = float(f"{seconds / size:.{digits}g}")
    return f"{value:,.0f} {unit}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g} {unit}"


def human_bytes(size: float) -> str:
    """Return a number of bytes as text, such as ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def summary(plan: ShardingPlan) -> Table:
    """Return the table."""
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
        (f"optimizer state, {where}", human_bytes(total.optimizer_bytes), kept_words(plan)),
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
    for item in update_traffic(on_stages(plan, stages_of_rank(plan, fullest_rank(plan)))):
        row = f"{_DONE[item.kind]} over {item.axis} by the optimizer", human_bytes(item.size or 0)
        table.add_row(*row, number_of(item.calls, "collective"))
    for muon in orthogonalised(on_stages(plan, stages_of_rank(plan, fullest_rank(plan)))).values():
        uneven = "" if muon.even > 0.95 else f"; ranks have {100 * muon.even:.0f} % of the work of the busiest, on average"
        table.add_row("held by Muon in an update", human_bytes(muon.held), f"beside its state{uneven}")
    if plan.layout.world_size > 1 and any(not rule.kind for rule in options.rules.values()):
        table.add_row("sent by your optimizer", "unknown", "what it does with shards is its own")
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

"""The table of the mixers whose heads the ranks of `cp` divide: what crosses, and its price beside that of gathering."""

from collections.abc import Callable, Iterable

from rich.box import SIMPLE_HEAD
from rich.table import Table

from meshwright.plan.axes.context.mixers import crossing_features, mixer_bytes
from meshwright.plan.given.context.mixer_shares import MixerShare
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.plan.show.summary import human_bytes

__all__ = ["mixer_table"]

Cells = tuple[str, ...]
Folded = Callable[[Iterable[MixerShare], Callable[[MixerShare], Cells], bool], Iterable[tuple[str, Cells]]]


def mixer_table(plan: ShardingPlan, full: bool, folded: Folded) -> Table:
    """Return the table.

    Args:
        plan: a plan with mixers.
        full: a line for each of them; otherwise those that differ only in the number of their layer share one.
        folded: makes these lines.
    """
    cp = plan.layout.size("cp")
    table = Table(title="Context parallel: heads of mixers, for all tokens", title_justify="left", box=SIMPLE_HEAD)
    for name in ("mixer", "from", "features", "each on several ranks", "summed", "back before", "features back"):
        table.add_column(name, justify="right" if "features" in name else "left", overflow="fold")

    def cells(row: MixerShare) -> Cells:
        several = sum(size for _, pieces in row.openings for size, copies in pieces if copies > 1)
        sent, back = crossing_features(plan, row)
        openings = ", ".join(name for name, _ in row.openings)
        summed = ", ".join(f"{name} ({width:,})" for name, width in row.summed)
        return openings, f"{sent:,}", f"{several:,}" if several else "none", summed or "none", row.closing, f"{back:,}"

    for label, values in folded(plan.mixers, cells, full):
        table.add_row(label, *values)
    lines = [f"a rank of cp computes 1/{cp} of the heads"]
    if plan.options.tokens is not None:
        sizes = human_bytes(sum(mixer_bytes(plan, plan.options.tokens).values()))
        kinds = "all-to-all and all-reduce" if any(row.summed for row in plan.mixers) else "all-to-all"
        lines.append(f"all of them in a microbatch, forward and backward: {sizes} in {kinds}")
    table.caption = "; ".join(lines)
    return table

"""The tables of mixers: what crosses where the ranks of `cp` divide their heads, and where they get the tokens before."""

from collections.abc import Callable, Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from meshwright.errors import number_of
from meshwright.plan.axes.context.mixers import crossing_features, elements_before, mixer_bytes
from meshwright.plan.given.sequence.mixer_shares import MixerShare
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.plan.show.summary import human_bytes

__all__ = ["mixer_tables"]

Cells = tuple[str, ...]
Folded = Callable[[Iterable[MixerShare], Callable[[MixerShare], Cells], bool], Iterable[tuple[str, Cells]]]


def mixer_tables(plan: ShardingPlan, full: bool, folded: Folded) -> list[Table]:
    """Return the tables: of heads, and of tokens before.

    Args:
        plan: a plan with mixers.
        full: a line for each of them; otherwise those that differ only in the number of their layer share one.
        folded: makes these lines.
    """
    made = []
    if divided := [row for row in plan.mixers if not row.before]:
        made.append(_heads(plan, divided, full, folded))
    if any(row.gathered_before for row in plan.mixers):
        made.append(_before(plan, full, folded))
    if plan.options.tokens is not None:
        sizes = mixer_bytes(plan, plan.options.tokens)
        kinds = [f"{human_bytes(size)} in {kind.replace('_', '-')}" for kind, size in sizes.items() if size]
        lines = f"all of them in a microbatch, forward and backward: {', '.join(kinds)}"
        made[-1].caption = "; ".join(filter(None, (made[-1].caption, lines)))  # type: ignore[arg-type]  # our captions are text
    return made


def _heads(plan: ShardingPlan, rows: Sequence[MixerShare], full: bool, folded: Folded) -> Table:
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

    for label, values in folded(rows, cells, full):
        table.add_row(label, *values)
    positions = "; position_ids are gathered" if any(row.positions for row in rows) else ""
    table.caption = f"a rank of cp computes 1/{cp} of the heads{positions}"
    return table


def _before(plan: ShardingPlan, full: bool, folded: Folded) -> Table:
    table = Table(title="Context parallel: the tokens before those of a rank", title_justify="left", box=SIMPLE_HEAD)
    for name in ("module", "before each token", "elements gathered"):
        table.add_column(name, justify="right" if "elements" in name else "left", overflow="fold")

    def cells(row: MixerShare) -> Cells:
        own = [number_of(row.before, "token")] if row.before else []
        own += [f"{number_of(tokens, 'token')} in {name}" for name, tokens, *_ in row.shifts]
        return ", ".join(own), f"{elements_before(plan, row):,}"

    for label, values in folded([row for row in plan.mixers if row.gathered_before], cells, full):
        table.add_row(label, *values)
    return table

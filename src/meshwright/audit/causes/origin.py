"""Where a layout begins to differ from one process: the first module whose inputs agree and whose outputs do not."""

from collections.abc import Iterator, Sequence

from meshwright.audit.borders import BorderRow, Point
from meshwright.audit.causes.findings import Finding, Kind, in_ranks
from meshwright.audit.result import RankResult
from meshwright.plan.axes.pipeline.stage_plan import stages_with
from meshwright.plan.result.border_places import Side
from meshwright.plan.result.sharding_plan import ShardingPlan

__all__ = ["in_order", "origin_findings"]


def origin_findings(plan: ShardingPlan, ranks: Sequence[RankResult]) -> Iterator[Finding]:
    """Yield at most one finding: for forward, or for backward if all of forward agrees. If all borders agree, there is none.

    There is none either if backward is wrong from its beginning, the gradient of the last output. Then the loss has another
    scale or another formula, and the gradients of parameters show which.
    """
    for gradient, find in ((False, _forward), (True, _backward)):
        rows_of = {result.rank: [row for row in result.borders if row.point.gradient is gradient] for result in ranks}
        firsts = {rank: found for rank, rows in rows_of.items() if (found := _first(plan, rows)) is not None}
        if not firsts:
            continue
        first = min(firsts.values())
        where = [rank for rank, found in firsts.items() if found == first]
        begin = first[1]
        worst = max(where, key=lambda rank: rows_of[rank][begin].error)
        rows = rows_of[worst]
        earliest = min(_time(plan, rows, index) for index in range(len(rows)))
        if gradient and first == earliest and first[0] == min(0, 1 - len(plan.stages)):
            return
        point, wrong = rows[begin].point, _same_border(rows, begin)
        yield find(rows, point, max(row.error for row in wrong), f"on {in_ranks(where)}{_run(rows, point)}")
        return


def in_order(plan: ShardingPlan, rows: Sequence[BorderRow]) -> list[BorderRow]:
    """Return rows of several ranks as the step computes: forward stage by stage, then backward from the last stage."""
    return sorted(rows, key=lambda row: (row.point.gradient, _turn(plan, row.point)))


def _first(plan: ShardingPlan, rows: Sequence[BorderRow]) -> tuple[int, int] | None:
    """Return the time of the earliest row that is wrong."""
    return min((_time(plan, rows, index) for index, row in enumerate(rows) if not row.passed), default=None)


def _time(plan: ShardingPlan, rows: Sequence[BorderRow], index: int) -> tuple[int, int]:
    """Return the turn of a row's stage, since stages compute one after the other, and its place in the rows of its rank."""
    return _turn(plan, rows[index].point), index


def _turn(plan: ShardingPlan, point: Point) -> int:
    stage = min(stages_with(plan, point.module), default=0)
    return -stage if point.gradient else stage


def _same_border(rows: Sequence[BorderRow], index: int) -> list[BorderRow]:
    """Return the wrong rows at the border of a row: several tensors may pass one border."""
    here = rows[index].point
    return [
        row for row in rows
        if not row.passed and (row.point.module, row.point.run, row.point.side) == (here.module, here.run, here.side)
    ]  # fmt: skip


def _run(rows: Sequence[BorderRow], point: Point) -> str:
    runs = {row.point.run for row in rows if row.point.module == point.module}
    return f", in run {point.run + 1} of {len(runs)}" if len(runs) > 1 else ""


def _knows(rows: Sequence[BorderRow], point: Point, side: Side) -> bool:
    """Return whether the given side of a module was compared in the same run of the module."""
    return any((row.point.module, row.point.run, row.point.side) == (point.module, point.run, side) for row in rows)


def _forward(rows: Sequence[BorderRow], point: Point, error: float, where: str) -> Finding:
    names = (point.module,)
    if point.side is Side.INPUT:
        return Finding(
            Kind.FORWARD,
            f"forward diverges before {point.module}: all that was computed before agrees, but its input is off by "
            f"{error:.2g} {where}",
            names,
        )
    before = "its inputs agree" if _knows(rows, point, Side.INPUT) else "all that was computed before agrees"
    return Finding(
        Kind.FORWARD, f"forward diverges in {point.module}: {before}, its output is off by {error:.2g} {where}", names
    )


def _backward(rows: Sequence[BorderRow], point: Point, error: float, where: str) -> Finding:
    names = (point.module,)
    if point.side is Side.OUTPUT:
        return Finding(
            Kind.BACKWARD,
            f"backward diverges behind {point.module}: forward agrees and so does all that backward computed before, and the "
            f"gradient of its output is off by {error:.2g} {where}",
            names,
        )
    before = "the gradient of its output agrees" if _knows(rows, point, Side.OUTPUT) else "all before it agrees"
    return Finding(
        Kind.BACKWARD, f"backward diverges in {point.module}: {before}, that of its input is off by {error:.2g} {where}", names
    )

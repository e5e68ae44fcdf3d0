"""Units and their parameters, which unfold; units that differ only in the number of their layer are one line."""

from html import escape

from meshwright.plan.given.names import generalize
from meshwright.plan.result.sharding_plan import ShardingPlan, UnitRow
from meshwright.plan.show.explain import PARAMETER_COLUMNS, UNIT_COLUMNS, folded, parameter_cells, unit_cells
from meshwright.report.markup import Section, table, tag

__all__ = ["units_section"]

_MEANING = {"reshard": "freed after forward", "AC": "recomputation", "AG": "all-gathers a step", "RS|AR": "reductions a step"}
_SHOWN = ("gathered", "sync", "AC")


def units_section(plan: ShardingPlan) -> Section:
    """Return the part of a page with the units of a plan."""
    alike: dict[tuple[str, tuple[str, ...]], list[UnitRow]] = {}
    for unit in plan.units:
        alike.setdefault((generalize(unit.name), unit_cells(plan, unit)), []).append(unit)
    body = "".join(_unit(plan, units, cells) for (_, cells), units in alike.items())
    buttons = (
        '<div class="controls"><button type="button" data-unfold="units-list">unfold all</button>'
        '<button type="button" data-fold="units-list">fold all</button></div>'
    )
    lead = (
        f"{len(plan.fsdp_units):,} units of {sum(row.numel for row in plan.parameters):,} parameters. FSDP gathers and reduces "
        "the parameters of a unit together. Units that differ only in the number of their layer share a line."
    )
    return Section("units", "Units and parameters", buttons + tag("div", body, id="units-list", class_="tree"), {}, lead)


def _unit(plan: ShardingPlan, units: list[UnitRow], cells: tuple[str, ...]) -> str:
    unit, values = units[0], dict(zip(UNIT_COLUMNS, cells, strict=True))
    label = unit.label if len(units) == 1 else f"{generalize(unit.name)} ({len(units)})"
    facts = "".join(f"<span>{escape(values[name])}</span>" for name in _SHOWN if values[name])
    summary = tag("summary", f"<b>{escape(label)}</b>{facts}")
    about = table(
        ("of the unit", "value"),
        [(_MEANING.get(name, name), value) for name, value in values.items() if value],
        class_="plain headless narrow",
        caption=f"Unit {label}",
    )
    rows = [] if unit.part_of else plan.rows(unit)
    kept = [place for place, name in enumerate(PARAMETER_COLUMNS) if name != "unit"]
    lines = [(name, *(own[place] for place in kept)) for name, own in folded(rows, parameter_cells, False)]
    columns = ("parameter", *(PARAMETER_COLUMNS[place] for place in kept))
    whose = f"Parameters of {unit.label}" + (f", as of the other {len(units) - 1}" if len(units) > 1 else "")
    inner = table(columns, lines, caption=whose, numeric=[columns.index("per rank")], class_="plain") if lines else ""
    return tag("details", summary + about + inner)

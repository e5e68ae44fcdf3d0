"""The page about a plan: what it forecasts, when, of what, and where."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from rich.console import Group
from rich.table import Table

from meshwright.plan.cost.hardware import Hardware
from meshwright.plan.result.differences import PlanDifference
from meshwright.plan.show.explain import explain
from meshwright.plan.show.summary import human_bytes, seconds_text, two_digits
from meshwright.report.markup import Section, cards, listed, of_rich, table, tag
from meshwright.report.memory_svg import memory_section
from meshwright.report.mesh_map import mesh_section
from meshwright.report.page import page
from meshwright.report.timeline_svg import timeline_section
from meshwright.report.unit_tree import units_section
from meshwright.trace.in_time.memory_curve import MemoryPoint
from meshwright.trace.in_time.step_timeline import StepTimeline
from meshwright.trace.speedups import Speedup
from meshwright.trace.time import TimeForecast
from meshwright.trace.verdict import Verdict
from meshwright.train.start.setup import RunSetup

__all__ = ["PlanForecast", "forecast_tables", "plan_page"]

_UNITS = "Units"

MOST_DIFFERENCES = 400


@dataclass(frozen=True)
class PlanForecast:
    """What is forecast of a plan on a device.

    Attributes:
        hardware: the device.
        verdict: whether it fits.
        time: how long a step takes.
        timeline: the step in time.
        memory: what each rank of `pp` holds, by time.
        faster: changes that would save time, the best first.
    """

    hardware: Hardware
    verdict: Verdict
    time: TimeForecast
    timeline: StepTimeline
    memory: Mapping[int, Sequence[MemoryPoint]]
    faster: tuple[Speedup, ...] = ()


def plan_page(
    setup: RunSetup,
    title: str,
    *,
    forecast: PlanForecast | None = None,
    standing: str = "",
    refused: Sequence[str] = (),
    differences: tuple[str, Sequence[PlanDifference]] | None = None,
    candidates: Section | None = None,
) -> str:
    """Return the page about a plan.

    Args:
        setup: the run.
        title: what the run is called.
        forecast: what is forecast of it; ``None``: no device was given.
        standing: whether the layout is proven, in words.
        refused: what `train` would refuse, a line each.
        differences: another plan's name, and what differs from it.
        candidates: the candidates of a search, as a part of the page.
    """
    plan = setup.plan
    numel = sum(row.numel for row in plan.parameters)
    device = f" on {forecast.hardware.name}" if forecast else ""
    about = f"{plan.family}, {numel:,} parameters, {plan.layout.world_size:,} ranks ({plan.layout}){device}"
    sections = [_verdict(plan.options.microbatches, forecast, standing, refused)]
    if candidates is not None:
        sections.append(candidates)
    if differences is not None:
        sections.append(_differences(*differences))
    if forecast is not None:
        several = plan.layout.size("pp") > 1
        rank = forecast.verdict.rank
        whose = f"rank {rank} of pp, the fullest" if several else "a rank"
        sections.append(timeline_section(forecast.timeline))
        sections.append(memory_section(forecast.memory[rank], forecast.verdict, forecast.time.step_seconds, whose))
    sections.append(mesh_section(plan, forecast.hardware.gpus_per_node if forecast else None))
    sections.append(units_section(plan))
    shown = explain(plan, parameters=False)
    assert isinstance(shown, Group)
    tables = [one for one in shown.renderables if isinstance(one, Table) and one.title != _UNITS]
    sections.append(Section("plan", "Stored and sent", "".join(map(of_rich, tables)) + listed(plan.remarks, "remarks")))
    return page(title, about, sections)


def _verdict(microbatches: int, forecast: PlanForecast | None, standing: str, refused: Sequence[str]) -> Section:
    proof = (
        tag("p", escape(standing), class_="proof" + (" warn" if not standing.startswith("proven") else "")) if standing else ""
    )
    problems = listed(refused, "refused")
    if forecast is None:
        body = tag("p", "Whether it fits, and how long a step takes: add --gpu with the name of a device.") + proof + problems
        return Section("verdict", "Verdict", body)
    verdict, time, hardware = forecast.verdict, forecast.time, forecast.hardware
    left = human_bytes(abs(verdict.limit_bytes - verdict.peak_bytes))
    figures = cards(
        [
            ("memory", "fits" if verdict.fits else "does not fit", f"{left} {'to spare' if verdict.fits else 'too much'}",
             "good" if verdict.fits else "bad"),
            ("peak of the fullest rank", human_bytes(verdict.peak_bytes), f"of {human_bytes(verdict.limit_bytes)}", ""),
            ("step", f"{seconds_text(time.step_seconds, 2)}", f"{seconds_text(time.low, 2)} to {seconds_text(time.high, 2)}; "
             f"{microbatches:,} {'microbatch' if microbatches == 1 else 'microbatches'}", ""),
            ("tokens/s, a device", two_digits(time.tokens_per_second_per_device), "", ""),
            ("model TFLOP/s, a device", two_digits(time.model_tflops_per_device), f"MFU {time.mfu:.0%}", ""),
        ]
    )  # fmt: skip
    changes = ""
    if verdict.changes:
        rows = [
            (" ".join(change.overrides), human_bytes(change.peak_bytes), "yes" if change.fits else "no", change.cost)
            for change in verdict.changes
        ]
        changes = table(("change", "peak", "fits", "cost"), rows, caption="What would help, the cheapest first", numeric=[1])
    if forecast.faster:
        lines = [
            (
                " ".join(one.overrides),
                seconds_text(one.step_seconds, 2),
                f"{one.saved:.0%}",
                human_bytes(one.peak_bytes),
                one.reason,
            )
            for one in forecast.faster
        ]
        columns = ("change", "step", "saved", "peak", "why")
        changes += table(columns, lines, caption="What would save most time, one at a time", numeric=(1, 2, 3))
    remarks = listed(hardware.remarks, "remarks")
    how = "calibrated" if hardware.calibrated else "not calibrated: their speed is assumed"
    lead = f"A forecast, made without a device; devices are {how}."
    return Section(
        "verdict", "Verdict", figures + proof + problems + changes + forecast_tables(verdict, time) + remarks, {}, lead
    )


def forecast_tables(verdict: Verdict, time: TimeForecast) -> str:
    """Return what the memory and the time of a step are for, as two tables beside each other."""
    memory = _bars(
        f"Memory of the fullest rank, {verdict.moment}",
        [(name.replace("_", " "), size, human_bytes(size)) for name, size in verdict.parts.items() if size],
        verdict.peak_bytes,
    )
    over = {"tp", "cp", "ep", "pp", "data ranks"}
    shown = [
        (f"communication over {name}" if name in over else name, seconds, seconds_text(seconds, 2))
        for name, seconds in time.parts.items()
        if seconds / time.step_seconds >= 0.0005
    ]
    seconds = _bars("Time of a step, what is not hidden", shown, time.step_seconds)
    return tag("div", memory + seconds, class_="pair")


def _bars(caption: str, parts: Sequence[tuple[str, float, str]], whole: float) -> str:
    """Return a table of shares, the largest first, each with a bar."""
    rows = []
    for name, value, text in sorted(parts, key=lambda part: -part[1]):
        share = value / whole
        bar = f'<td class="bar" aria-hidden="true"><span style="width:{100 * share:.1f}%"></span></td>'
        rows.append(
            f'<tr><th scope="row">{escape(name)}</th><td class="n">{escape(text)}</td><td class="n">{share:.1%}</td>{bar}</tr>'
        )
    head = '<tr><th scope="col">part</th><th scope="col" class="n">size</th><th scope="col" class="n">share</th><td></td></tr>'
    inner = f"<caption>{escape(caption)}</caption><thead>{head}</thead><tbody>{''.join(rows)}</tbody>"
    return tag("div", tag("table", inner, class_="bars"), class_="scroll", tabindex=0, role="region", aria_label=caption)


def _differences(name: str, differences: Sequence[PlanDifference]) -> Section:
    """Return the part of a page with what differs from another plan; rows that differ alike in many layers are told once."""
    if not differences:
        return Section("differences", "Differences", tag("p", f"No difference from {escape(name)}."))
    rows = []
    for one in differences[:MOST_DIFFERENCES]:
        if one.field:
            rows.append((one.row, one.field, _short(one.left), _short(one.right)))
        else:
            rows.append((one.row, "", "absent" if one.left is None else "there", "absent" if one.right is None else "there"))
    more = len(differences) - MOST_DIFFERENCES
    note = tag("p", f"... and {more:,} more.", class_="note") if more > 0 else ""
    columns = ("row", "field", "there", "here")
    body = table(columns, rows, caption=f"{len(differences):,} differences from {name}", class_="sortable")
    return Section("differences", "Differences", body + note)


def _short(value: object, most: int = 120) -> str:
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."

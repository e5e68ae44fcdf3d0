"""`meshwright plan`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.arguments import ConfigArgument, DebugOption, OverrideArgument, check_writable, load_run

if TYPE_CHECKING:
    from meshwright.plan.cost.hardware import Hardware
    from meshwright.plan.result.sharding_plan import ShardingPlan
    from meshwright.trace.memory import Traces
    from meshwright.trace.time import TimeForecast
    from meshwright.trace.verdict import Verdict
    from meshwright.train.config import RunConfig
    from meshwright.train.start.setup import RunSetup

__all__ = ["plan"]

MOST_FILES = 5
"""Data files that are named, of those that `train` would refuse."""


_PICTURE = 160
"""Characters of a line of a picture, at most."""


def plan(
    config: ConfigArgument,
    overrides: OverrideArgument = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            "--world-size",
            "-n",
            help="Ranks to plan for; with --search several, such as 8,16,64. Default: those of the layout, or what `train` "
            "starts here.",
            metavar="N",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: every row, and the totals.")] = False,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            help="Say whether it fits into a device, such as h100, l40s or rtx-4090 (a wrong name lists all), or a "
            "YAML file of your own.",
        ),
    ] = None,
    load: Annotated[
        float | None,
        typer.Option(
            "--expert-load", min=1.0, help="With --gpu: tokens of the fullest rank of ep, over an even share. Default: 1."
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="A line for every parameter and unit, layers not folded.")] = False,
    against: Annotated[
        Path | None,
        typer.Option("--diff", help="Print what differs from another plan, a JSON file of `plan --json`."),
    ] = None,
    program: Annotated[
        bool, typer.Option("--program", help="Print what is done to the model, action after action; --json has it too.")
    ] = False,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Draw the schedule of a pipeline: ranks down, time across, without messages.")
    ] = False,
    timeline_svg: Annotated[Path | None, typer.Option("--timeline-svg", help="Write that picture to an SVG file.")] = None,
    search: Annotated[
        bool, typer.Option("--search", help="With --gpu: search the best layouts. What the configuration sets is kept.")
    ] = False,
    free: Annotated[
        str | None,
        typer.Option(
            "--free",
            help="With --search: what may change although the configuration sets it: layout, microbatch, schedule, sync, "
            "recompute, sequence, context, loss, offload, compile, optimizer or all, with commas.",
        ),
    ] = None,
    price: Annotated[
        float | None, typer.Option("--price", min=0.0, help="With --search: what a device costs for an hour.")
    ] = None,
    tried: Annotated[
        int | None,
        typer.Option("--try", min=1, help="With --search: measure so many of the best layouts here, 20 steps of each."),
    ] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the complete configuration and stop.")] = False,
    debug: DebugOption = False,
) -> None:
    """Show what every rank will hold and send. Needs no GPU and no weights; any world size."""
    from meshwright.cli.plan_search import refuse_options, search_layouts, sizes_of

    sizes = sizes_of(ranks)
    world_size = sizes[0] if sizes else None
    run = load_run(config, overrides or [], world_size)
    if print_config:
        typer.echo(run.to_yaml(), nl=False)
        return
    from meshwright.plan.cost.price import priced_json
    from meshwright.plan.show.explain import explain, explain_program
    from meshwright.terminal import console
    from meshwright.train.host import host_lines
    from meshwright.train.proofs.records import Source
    from meshwright.train.proofs.report_or_audit import report_or_audit
    from meshwright.train.start.processes import planned_processes
    from meshwright.train.start.setup import make_setup
    from meshwright.train.start.teacher_setup import with_teacher

    ways = {"--json": as_json, "--diff": against is not None, "--program": program}
    ways["--timeline"] = timeline or timeline_svg is not None
    if len(chosen := [name for name, asked in ways.items() if asked]) > 1:
        from meshwright.errors import ConfigError

        raise ConfigError("cli.exclusive", f"{' and '.join(chosen)}: give one of them")
    if gpu is not None and chosen not in ([], ["--json"]):
        from meshwright.errors import ConfigError

        raise ConfigError("cli.exclusive", f"--gpu: {chosen[0]} prints no forecast; leave one of them out")
    if load is not None and gpu is None:
        from meshwright.errors import ConfigError

        raise ConfigError("cli.exclusive", f"--expert-load={load:g}: is for forecasts; add --gpu")
    from meshwright.plan.cost.hardware import load_hardware
    from meshwright.train.callbacks.make_callbacks import check_callbacks

    hardware = load_hardware(gpu) if gpu is not None else None  # a wrong name is refused before any work
    refuse_options(search=search, gpu=gpu, sizes=sizes, only={"--free": free, "--price": price, "--try": tried}, chosen=chosen)
    if search and hardware is not None:
        search_layouts(
            run,
            sizes or [planned_processes(run)],
            hardware,
            config=config,
            overrides=overrides or [],
            free=free,
            load=load or 1.0,
            price=price,
            tried=tried,
            as_json=as_json,
        )
        return
    setup = with_teacher(make_setup(run, world_size or planned_processes(run), planning=True))
    sharding_plan = setup.plan
    check_callbacks(run, sharding_plan)
    if against is not None:
        differences = [str(item) for item in _plan_in(against).diff(sharding_plan)]
        typer.echo("\n".join(differences) or "no difference")
        return
    if as_json:
        more: dict[str, Any] = {}
        if hardware is not None:
            from meshwright.trace.speedups import find_speedups

            verdict, seconds, traces = _forecasts(setup, hardware, load)
            more = {"verdict": verdict.to_dict(), "time": seconds.to_dict(), "remarks": list(hardware.remarks)}
            more["faster"] = [one.to_dict() for one in find_speedups(setup, hardware, traces, verdict, seconds)]
        typer.echo(priced_json(sharding_plan, more))
        return
    page = console()
    if timeline or timeline_svg is not None:
        from meshwright.errors import ConfigError
        from meshwright.plan.show import pipeline_picture as pictures

        if not sharding_plan.stages:
            raise ConfigError("cli.exclusive", "--timeline: the layout has no pipeline; it needs layout.pp > 1")
        if timeline_svg is not None:
            check_writable("--timeline-svg", timeline_svg, config)
            timeline_svg.write_text(pictures.timeline_svg(sharding_plan), encoding="utf-8")
        if timeline:
            page.print(pictures.timeline(sharding_plan, min(page.width, _PICTURE)))
    elif program:
        page.print(explain_program(sharding_plan, full=full))
    else:
        page.print(explain(sharding_plan, full=full))
        for line in (*run.own_parts, *host_lines(run, sharding_plan)):
            page.print(line, highlight=False, markup=False, soft_wrap=True)
        if hardware is not None:
            from meshwright.trace.show import show_remarks, show_speedups, show_time, show_verdict
            from meshwright.trace.speedups import find_speedups

            verdict, seconds, traces = _forecasts(setup, hardware, load)
            page.print(show_verdict(verdict, hardware), show_time(seconds, calibrated=hardware.calibrated))
            faster = find_speedups(setup, hardware, traces, verdict, seconds)
            page.print(show_speedups(faster), show_remarks(hardware), highlight=False)
        else:
            page.print("Whether it fits, and how long a step takes: --gpu h100 (or another one)", highlight=False)
        report_or_audit(setup, Source(str(config), tuple(overrides or ())), None)
        for line in [*_refused_data(run), *_refused_paths(run)]:
            page.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)


def _refused_data(run: "RunConfig") -> list[str]:
    """Say which data files or folder `train` would refuse, as far as names and sizes show. A plan needs none of them."""
    from meshwright.data.rows.own_rows import part_problems

    problems = run.data.problems() + part_problems(run.data)
    lines = [f"{problem}; `train` would refuse it, a plan reads no data" for problem in problems[:MOST_FILES]]
    return lines + ([f"... and {len(problems) - MOST_FILES} more such files"] if len(problems) > MOST_FILES else [])


def _refused_paths(run: "RunConfig") -> list[str]:
    """Say which directories `train` would refuse, of those that a plan does not read."""
    from meshwright.checkpoint.directory import latest
    from meshwright.paths import no_directory, possible_hub_name
    from meshwright.train.start.run_files import Paths

    values = {}
    if run.checkpoint.resume not in ("auto", "never"):
        values["checkpoint.resume"] = run.checkpoint.resume
    elif latest(Paths(run.directory).checkpoints) is None:  # a run that resumes reads neither
        if run.adapter is not None and run.adapter.path is not None:
            values["adapter.path"] = run.adapter.path
        if run.tokenizer.path is not None and not possible_hub_name(run.tokenizer.path):  # the hub is not asked
            values["tokenizer.path"] = run.tokenizer.path
    absent = [no_directory(knob, value, hub=False) for knob, value in values.items()]
    return [f"{line}; `train` would refuse it, a plan does not read it" for line in absent if line]


def _forecasts(setup: "RunSetup", hardware: "Hardware", load: float | None) -> "tuple[Verdict, TimeForecast, Traces]":
    from meshwright.trace.memory import Traces
    from meshwright.trace.time import forecast_time
    from meshwright.trace.verdict import judge

    traces = Traces(setup, load=load or 1.0)
    return judge(setup, hardware, traces), forecast_time(setup, hardware, traces), traces


def _plan_in(path: Path) -> "ShardingPlan":
    from meshwright.errors import ConfigError, MeshwrightError, described
    from meshwright.plan.result.sharding_plan import ShardingPlan

    try:
        return ShardingPlan.from_json(path.read_text())
    except OSError as error:
        raise ConfigError("cli.diff", f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MeshwrightError) as error:
        raise ConfigError(
            "cli.diff", f"--diff={path}: is no plan of `plan --json` of this version: {described(error)}"
        ) from error

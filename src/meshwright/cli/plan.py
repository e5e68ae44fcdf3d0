"""`meshwright plan`."""

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.arguments import ConfigArgument, DebugOption, OverrideArgument, check_writable, is_loop, load_run
from meshwright.cli.plan_files import PlanFiles, write_search

if TYPE_CHECKING:
    from meshwright.plan.result.sharding_plan import ShardingPlan
    from meshwright.train.config import RunConfig

__all__ = ["plan"]

MOST_FILES = 5
"""Data files that are named, of those that `train` would refuse."""


_OBJECTS = 20_000
"""Objects that are made before cycles are looked for, by default 700: to look through a large model often takes a tenth of the
time of its plan."""

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
    trace_out: Annotated[
        Path | None, typer.Option("--trace-out", help="With --gpu: write the forecast in time to a file for ui.perfetto.dev.")
    ] = None,
    trace_with: Annotated[
        Path | None,
        typer.Option("--trace-with", help="A trace of a real step (callbacks: [profile]), which --trace-out puts below it."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", help="Write a page: verdict, the step in time, memory, ranks and units; with --diff, differences."
        ),
    ] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the complete configuration and stop.")] = False,
    debug: DebugOption = False,
) -> None:
    """Show what every rank will hold and send. Needs no GPU and no weights; any world size."""
    from meshwright.cli.plan_search import refuse_options, search_layouts, sizes_of

    gc.set_threshold(_OBJECTS)
    sizes = sizes_of(ranks)
    world_size = sizes[0] if sizes else None
    if search and is_loop(config):
        from meshwright.errors import ConfigError

        raise ConfigError("cli.exclusive", f"--search: {config} is a loop of your own, which sets all keys; search a YAML file")
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
    shown = [*chosen, *(["--full"] if full else [])]
    refuse_options(search=search, gpu=gpu, sizes=sizes, only={"--free": free, "--price": price, "--try": tried}, chosen=shown)
    if gpu is not None and chosen not in ([], ["--json"], *([["--diff"]] if html else [])):
        from meshwright.errors import ConfigError

        raise ConfigError("cli.exclusive", f"--gpu: {chosen[0]} prints no forecast; leave one of them out")
    if load is not None and gpu is None:
        from meshwright.errors import ConfigError

        raise ConfigError("cli.exclusive", f"--expert-load={load:g}: is for forecasts; add --gpu")
    from meshwright.plan.cost.hardware import load_hardware
    from meshwright.train.callbacks.make_callbacks import check_callbacks

    files = PlanFiles(config, trace_out, trace_with, html)
    files.check(gpu, chosen)
    hardware = load_hardware(gpu) if gpu is not None else None  # a wrong name is refused before any work
    files.measured  # noqa: B018  # and so is a wrong file
    if search and hardware is not None:
        files.check_search(sizes)
        answers = search_layouts(
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
        line = "" if html is None else write_search(files, answers[0], overrides or [], hardware, load or 1.0)
        if line and not as_json:
            typer.echo(line)
        return
    setup = with_teacher(make_setup(run, world_size or planned_processes(run), planning=True))
    sharding_plan = setup.plan
    check_callbacks(run, sharding_plan)
    forecasts = None
    if hardware is not None:
        from meshwright.trace.forecasts import Forecasts

        forecasts = Forecasts(setup, hardware, load or 1.0)
    source, refused = Source(str(config), tuple(overrides or ())), [*_refused_data(run), *_refused_paths(run)]
    if against is not None:
        differences = _plan_in(against).diff(sharding_plan)
        typer.echo("\n".join(map(str, differences)) or "no difference")
        files.write(setup, forecasts, source, differences=(str(against), differences))
        return
    if as_json:
        more: dict[str, Any] = {}
        if forecasts is not None:
            verdict, seconds = forecasts.verdict.to_dict(), forecasts.time.to_dict()
            more = {"verdict": verdict, "time": seconds, "remarks": list(forecasts.hardware.remarks)}
            more["faster"] = [one.to_dict() for one in forecasts.faster]
        files.write(setup, forecasts, source, refused=refused, faster=forecasts.faster if forecasts else ())
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
        if forecasts is not None:
            from meshwright.trace.show import show_remarks, show_speedups, show_time, show_verdict

            device = forecasts.hardware
            page.print(show_verdict(forecasts.verdict, device), show_time(forecasts.time, calibrated=device.calibrated))
            if sys.stderr.isatty() and forecasts.verdict.fits and setup.teacher is None:
                typer.echo("looking for changes that save time; each may take a trace of some seconds", err=True)
            page.print(show_speedups(forecasts.faster), show_remarks(device), highlight=False)
        else:
            page.print("Whether it fits, and how long a step takes: --gpu h100 (or another one)", highlight=False)
        report_or_audit(setup, source, None)
        for line in refused:
            page.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)
        for line in files.write(setup, forecasts, source, refused=refused, faster=forecasts.faster if forecasts else ()):
            page.print(line, highlight=False, markup=False, soft_wrap=True)


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

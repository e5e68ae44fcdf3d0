"""`meshwright`: one command with subcommands. Each of them imports the heavy libraries that it needs, so help is instant."""

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from meshwright.cli.arguments import ConfigArgument, DebugOption, OverrideArgument, check_writable, is_loop, load_run
from meshwright.cli.doctor import doctor
from meshwright.cli.generate import generate
from meshwright.cli.plan import plan
from meshwright.cli.plot import plot
from meshwright.cli.problems import show_problems
from meshwright.cli.score import score
from meshwright.cli.unknown_option import suggest
from meshwright.errors import InterruptError, MeshwrightError, StoppedError, WorkerError, described, during, shortened
from meshwright.quiet import quiet

if TYPE_CHECKING:
    from meshwright.audit.report import AuditReport
    from meshwright.train.config import RunConfig
    from meshwright.train.start.setup import RunSetup

__all__ = ["app", "main"]


class _Verbs(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Run a subcommand. Ctrl-C and an unexpected end of file, of which click would print little or nothing, are errors like
        any other; an unknown option is refused with what was meant.
        """
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise _interrupted(error, ctx.invoked_subcommand) from error
        except EOFError as error:
            raise WorkerError("worker.exception", described(error)) from error
        except Exception as error:
            if (interruption := _behind(error)) is not None:
                raise _interrupted(interruption, ctx.invoked_subcommand) from error
            suggest(error)
            raise


def _behind(error: BaseException) -> KeyboardInterrupt | None:
    """Return the interruption that an error comes from: imports turn one into an error of theirs.

    Python 3.11 does so in ``__set_name__``, and transformers with each error of an import.
    """
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, KeyboardInterrupt):
        seen = seen.__cause__ or seen.__context__
    return seen


def _interrupted(error: KeyboardInterrupt, verb: str | None) -> InterruptError:
    """The error for an interruption. Training itself takes Ctrl-C as a wish to end, so a run has not begun yet."""
    notes = getattr(error, "__notes__", ())
    words = f"interrupted while {notes[0]}" if notes else "interrupted"
    return InterruptError("run.interrupted", f"{words}, before the first step; nothing is lost" if verb == "train" else words)


app = typer.Typer(
    name="meshwright",
    cls=_Verbs,
    help="Train Hugging Face and PyTorch models in parallel, from one plan. [bold]plan[/bold] it on a laptop, "
    "[bold]audit[/bold] it on two CPUs, [bold]train[/bold] it anywhere, [bold]export[/bold] it to the hub's format.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        import meshwright

        typer.echo(f"meshwright {meshwright.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


app.command()(plan)


@app.command()
def train(
    config: ConfigArgument,
    overrides: OverrideArgument = None,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", min=1, help="Worker processes on this machine. Default: launch.nproc, or one for each GPU."),
    ] = None,
    audit_first: Annotated[
        bool, typer.Option("--audit", help="Audit the layout first if it is not proven; if it fails, do not start.")
    ] = False,
    fast: Annotated[
        bool, typer.Option("--fast", help="Of large tokens that are there already, compare only a sample with their digests.")
    ] = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the complete configuration and stop.")] = False,
    debug: DebugOption = False,
) -> None:
    """Train: plan, check, start the workers, save, resume, export.

    Started by torchrun or Slurm, this process is one of their workers.
    """
    from meshwright.train.config import load_config

    run = load_config(config, [*(overrides or []), *([f"launch.nproc={nproc}"] if nproc else [])])
    if print_config:
        typer.echo(run.to_yaml(), nl=False)
        return
    with during("libraries are loaded"):
        from meshwright.trace.background import command as forecast
        from meshwright.train.proofs.records import Source
        from meshwright.train.start.launch import launch

    source = Source(str(config), tuple(overrides or ()))
    prove = _prove if audit_first else None
    try:
        launch(run, debug=debug, source=source, prove=prove, forecast=forecast, nproc=nproc, fast=fast)
    except StoppedError:
        _report(run)
        raise
    _report(run)


@app.command()
def audit(
    config: ConfigArgument,
    overrides: OverrideArgument = None,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", min=2, max=64, help="Processes. Default: launch.nproc, or as few as the layout needs."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps.")] = 3,
    dtype: Annotated[str, typer.Option("--dtype", help="Arithmetic: float64, float32 or bfloat16.")] = "float64",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the whole report to a file.", show_default=False)
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page about it to a file.", show_default=False)
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="As launch.device: auto, cpu, accelerator or a kind of device.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Audit the model as it is, not a small one of its kind.")] = False,
    drawn: Annotated[bool, typer.Option("--drawn", help="Feed random tokens instead of the run's documents.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds without progress that are a hang.")] = 30.0,
    debug: DebugOption = False,
) -> None:
    """Prove a layout: the gradients of many processes against those of one, parameter by parameter.

    Of a loop of your own: my_loop.py:make_engine, a function that returns its meshwright.Engine.

    Exit code 0: the layout computes what one process does. 1: it does not, and the last line says what is wrong.
    """
    from meshwright.audit.conduct import audit as run_audit
    from meshwright.errors import WorkerError
    from meshwright.ranks.hang import HangError
    from meshwright.terminal import console

    run = load_run(config, [*(overrides or []), *([] if device is None else [f"launch.device={device}"])], nproc)
    drawn = drawn or is_loop(config)  # its data are its own
    if json_file is not None:
        check_writable("--json", json_file, config)
    if html is not None:
        check_writable("--html", html, config)
        from meshwright.report.audit_page import audit_page, failed_page
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes and temporary files end with this one
    try:
        report = run_audit(run, nproc=nproc, steps=steps, dtype=dtype, full=full, drawn=drawn, patience=timeout, say=typer.echo)
    except WorkerError as error:
        if json_file is not None:
            kind = "HANG" if isinstance(error, HangError) else "ERROR"
            content = {
                "passed": False,
                "verdict": f"{kind}: {error.problems[0]}",
                "problems": list(error.problems),
                "codes": list(error.codes),
            }
            json_file.write_text(json.dumps(content))
        if html is not None:
            html.write_text(failed_page(config.stem, error.problems), encoding="utf-8")
        raise
    console().print(report.explain())
    if json_file is not None:
        json_file.write_text(report.to_json())
    if html is not None:
        html.write_text(audit_page(report, config.stem), encoding="utf-8")
    typer.echo(report.verdict)
    if not report.passed:
        _end(1)


@app.command()
def calibrate(
    config: ConfigArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file to write, for plan --gpu.", show_default=False)],
    overrides: OverrideArgument = None,
    nproc: Annotated[int | None, typer.Option("--nproc", min=1, help="Processes. Default: as `train` would start.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file, if there is one.")] = False,
    debug: DebugOption = False,
) -> None:
    """Measure this machine in a minute, with the shapes of a run, for forecasts."""
    from meshwright.errors import ConfigError

    check_writable("FILE", file, config)
    if file.exists() and not overwrite:
        raise ConfigError("cli.exists", f"FILE={file}: exists already; --overwrite replaces it")
    import yaml

    from meshwright.train.config import load_config
    from meshwright.train.start.processes import planned_processes
    from meshwright.train.start.setup import make_setup

    run = load_config(config, overrides or [])
    processes = nproc or planned_processes(run)
    setup = make_setup(run, processes)
    from meshwright.device import default_kind
    from meshwright.trace.calibrate import calibrate as measured

    values = measured(setup, processes, default_kind())
    text = yaml.safe_dump(values, sort_keys=False)
    file.write_text(text + "# nic_gb_s and nic_us were not measured: one machine has no other. They are those of its links.\n")
    typer.echo(f"{text}-> {file}; use it with: meshwright plan {config} --gpu {file}")


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a run's directory: its newest.", show_default=False)],
    directory: Annotated[Path, typer.Argument(help="Directory to write.", show_default=False)],
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: export_dtype of the run.")] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter/--merged", help="Of an adapter: itself, for peft; or merged into its model.")
    ] = False,
    ema: Annotated[bool, typer.Option("--ema", help="The moving average of the run (callbacks: [ema]).")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export in the directory.")] = False,
    debug: DebugOption = False,
) -> None:
    """Write a checkpoint as a Hugging Face directory: safetensors, config, tokenizer."""
    from meshwright.checkpoint.directory import latest
    from meshwright.checkpoint.export import export_checkpoint
    from meshwright.errors import CheckpointError, ConfigError
    from meshwright.paths import mistaken, no_directory

    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise ConfigError("cli.dtype", f"--dtype={dtype}: legal are float32, bfloat16, float16")
    if absent := no_directory("CHECKPOINT", str(checkpoint), hub=False):
        raise CheckpointError(absent)
    newest = checkpoint if (checkpoint / "meta.json").is_file() else latest(checkpoint / "checkpoints")
    if newest is None:
        instead = mistaken(checkpoint, "checkpoint")
        raise CheckpointError(
            "checkpoint.incomplete", f"{checkpoint}: neither a complete checkpoint nor a run that has one{instead}"
        )
    export_checkpoint(newest, directory, dtype, adapter=adapter, average="ema" if ema else "", overwrite=overwrite)
    typer.echo(f"{newest} -> {directory}")


app.command()(generate)
app.command()(score)
app.command()(plot)
app.command()(doctor)


def _report(run: "RunConfig") -> None:
    """Write the page about a run that has ended, if the configuration asks for it; one process of a run does so."""
    if not run.metrics.html or os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0":
        return
    from meshwright.report.run_page import write_run_page

    typer.echo(f"report {write_run_page(run.directory)}")


def _prove(setup: "RunSetup") -> "AuditReport":
    """Run the audit of `train --audit`, which is that of the command that is printed for an unproven layout."""
    from meshwright.audit.conduct import audit as run_audit
    from meshwright.terminal import console
    from meshwright.train.proofs.records import audit_arguments

    run, nproc = audit_arguments(setup)
    dtype = "float32" if run.parallel.compile else "float64"
    report = run_audit(run, nproc=nproc, dtype=dtype, say=typer.echo)
    if not report.passed:
        console().print(report.explain())
    return report


def _end(code: int) -> NoReturn:
    """Exit; at once if a failure left a process group, because the interpreter's shutdown would wait for it or crash."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def main() -> None:
    """Entry point: an error of the user gives one clear message and an exit code, without a traceback."""
    debug = "--debug" in sys.argv
    if not debug:
        quiet()
    try:
        app()
    except MeshwrightError as error:
        if debug:
            traceback.print_exc()
        expected = isinstance(error, StoppedError | InterruptError)
        if not isinstance(error, InterruptError) or os.environ.get("RANK", "0") == "0":  # of many ranks, one says it
            show_problems(error.problems, kind="" if expected else "error: ", whole=debug)
        _end(error.exit_code)
    except Exception as error:
        if debug:
            raise
        print(f"error: {shortened(described(error))} (run again with --debug for the traceback)", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()

"""`meshwright plot`: the metrics of runs as a picture."""

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.arguments import DebugOption, check_writable

__all__ = ["plot"]


def plot(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of runs, or files of metrics.", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="File to write: .svg or .png.", show_default=False)],
    by: Annotated[str, typer.Option("--by", help="step, or tokens: what goes to the right.")] = "step",
    debug: DebugOption = False,
) -> None:
    """Draw the loss, the norm of the gradient, the throughput and the memory of one or several runs."""
    from meshwright.errors import ConfigError
    from meshwright.report.plots import FORMATS, draw
    from meshwright.report.run_metrics import read_metrics

    if out.suffix not in FORMATS:
        raise ConfigError("cli.file", f"--out={out}: legal are names that end with {' or '.join(FORMATS)}")
    if by not in ("step", "tokens"):
        raise ConfigError("cli.by", f"--by={by}: legal are step, tokens")
    for run in runs:
        check_writable("--out", out, run)
    found = [read_metrics(run) for run in runs]
    for one in found:
        if one.unread:
            typer.echo(f"{one.directory}: {one.unread} lines cannot be read; left out")
    draw(found, out, by=by, say=typer.echo)
    typer.echo(str(out))

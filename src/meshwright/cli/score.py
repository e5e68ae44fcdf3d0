"""`meshwright score`: what a model says of each token of a data set, on any layout, as a file of rows."""

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.arguments import DebugOption, OverrideArgument, check_writable
from meshwright.errors import during

__all__ = ["score"]


def score(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="YAML file of a run: the model that it begins with. Or a run's directory, or a checkpoint: its weights.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write: .jsonl or .parquet.", show_default=False)],
    overrides: OverrideArgument = None,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Likeliest words to write in the place of each token.")] = 0,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", min=1, help="Worker processes on this machine. Default: launch.nproc, or one for each GPU."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file, if there is one.")] = False,
    debug: DebugOption = False,
) -> None:
    """Write the log-probability of each token of the documents of a run, a row for each document, and print the perplexity.

    The rows are those of data.format=tokens, so a run can read them; their other columns are for its data.tensors.
    """
    from meshwright.errors import ConfigError

    check_writable("OUT", out, run)
    with during("libraries are loaded"):
        from meshwright.train.start.launch import launch
        from meshwright.train.start.scoring import SUFFIXES, ScoreJob, config_to_score, run_to_score
    if out.suffix not in SUFFIXES:
        raise ConfigError("cli.file", f"OUT={out}: legal are names that end with {' or '.join(SUFFIXES)}")
    if out.exists() and not overwrite:
        raise ConfigError("cli.exists", f"OUT={out}: exists already; --overwrite replaces it")
    config, checkpoint = run_to_score(run, [*(overrides or []), *([f"launch.nproc={nproc}"] if nproc else [])])
    work = out.absolute().with_name(f".{out.name}-work")
    job, rank = ScoreJob(out.absolute(), work, checkpoint, top_k), os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    try:
        if rank == "0":  # what a command that was killed has left
            shutil.rmtree(work, ignore_errors=True)
        launch(config_to_score(config, work, checkpoint), debug=debug, nproc=nproc, job=job)
    finally:
        if rank == "0":
            shutil.rmtree(work, ignore_errors=True)

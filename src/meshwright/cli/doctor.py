"""`meshwright doctor`: what this installation has."""

import json
import os
import sys
from typing import Annotated

import typer

from meshwright.cli.arguments import DebugOption

__all__ = ["doctor"]


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False, debug: DebugOption = False) -> None:
    """Check this installation: versions, devices, and the private names of torch and transformers that are used."""
    import torch
    import transformers

    import meshwright
    from meshwright.device import accelerator, count, device_name
    from meshwright.distributed import _torch_compat
    from meshwright.models import _transformers_compat

    _torch_compat.check()
    _transformers_compat.check()
    kind = accelerator()
    facts = {
        "meshwright": meshwright.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
        "cpus": os.cpu_count(),
        "accelerator": kind,
        "gpus": [] if kind is None else [device_name(kind, index) for index in range(count())],
    }
    if as_json:
        typer.echo(json.dumps(facts))
        return
    for name, value in facts.items():
        typer.echo(f"{name:>14}  {value}")
    typer.echo("all private names that Meshwright uses are there")
    for line in filter(None, (_torch_compat.untested(), _transformers_compat.untested())):
        typer.echo(line)

"""Arguments that several commands have, and checks of their values."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["ConfigArgument", "DebugOption", "OverrideArgument", "check_writable"]

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.", show_default=False)]
OverrideArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Overrides, such as [cyan]layout.dp_replicate=2 optimizer.lr=1e-4[/cyan].",
        show_default=False,
    ),
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def check_writable(option: str, file: Path, config: Path) -> None:
    """Refuse a file that cannot be written, or must not be, before any work is done.

    Args:
        option: what names the file.
        file: the file.
        config: the configuration that the command reads.

    Raises:
        ConfigError: it is a directory, its directory does not exist, or it is the configuration itself.
    """
    from meshwright.errors import ConfigError

    if file.is_dir() or not file.absolute().parent.is_dir():
        raise ConfigError("cli.file", f"{option}={file}: is a directory, or its directory does not exist")
    if file.resolve() == config.resolve():
        raise ConfigError("cli.file", f"{option}={file}: is the configuration itself; choose another file")

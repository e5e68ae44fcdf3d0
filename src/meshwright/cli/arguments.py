"""Arguments that several commands have, and checks of their values."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from meshwright.train.config import RunConfig

__all__ = ["ConfigArgument", "DebugOption", "OverrideArgument", "check_writable", "is_loop", "load_run"]

ConfigArgument = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file of the run, or my_loop.py:make_engine.", show_default=False)
]
OverrideArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Overrides, such as [cyan]layout.dp_replicate=2 optimizer.lr=1e-4[/cyan].",
        show_default=False,
    ),
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def is_loop(config: Path) -> bool:
    """Whether an argument names a function of a file, as ``my_loop.py:make_engine``."""
    return config.name.rpartition(":")[0].endswith(".py")


def load_run(config: Path, overrides: Sequence[str], world_size: int | None = None) -> "RunConfig":
    """Return the configuration of a YAML file, or of the engine that a function of a file makes.

    Args:
        config: the file, or ``my_loop.py:make_engine``.
        overrides: of the form ``section.key=value``.
        world_size: number of ranks of an engine; ``None``: the smallest that its layout takes.
    """
    from meshwright.train.config import load_config

    if not is_loop(config):
        return load_config(config, overrides)
    from meshwright.train.engine.loop_audit import config_of_loop

    return config_of_loop(str(config), overrides, world_size)


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

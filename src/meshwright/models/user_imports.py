"""Imports modules of the user before a run's model is built: strategies, models and tokenizers that register themselves."""

import os
import sys
from collections.abc import Iterable
from importlib import import_module

from meshwright.errors import ConfigError, MeshwrightError, Problems, described

__all__ = ["import_modules"]


def import_modules(names: Iterable[str]) -> None:
    """Import modules by name. They are searched for as by ``python -m``, but in the working directory last.

    Args:
        names: dotted names, as in an import statement. A module that is imported already is not imported again.

    Raises:
        ConfigError: one line for each module that cannot be imported, with its name and the reason.
    """
    here, problems = os.getcwd(), Problems()
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            problems.add(
                "config.imports",
                f"imports: {name!r} is no name of a module; legal are names as in an import statement: my_family",
            )
            continue
        if here not in sys.path:  # not first, so that a file of that directory cannot replace a library
            sys.path.append(here)
        try:
            import_module(name)
        except MeshwrightError as error:
            problems.extend(line.within(f"imports: {name!r}: ") for line in error.problems)
        except Exception as error:
            problems.add("config.imports", f"imports: {name!r} cannot be imported: {described(error)}")
    if problems:
        raise ConfigError(problems)

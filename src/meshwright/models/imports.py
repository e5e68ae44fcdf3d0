"""Modules of the user that a run imports before its model is built: strategies, models, tokenizers that register themselves."""

import os
import sys
from collections.abc import Iterable
from importlib import import_module

from meshwright.errors import ConfigError, MeshwrightError, described

__all__ = ["import_modules"]


def import_modules(names: Iterable[str]) -> None:
    """Import modules by name. They are looked for as ``python -m`` does it, and the working directory comes last.

    Args:
        names: dotted, as in an import statement. One that is imported already is left as it is.

    Raises:
        ConfigError: a line for each module that cannot be imported, with its name and why.
    """
    here, found = os.getcwd(), []
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            found.append(f"imports: {name!r} is no name of a module; legal are names as in an import statement: my_family")
            continue
        if here not in sys.path:  # not first: a file of that directory is not to stand in for a library
            sys.path.append(here)
        try:
            import_module(name)
        except MeshwrightError as error:
            found.extend(f"imports: {name!r}: {line}" for line in error.problems)
        except Exception as error:
            found.append(f"imports: {name!r} cannot be imported: {described(error)}")
    if found:
        raise ConfigError(found)

"""A loop of one's own as a configuration, so that `audit` and `plan` take the function that makes its engine."""

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshwright.distributed.class_names import class_name
from meshwright.errors import ConfigError
from meshwright.objectives.call import in_part
from meshwright.train.config import RunConfig, overridden
from meshwright.train.engine.loop_setup import OwnLoop
from meshwright.train.start.setup import describe_model
from meshwright.user_code import part_of

__all__ = ["config_of_loop", "tell_loop"]


class _CapturedError(BaseException):
    """Raised in the place where an engine would be made, with what its loop says."""

    def __init__(self, loop: OwnLoop) -> None:
        self.loop = loop


_capturing = False


def tell_loop(loop: OwnLoop) -> None:
    """End here, if only what a loop says is asked for."""
    if _capturing:
        raise _CapturedError(loop)


def config_of_loop(name: str, overrides: Iterable[str] = (), world_size: int | None = None) -> RunConfig:
    """Return the configuration of the engine that a function makes. The engine is not made.

    Args:
        name: ``my_loop.py:make_engine``, a function without arguments.
        overrides: of the form ``section.key=value``.
        world_size: number of ranks; ``None``: the smallest that the layout takes.

    Raises:
        ConfigError: there is no such function, it makes no engine, or its model or objective cannot be made from a name.
        PartError: it raises something.
    """
    global _capturing
    file, _, function = name.rpartition(":")
    make = _found(Path(file), function)
    _capturing = True
    try:
        with in_part(f"loop {name}", function):
            make()
    except _CapturedError as captured:
        loop = captured.loop
    else:
        raise ConfigError("engine.loop", f"{name}: makes no engine; legal is a function that returns meshwright.Engine(...)")
    finally:
        _capturing = False
    content = loop.config.model_dump(mode="json")
    if loop.objective is not None:
        content["training"]["objective"] = part_of(f"{name}: objective", loop.objective)
    config = overridden(content, overrides)
    ranks = world_size or config.layout.layout().fewest() or 1  # the refusal of 1 says what is legal
    config = OwnLoop(config, None, None, True).resolved(ranks).config
    if loop.model is not None:
        built = class_name(describe_model(config, planning=True)[1])
        if built != class_name(loop.model):
            said = f"its model is {class_name(loop.model)}, and its config makes {built}; register its class (imports)"
            raise ConfigError("engine.loop", f"{name}: {said}")
    return config


def _found(file: Path, function: str) -> Any:
    if not file.is_file():
        raise ConfigError("engine.loop", f"{file}: no such file")
    folder = str(file.resolve().parent)
    if folder not in sys.path:  # as `python my_loop.py` has it
        sys.path.insert(0, folder)
    with in_part(f"loop {file}", "import"):
        if (module := sys.modules.get(file.stem)) is None:
            spec = importlib.util.spec_from_file_location(file.stem, file)
            assert spec is not None
            assert spec.loader is not None
            module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        raise ConfigError("engine.loop", f"{file}:{function}: the file has no such function")
    return found

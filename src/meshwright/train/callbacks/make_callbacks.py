"""Makes the callbacks of a run: those of the list `callbacks`, and those that other keys ask for. All are found and checked."""

import difflib
import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from meshwright.errors import ConfigError, MeshwrightError, Problems, Refusal
from meshwright.objectives.call import in_part
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.train.callbacks.callback import HOOKS, Callback
from meshwright.train.config import RunConfig
from meshwright.user_code import PartConfig, find_part, make_part

__all__ = ["OWN", "Named", "check_callbacks", "make_callbacks"]

Named = list[tuple[str, Callback]]
"""Callbacks with their names, in the order in which they are called."""

OWN = {
    "ema": "moving_average:MovingAverage",
    "early_stopping": "early_stopping:EarlyStopping",
    "freeze": "freezing:Freezing",
    "best": "best_checkpoint:BestCheckpoint",
    "sample": "samples:Samples",
    "profile": "profiles:Profiles",
}
"""Names of Meshwright's own callbacks to the module here and the class."""


def _parts(config: RunConfig) -> Iterator[tuple[str, PartConfig]]:
    """Yield the callbacks of a configuration with their keys: those of the list, then those that other keys carry."""
    for number, part in enumerate(config.callbacks):
        yield f"callbacks.{number}", part
    if config.checkpoint.best is not None:
        yield "checkpoint.best", _part("best", dict(config.checkpoint.best))
    if config.sample.every:
        settings = config.sample
        arguments = {
            "every": settings.every,
            "prompts": settings.prompts,
            "tokens": settings.max_new_tokens,
            "raw": settings.raw,
        }
        yield "sample.every", _part("sample", arguments)
    if config.profile is not None:
        yield "profile", _part("profile", dict(config.profile))


def _part(use: str, arguments: dict[str, Any]) -> PartConfig:
    return PartConfig.model_validate({"use": use, "with": arguments})


def make_callbacks(config: RunConfig) -> Named:
    """Return the callbacks of a run. The second one of a name is called ``name#2``.

    Raises:
        ConfigError: all that do not exist, are no class of :class:`~meshwright.Callback`, have hooks that are none, or wrong
            arguments.
    """
    problems, made = Problems(), []
    seen: dict[str, int] = {}
    for where, part in _parts(config):
        try:
            callback = _made(where, part)
        except MeshwrightError as error:
            problems.extend(error.problems)
            continue
        seen[part.use] = seen.get(part.use, 0) + 1
        made.append((part.use if seen[part.use] == 1 else f"{part.use}#{seen[part.use]}", callback))
    if problems:
        raise ConfigError(problems)
    return made


def _made(where: str, part: PartConfig) -> Callback:
    if part.use in OWN:
        module, _, name = OWN[part.use].partition(":")
        kind: Any = getattr(import_module(f"meshwright.train.callbacks.{module}"), name)
    else:
        kind = find_part(where, part.use, "callbacks", OWN)
    if not (isinstance(kind, type) and issubclass(kind, Callback)):
        raise ConfigError("part.signature", f"{where}={part.use}: is no class of meshwright.Callback")
    problems = Problems()
    for name in (name for name in dir(kind) if name.startswith("on_")):
        words = f"{where}={part.use}: "
        if name not in HOOKS:
            near = difflib.get_close_matches(name, HOOKS, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            problems.add("part.signature", f"{words}{name} is no hook; {hint}hooks are {', '.join(HOOKS)}")
            continue
        try:
            inspect.signature(getattr(kind, name)).bind(None, *HOOKS[name])
        except TypeError:
            problems.add("part.signature", f"{words}lacks `def {name}(self, {', '.join(HOOKS[name])})`")
    if problems:
        raise ConfigError(problems)
    return make_part(where, part.use, kind, part.arguments)


def check_callbacks(config: RunConfig, plan: ShardingPlan) -> None:
    """Ask callbacks what is wrong with them in a run, see :meth:`Callback.check`.

    Raises:
        ConfigError: what they say.
        PartError: one raises something.
    """
    found = []
    for name, callback in make_callbacks(config):
        with in_part(f"callback {name}", "check"):
            found += [Refusal("config.callback", f"callback {name}: {line}") for line in callback.check(config, plan)]
    if found:
        raise ConfigError(found)

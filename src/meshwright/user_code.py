"""Code of the user: modules that a run imports, and parts that its configuration names.

A *part* is named as ``module:Name``, such as ``my_parts:Focal``, or by the name that an installed package gives it (entry
points ``meshwright.objectives``, ``.optimizers``, ``.schedules``, ``.sources``, ``.maps``, ``.sinks``). Its arguments are
checked against its own pydantic model ``Options``, if it has one, or else against its signature.
"""

import difflib
import hashlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError, create_model

from meshwright.errors import ConfigError, MeshwrightError, Problems, described

__all__ = [
    "PartConfig",
    "PartName",
    "check_arguments",
    "code_of",
    "find_part",
    "import_modules",
    "make_part",
    "part_of",
    "part_text",
    "raised_by",
]

_OURS = str(Path(__file__).parent)


class PartConfig(BaseModel):
    """A part by name, and its arguments."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, serialize_by_alias=True)

    use: str = Field(min_length=1, description="`module:Name`, or the name that an installed package gives it.")
    arguments: dict[str, Any] = Field(default={}, alias="with", description="Its arguments.")


def _expanded(value: Any) -> Any:
    """Return the long form of a part: a name alone has no arguments."""
    return {"use": value} if isinstance(value, str) else value


def _shortened(part: PartConfig) -> Any:
    return {"use": part.use, "with": dict(part.arguments)} if part.arguments else part.use


PartName = Annotated[PartConfig, BeforeValidator(_expanded), PlainSerializer(_shortened)]
"""A field of the configuration that is a part: a name, or ``{use: name, with: {...}}``."""


def import_modules(names: Iterable[str]) -> None:
    """Import modules by name. They are searched for as by ``python -m``, but in the working directory last.

    Args:
        names: dotted names, as in an import statement. A module that is imported already is not imported again.

    Raises:
        ConfigError: one line for each module that cannot be imported, with its name and the reason.
    """
    problems = Problems()
    for name in names:
        if not _is_dotted(name):
            problems.add(
                "config.imports",
                f"imports: {name!r} is no name of a module; legal are names as in an import statement: my_family",
            )
            continue
        try:
            _import(name)
        except MeshwrightError as error:
            problems.extend(line.within(f"imports: {name!r}: ") for line in error.problems)
        except Exception as error:
            problems.add("config.imports", f"imports: {name!r} cannot be imported: {described(error)}")
    if problems:
        raise ConfigError(problems)


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _import(name: str) -> Any:
    if (here := os.getcwd()) not in sys.path:  # not first, so that a file of that directory cannot replace a library
        sys.path.append(here)
    return import_module(name)


def find_part(where: str, name: str, kind: str, own: Iterable[str] = ()) -> Any:
    """Return a part by its name.

    Args:
        where: the key of the configuration, such as ``training.objective``.
        name: ``module:Name``, or the name of an entry point.
        kind: last word of the group of entry points.
        own: names that are legal too, for the message.

    Raises:
        ConfigError: there is no such part, or it cannot be imported.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        return _installed(where, name, kind, own)
    if not _is_dotted(module) or not _is_dotted(attribute):
        raise ConfigError("config.part", f"{where}={name}: is no name of a part; legal is module:Name, such as my_parts:Focal")
    try:
        found = _import(module)
    except MeshwrightError:
        raise
    except Exception as error:
        raise ConfigError("config.part", f"{where}={name}: {module!r} cannot be imported: {described(error)}") from error
    for step in attribute.split("."):
        names = [other for other in vars(found) if not other.startswith("_")]
        if not hasattr(found, step):
            near = difflib.get_close_matches(step, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(names[:12]) or 'nothing'}"
            raise ConfigError("config.part", f"{where}={name}: {module!r} has no {step!r}{hint}")
        found = getattr(found, step)
    return found


def _installed(where: str, name: str, kind: str, own: Iterable[str]) -> Any:
    known: dict[str, EntryPoint] = {point.name: point for point in entry_points(group=f"meshwright.{kind}")}
    if name not in known:
        legal = ", ".join((*own, *known)) or "none is installed"
        raise ConfigError("config.part", f"{where}={name}: no such part; legal are {legal}, or one of your own as module:Name")
    try:
        return known[name].load()
    except Exception as error:
        said = f"{where}={name}: {known[name].value} of an installed package cannot be imported: {described(error)}"
        raise ConfigError("config.part", said) from error


def make_part(where: str, name: str, target: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a part with its arguments, and return what it makes.

    Args:
        where: the key of the configuration.
        name: the name of the part there.
        target: a class or function.
        arguments: of the configuration.

    Raises:
        ConfigError: wrong arguments, or what the part raises, by name.
    """
    checked = check_arguments(where, target, arguments)
    try:
        return target(**checked)
    except MeshwrightError:
        raise
    except Exception as error:
        raise ConfigError("config.part", f"{where}={name}: cannot be made: {described(error)}") from error


def check_arguments(
    where: str, target: Callable[..., Any], arguments: Mapping[str, Any], given: int | Iterable[str] = ()
) -> dict[str, Any]:
    """Return the arguments of a part, checked and converted.

    Args:
        where: the key of the configuration.
        target: a class or function.
        arguments: of the configuration.
        given: the parameters that Meshwright gives: their names, or how many of the first there are.

    Raises:
        ConfigError: all wrong arguments together, with the legal keys.
    """
    options: Any = getattr(target, "Options", None)
    own = isinstance(options, type) and issubclass(options, BaseModel)
    model: type[BaseModel] | None = options if own else _model_of(target, given)
    if model is None:
        return dict(arguments)
    try:
        checked = model.model_validate(dict(arguments))
    except ValidationError as error:
        raise ConfigError(_problems(where, error, list(model.model_fields))) from None
    names = model.model_fields if own else arguments
    return {name: getattr(checked, name) for name in names}


def _model_of(target: Callable[..., Any], given: int | Iterable[str]) -> type[BaseModel] | None:
    """Return the schema of a signature; ``None``: it takes anything, or cannot be read."""
    try:
        parameters = list(inspect.signature(target, eval_str=True).parameters.values())
    except (ValueError, TypeError, NameError):
        return None
    left = parameters[given:] if isinstance(given, int) else [one for one in parameters if one.name not in set(given)]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in left):
        return None
    named = [one for one in left if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    fields: dict[str, Any] = {
        one.name: (
            Any if one.annotation is one.empty else one.annotation,
            ... if one.default is one.empty else Field(default=one.default, validate_default=False),
        )
        for one in named
    }
    return create_model(
        "Arguments", __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=()), **fields
    )


def _problems(where: str, error: ValidationError, legal: list[str]) -> Problems:
    problems = Problems()
    for item in error.errors():
        key = ".".join(map(str, item["loc"]))
        keys = ", ".join(legal) or "none"
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(key, legal, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            problems.add("config.part.arguments", f"{where}.with.{key}: unknown argument; {hint}legal here: {keys}")
        elif item["type"] == "missing":
            problems.add("config.part.arguments", f"{where}.with.{key}: is required; legal here: {keys}")
        else:
            said = f"{item['msg'][0].lower()}{item['msg'][1:]}"
            problems.add("config.part.arguments", f"{where}.with.{key}={item['input']!r}: {said}")
    return problems


def part_of(where: str, value: Any) -> dict[str, Any]:
    """Return an object, a class or a function as a configuration names it.

    Args:
        where: the key of the configuration.
        value: a class, a function, or an object that keeps its arguments as attributes of their names, or in a mapping
            ``arguments``. A mapping or a name is one already.

    Raises:
        ConfigError: it has no name that another process can import, or does not keep its arguments.
    """
    if isinstance(value, str):
        return {"use": value}
    if isinstance(value, Mapping):
        return dict(value)
    made = not (inspect.isroutine(value) or inspect.isclass(value))
    kind: Any = type(value) if made else value
    name = getattr(kind, "__qualname__", repr(kind))
    if "<" in name or not hasattr(kind, "__module__"):
        said = f"{where}: {name} has no name that another process can import; define it at the top of a module"
        raise ConfigError("config.part", said)
    arguments: dict[str, Any] = {}
    if made:
        known, kept = inspect.signature(kind).parameters, getattr(value, "arguments", None)
        arguments = {one: getattr(value, one) for one in known if hasattr(value, one)}
        arguments = dict(kept) if isinstance(kept, Mapping) else arguments
        left = [one for one, parameter in known.items() if one not in arguments and parameter.default is parameter.empty]
        if left := [one for one in left if known[one].kind not in (known[one].VAR_POSITIONAL, known[one].VAR_KEYWORD)]:
            said = f"{where}: {name} does not keep its arguments {', '.join(left)} as attributes of these names"
            raise ConfigError("config.part", said)
        try:
            json.dumps(arguments)
        except (TypeError, ValueError) as error:
            said = f"{where}: an argument of {name} is no plain value, so that no checkpoint can hold it: {error}"
            raise ConfigError("config.part", said) from error
    return {"use": f"{kind.__module__}:{name}", "with": arguments}


def part_text(part: PartConfig) -> str:
    """Return a part in a line, as a person reads it: ``my_parts:Focal (gamma=2.0)``."""
    return part.use + (f" ({', '.join(f'{key}={value}' for key, value in part.arguments.items())})" if part.arguments else "")


def raised_by(error: BaseException) -> str:
    """Return what an exception of a part says, and a line for each place in the user's own code that it came through."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(_OURS)]
    own = [one for one in frames if "site-packages" not in one.filename and "<frozen" not in one.filename]
    lines = "".join(f"\n  {one.filename}:{one.lineno} in {one.name}: {one.line}" for one in own or frames[-1:])
    return f"{described(error)}{lines}"


def code_of(part: Any) -> str:
    """Return a digest of the file of the module that defines a part; its name if it has none."""
    try:
        return hashlib.sha256(Path(inspect.getfile(part)).read_bytes()).hexdigest()[:16]
    except (OSError, TypeError):
        return f"{getattr(part, '__module__', '')}:{getattr(part, '__qualname__', type(part).__qualname__)}"

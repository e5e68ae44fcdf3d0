"""Configuration objects of other libraries: the fields that a manager takes from them."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from meshwright.errors import LayoutError, Refusal, UnsupportedError

__all__ = ["choices_of"]


def choices_of(config: Any, known: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a configuration under the names of the manager.

    Args:
        config: an instance of a dataclass or of another class (with attributes, slots or fields of pydantic), or a mapping.
        known: name of a field to its name in the manager.

    Raises:
        LayoutError: the object has none of these fields, so it is no configuration.
        UnsupportedError: another field is set, to a value that is not its default.
    """
    if isinstance(config, type):
        raise LayoutError("manager.config", f"FSDP2Manager: {config.__name__} is a class; pass an instance of it")
    values = dict(config) if isinstance(config, Mapping) else {name: getattr(config, name) for name in _names(config)}
    if not known.keys() & values.keys():
        raise LayoutError(
            "manager.config", f"FSDP2Manager(dp_size={config!r}): legal are a number, None, or a configuration object"
        )
    defaults = _defaults(config)
    problems = [
        Refusal("manager.config", f"FSDP2Manager(config): {name}={value!r} of {type(config).__name__} is not supported")
        for name, value in values.items()
        if name not in known and value and not callable(value) and value != defaults.get(name, MISSING)
    ]
    if problems:
        raise UnsupportedError(problems)
    return {known[name]: value for name, value in values.items() if name in known}


def _names(config: Any) -> list[str]:
    """Return the names of an object's data: its own attributes, its slots, and the attributes of its classes."""
    class_attributes = [name for kind in type(config).__mro__ for name in (*vars(kind), *vars(kind).get("__annotations__", ()))]
    return [name for name in dict.fromkeys([*getattr(config, "__dict__", ()), *class_attributes]) if _is_field(config, name)]


def _is_field(config: Any, name: str) -> bool:
    """Return whether a name is neither private, nor pydantic's own, nor a method or property."""
    ours = getattr(type(config), name, None)
    if name.startswith(("_", "model_")) or callable(ours) or isinstance(ours, property):
        return False
    return hasattr(config, name)


def _defaults(config: Any) -> dict[str, Any]:
    if is_dataclass(config):
        from_factories = {item.name: item.default_factory() for item in fields(config) if item.default_factory is not MISSING}
        return {item.name: item.default for item in fields(config)} | from_factories
    if isinstance(config, Mapping):
        return {}
    model_fields = getattr(type(config), "model_fields", {})
    defaults = {name: getattr(type(config), name, MISSING) for name in _names(config)}
    return defaults | {name: item.get_default(call_default_factory=True) for name, item in model_fields.items()}

"""The reference page of the configuration, made from the schema.

``python -m meshwright.train.schema.config_page > docs/configuration.md`` writes it.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, get_args, get_origin

from pydantic_core import PydanticUndefined

from meshwright.train.config import RunConfig
from meshwright.user_code import PartConfig

__all__ = ["reference"]

_HEAD = """# Configuration

Made by `python -m meshwright.train.schema.config_page > docs/configuration.md` from the schema in
`src/meshwright/train/config.py`; a test compares the two. A run is a YAML file with these sections; every key can be set on
the command line too, as in `meshwright train run.yaml optimizer.lr=1e-4 layout.dp_replicate=2`. Unknown keys are refused.
`--print-config` prints the complete configuration of a run.
"""


def reference() -> str:
    """Return the whole page as Markdown."""
    plain, sections = [], []
    for name, field in RunConfig.model_fields.items():
        kind = next((item for item in (field.annotation, *get_args(field.annotation)) if hasattr(item, "model_fields")), None)
        if kind is not None:
            rows, words = list(_rows(name, kind)), (kind.__doc__ or "").strip()
            absent = "" if field.annotation is kind else " The section is absent by default."
            sections.append("\n".join([f"\n## {name}\n\n{words}{absent}\n", *_TABLE, *rows]))
        else:
            plain.append(_row(name, field))
    return "\n".join([_HEAD, "## Top level\n", *_TABLE, *plain, *sections]) + "\n"


def _rows(name: str, section: Any) -> Iterator[str]:
    """Yield a row for each key of a section, and of the sections in it."""
    for key, field in section.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            yield from _rows(f"{name}.{key}", field.annotation)
        else:
            yield _row(f"{name}.{field.alias or key}", field)


_TABLE = ("| key | type | default | meaning |", "|---|---|---|---|")


def _row(name: str, field: Any) -> str:
    default = "required" if field.is_required() else _value(field.get_default(call_default_factory=True))
    return f"| `{name}` | {_type(field.annotation)} | {default} | {field.description} |"


def _value(value: Any) -> str:
    if value is None:
        return "`null`"
    if value is PydanticUndefined:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value!s}`" if isinstance(value, StrEnum) else f"`{list(value) if isinstance(value, tuple) else value}`"


def _type(annotation: Any) -> str:
    arguments = get_args(annotation)
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return ", ".join(annotation)
    if annotation is PartConfig:
        return "part"
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        return f"{{{', '.join(field.alias or name for name, field in annotation.model_fields.items())}}}"
    if not arguments:
        return getattr(annotation, "__name__", str(annotation))
    origin = get_origin(annotation)
    if origin is Annotated:  # a type, and the constraints of its values
        return _type(arguments[0])
    if origin is tuple:
        return f"[{', '.join(map(_type, arguments))}]"
    if origin in (list, dict):
        return f"{origin.__name__} of {' to '.join(dict.fromkeys(map(_type, arguments)))}"
    return ", ".join(str(item) if isinstance(item, str) else _type(item) for item in arguments)


if __name__ == "__main__":
    print(reference(), end="")

"""The texts and messages in the fields of a row, checked: what a template and a tokenizer can process."""

import json
import re
from typing import Any

from meshwright.data.rows.extras import weight_of
from meshwright.data.rows.row_files import DuplicateKeys, Row, names_of
from meshwright.errors import DataError

__all__ = ["call_of_text", "check_sound", "exchange", "field_of", "kind_of", "message_of", "text_of"]

_DEEPEST = 64
"""Largest number of nested levels in a chat; templates and JSON writers are recursive."""

_SURROGATE = re.compile("[\ud800-\udfff]")


def message_of(message: dict[str, Any], role_key: str, content_key: str, weight_key: str, where: str) -> dict[str, Any]:
    """Return a message with `role`, `content` unless it is null, and all other keys that a template may know.

    One that is not to be learned has `weight` 0.
    """
    role = message.get(role_key)
    if not isinstance(role, str):
        wrong = f"no {role_key}" if role is None else f"a {role_key} that is {kind_of(role)}, not text"
        raise DataError("data.chat.messages", f"{where} has {wrong}; its keys are {names_of(message)}")
    read = {role_key, content_key, weight_key, "role", "content", "weight", "train"}
    rest = {key: part for key, part in message.items() if key not in read}
    weight = {} if weight_of(message, weight_key, where) else {"weight": 0}
    return {"role": role, **content_of(message.get(content_key), where), **rest, **weight}


def exchange(asked: str, row: Row, answer: str) -> list[dict[str, Any]]:
    """Return one question and its answer. A null answer is refused later, by the check of chats."""
    said = {} if row.values.get(answer, "") is None else {"content": text_of(row, answer)}
    return [{"role": "user", "content": asked}, {"role": "assistant", **said}]


def field_of(row: Row, column: str, knob: str) -> Any:
    if column not in row.values:
        raise DataError(
            "data.format", f"{row.source}: no field {column!a}; its fields are {names_of(row.values)}; set data.{knob}"
        )
    return row.values[column]


def text_of(row: Row, column: str) -> str:
    value = field_of(row, column, "text_field or data.columns" if column == "text" else "columns")
    if not isinstance(value, str):
        raise DataError("data.text", f"{row.source}: field {column!a} holds {kind_of(value)}, not text")
    return value


def content_of(value: Any, where: str) -> dict[str, Any]:
    """Return the `content` of a message: its text, or its parts of text joined; empty for null."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"content": value}
    if not isinstance(value, list):
        raise DataError("data.chat.content", f"{where}: content is {kind_of(value)}, not text")
    parts = []
    for part in value:
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            kind = f"of type {part.get('type')!a:.40}" if isinstance(part, dict) else kind_of(part)
            raise DataError("data.chat.content", f"{where}: a part of its content is {kind}; only text can be learned")
        parts.append(text)
    return {"content": "".join(parts)}


def call_of_text(text: str, where: str) -> dict[str, Any]:
    """Return a tool call, which ShareGPT writes as JSON with a name and arguments."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise DataError("data.chat.messages", f"{where}: a function_call is JSON with 'name' and 'arguments'")
    check_sound(value, where)
    return {"type": "function", "function": {"name": value["name"], "arguments": value.get("arguments", {})}}


def check_sound(value: Any, source: str) -> None:
    """Refuse what templates and tokenizers cannot process: half characters, duplicate keys, nesting that is too deep."""
    level: list[Any] = [value]
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for item in level:
            if isinstance(item, DuplicateKeys):
                raise DataError("data.json", f"{source}: a key occurs twice in one object (keys: {names_of(item)})")
            if isinstance(item, dict):
                below.extend(item)
                below.extend(item.values())
            elif isinstance(item, (list, tuple)):
                below.extend(item)
            elif isinstance(item, str) and not item.isascii() and (match := _SURROGATE.search(item)):
                raise DataError(
                    "data.text", f"{source}: a text holds half of a character, the lone surrogate {match.group()!a}"
                )
        if not below:
            return
        level = below
    raise DataError("data.json", f"{source}: nested deeper than {_DEEPEST} levels")


def kind_of(value: Any) -> str:
    return "null" if value is None else type(value).__name__

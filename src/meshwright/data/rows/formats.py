"""What a row means: a text, or a chat in the format of messages, ShareGPT, Alpaca, or prompt and completion.

Every chat becomes a list of messages with `role` and `content`; `chat.py` decides whether it can be learned.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from meshwright.data.data_config import DataConfig
from meshwright.data.rows.columns import FORMATS
from meshwright.data.rows.extras import template_arguments, weight_of
from meshwright.data.rows.row_files import DuplicateKeys, Row, names_of, refuse_duplicates
from meshwright.data.rows.row_values import Values, read_values
from meshwright.errors import DataError, Refusal

__all__ = ["SPEAKERS", "Document", "RowReader", "check_columns"]

SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
}
"""Name of a speaker in ShareGPT to role."""

_DEEPEST = 64
"""Largest number of nested levels in a chat; templates and JSON writers are recursive."""

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Document:
    """One document: either a text or the messages of a chat."""

    text: str | None
    messages: list[dict[str, Any]] | None
    source: str
    """File and line, or data set and row, for messages to the user."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """For a chat: tools, documents and other arguments of the chat template."""
    values: Values = field(default_factory=dict)
    """Of the columns that reach the batch."""


def check_columns(config: DataConfig, seen: dict[str, None], name: str) -> None:
    """Refuse a mapped column that no row had, after all rows were read.

    Args:
        config: its `columns` are checked.
        seen: the columns of all rows; if it is empty, nothing is refused.
        name: name of the source.

    Raises:
        DataError: names the existing columns.
    """
    within = {key for layout in config.formats for key in FORMATS[layout].within}
    mapped = [(key, column) for key, column in config.columns.items() if column is not None]
    missing = [(key, column) for key, column in mapped if column not in seen and key not in within]
    if seen and missing:
        there = f"its columns are {names_of(seen)}"
        raise DataError(
            Refusal("data.columns", f"data.columns: {name} has no column {column!a} (for {key!r}); {there}")
            for key, column in missing
        )


class RowReader:
    """Makes documents of the rows of one file or data set, all of one format.

    The format is `data.format`, or the only one that has the mapped columns and the kind. Otherwise the first row that has the
    columns of exactly one format decides.

    Args:
        config: format, columns and kind.
        seen: collects the columns of the rows.
        unread: collects those that are not read.
    """

    def __init__(self, config: DataConfig, seen: dict[str, None], unread: dict[str, None] | None = None) -> None:
        mapped = {key: column for key, column in config.columns.items() if column is not None}
        self.columns = {"text": config.text_field, "messages": config.messages_field, **mapped}
        self.left_out = config.columns.keys() - mapped.keys()
        self.candidates = config.formats
        self.seen, self.tensors = seen, config.tensors
        self.unread: dict[str, None] = {} if unread is None else unread

    def document(self, row: Row) -> Document:
        """Return the document of a row.

        Raises:
            DataError: the row does not have its format; names file, line and reason.
        """
        if len(self.seen) < 1000:  # names for a message
            self.seen.update(dict.fromkeys(row.values))
        name = self._format(row)
        layout = FORMATS[name]
        read = (key for key in layout.required + layout.optional + layout.extra if key not in self.left_out)
        used = [self._column(key) for key in read]
        values = read_values(self.tensors, row) if self.tensors else {}
        refuse_duplicates(row)
        _check_sound([row.values.get(column) for column in used], row.source)
        if name == "text":
            document = Document(_text(row, self._column("text")), None, row.source, values=values)
            self._note_unread(row, used)
            return document
        columns = {key: self._column(key) for key in layout.extra if key not in self.left_out}
        arguments = template_arguments({key: row.values.get(columns[key]) for key in columns}, columns, row.source)
        _check_sound(arguments, row.source)
        document = Document(None, getattr(self, f"_{name}")(row), row.source, arguments, values)
        self._note_unread(row, used)
        return document

    def _note_unread(self, row: Row, used: list[str]) -> None:
        used = used + [column.column or name for name, column in self.tensors.items()]
        if len(self.unread) < 1000:
            self.unread.update(dict.fromkeys(column for column in row.values if column not in used))

    def _column(self, key: str) -> str:
        return self.columns.get(key, key)

    def _format(self, row: Row) -> str:
        if len(self.candidates) == 1:
            return self.candidates[0]
        needed = {name: [self._column(key) for key in FORMATS[name].required] for name in self.candidates}
        matching = [name for name, columns in needed.items() if all(column in row.values for column in columns)]
        if len(matching) == 1:
            self.candidates = (matching[0],)
            return matching[0]
        shown = [f"{' and '.join(map(repr, needed[name]))} ({name})" for name in matching or needed]
        which = (
            f"fields of several formats, {', '.join(shown)}"
            if matching
            else f"no fields of a format: neither {', '.join(shown)}"
        )
        there = f"its fields are {names_of(row.values)}"
        raise DataError("data.format", f"{row.source}: {which}; {there}; set data.format, data.kind or data.columns")

    # ---- chats -----------------------------------------------------------------------------------------------------------

    def _messages(self, row: Row) -> list[dict[str, Any]]:
        keys = self._column("role"), self._column("content"), self._column("weight")
        return [_message(message, *keys, f"{row.source}: message {n}") for n, message in self._turns(row, "messages")]

    def _sharegpt(self, row: Row) -> list[dict[str, Any]]:
        from_key, value_key, weight_key = self._column("from"), self._column("value"), self._column("weight")
        messages = self._system(row)
        for number, message in self._turns(row, "conversations"):
            where = f"{row.source}: message {number}"
            if from_key not in message and "role" in message:  # conversations with the keys of messages
                messages.append(_message(message, "role", "content", weight_key, where))
                continue
            turn = _message(message, from_key, value_key, weight_key, where)
            if turn["role"] not in SPEAKERS:
                raise DataError("data.chat.role", f"{where} is from {turn['role']!a:.40}; legal are {', '.join(SPEAKERS)}")
            if turn["role"] == "function_call" and "content" in turn:
                turn |= {"content": "", "tool_calls": [_call(turn["content"], where)]}
            messages.append(turn | {"role": SPEAKERS[turn["role"]]})
        return messages

    def _alpaca(self, row: Row) -> list[dict[str, Any]]:
        # The blank line is from Alpaca's own prompt. The other words of that prompt are left to the template.
        asked = "\n\n".join(part for part in (_text(row, self._column("instruction")), self._optional(row, "input")) if part)
        return [*self._system(row), *_exchange(asked, row, self._column("output"))]

    def _prompt_completion(self, row: Row) -> list[dict[str, Any]]:
        asked = _text(row, self._column("prompt"))
        return [*self._system(row), *_exchange(asked, row, self._column("completion"))]

    def _turns(self, row: Row, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the messages of a row with their numbers, without the None values that arrow adds to make all rows alike."""
        column = self._column(key)
        knob = "messages_field or data.columns" if key == "messages" else "columns"
        value = _field(row, column, knob)
        if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
            raise DataError("data.chat.messages", f"{row.source}: field {column!a} is not a list of messages")
        for number, message in enumerate(value, start=1):
            yield number, {name: part for name, part in message.items() if part is not None}

    def _system(self, row: Row) -> list[dict[str, Any]]:
        said = self._optional(row, "system")
        return [{"role": "system", "content": said}] if said else []

    def _optional(self, row: Row, key: str) -> str:
        given = key not in self.left_out and row.values.get(self._column(key)) is not None
        return _text(row, self._column(key)) if given else ""


def _message(message: dict[str, Any], role_key: str, content_key: str, weight_key: str, where: str) -> dict[str, Any]:
    """Return a message with `role`, `content` unless it is null, and all other keys that a template may know.

    One that is not to be learned has `weight` 0.
    """
    role = message.get(role_key)
    if not isinstance(role, str):
        wrong = f"no {role_key}" if role is None else f"a {role_key} that is {_kind(role)}, not text"
        raise DataError("data.chat.messages", f"{where} has {wrong}; its keys are {names_of(message)}")
    read = {role_key, content_key, weight_key, "role", "content", "weight", "train"}
    rest = {key: part for key, part in message.items() if key not in read}
    weight = {} if weight_of(message, weight_key, where) else {"weight": 0}
    return {"role": role, **_content(message.get(content_key), where), **rest, **weight}


def _exchange(asked: str, row: Row, answer: str) -> list[dict[str, Any]]:
    """Return one question and its answer. A null answer is refused later, by the check of chats."""
    said = {} if row.values.get(answer, "") is None else {"content": _text(row, answer)}
    return [{"role": "user", "content": asked}, {"role": "assistant", **said}]


def _field(row: Row, column: str, knob: str) -> Any:
    if column not in row.values:
        raise DataError(
            "data.format", f"{row.source}: no field {column!a}; its fields are {names_of(row.values)}; set data.{knob}"
        )
    return row.values[column]


def _text(row: Row, column: str) -> str:
    value = _field(row, column, "text_field or data.columns" if column == "text" else "columns")
    if not isinstance(value, str):
        raise DataError("data.text", f"{row.source}: field {column!a} holds {_kind(value)}, not text")
    return value


def _content(value: Any, where: str) -> dict[str, Any]:
    """Return the `content` of a message: its text, or its parts of text joined; empty for null."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"content": value}
    if not isinstance(value, list):
        raise DataError("data.chat.content", f"{where}: content is {_kind(value)}, not text")
    parts = []
    for part in value:
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            kind = f"of type {part.get('type')!a:.40}" if isinstance(part, dict) else _kind(part)
            raise DataError("data.chat.content", f"{where}: a part of its content is {kind}; only text can be learned")
        parts.append(text)
    return {"content": "".join(parts)}


def _call(text: str, where: str) -> dict[str, Any]:
    """Return a tool call, which ShareGPT writes as JSON with a name and arguments."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise DataError("data.chat.messages", f"{where}: a function_call is JSON with 'name' and 'arguments'")
    _check_sound(value, where)
    return {"type": "function", "function": {"name": value["name"], "arguments": value.get("arguments", {})}}


def _check_sound(value: Any, source: str) -> None:
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


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__

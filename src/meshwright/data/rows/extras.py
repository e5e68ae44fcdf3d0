"""What a row of a chat gives besides its messages: arguments of the chat template, and which answers are not learned."""

import json
import math
from collections.abc import Mapping
from typing import Any

from meshwright.errors import DataError

__all__ = ["template_arguments", "weight_of"]

_TAKEN = frozenset(
    {
        *(
            "self",
            "conversation",
            "conversations",
            "messages",
            "tools",
            "documents",
            "chat_template",
            "add_generation_prompt",
            "tokenize",
            "padding",
        ),
        *("continue_final_message", "sanitize_control_tokens", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)
"""Arguments of transformers' `apply_chat_template`, and of what it calls, that a row may not set by `chat_template_kwargs`."""


def template_arguments(given: Mapping[str, Any], columns: Mapping[str, str], source: str) -> dict[str, Any]:
    """Return the arguments of the chat template that a row gives.

    Args:
        given: the values of ``tools``, ``documents`` and ``chat_template_kwargs``, where the row has them. Empty text and empty
            objects and lists stand for none.
        columns: their columns, for messages; those that are left out are absent.
        source: origin of the row, for messages.

    Raises:
        DataError: a value is neither what the template needs nor its JSON.
    """
    arguments: dict[str, Any] = {}
    for name in ("tools", "documents"):
        value = _parsed(given.get(name))
        if isinstance(value, list):
            value = [_parsed(item) for item in value]
        if value in (None, "", [], {}):
            continue
        off = f"data.columns.{name}=null leaves the column out"
        if not isinstance(value, list):
            found = type(value).__name__
            raise DataError(
                "data.chat.arguments", f"{source}: field {columns[name]!a} holds {found}, no list of objects or its JSON; {off}"
            )
        for number, item in enumerate(value, start=1):
            if not isinstance(item, dict):
                raise DataError(
                    "data.chat.arguments",
                    f"{source}: field {columns[name]!a}: item {number} of its list is {item!a:.40}, no object; {off}",
                )
        arguments[name] = value
    more, column = _parsed(given.get("chat_template_kwargs")) or {}, columns.get("chat_template_kwargs")
    if not isinstance(more, dict):
        raise DataError(
            "data.chat.arguments",
            f"{source}: field {column!a} holds {type(more).__name__}, no object or its JSON; "
            "data.columns.chat_template_kwargs=null leaves the column out",
        )
    for name in more:
        if name in _TAKEN or not name.isidentifier():
            raise DataError(
                "data.chat.arguments",
                f"{source}: field {column!a} sets {name!a:.40}; legal are names that the template reads, "
                "but not those of arguments of apply_chat_template",
            )
    return {**arguments, **{name: value for name, value in more.items() if value is not None}}


def _parsed(value: Any) -> Any:
    """Return what JSON stands for; ``None`` for blank text. Tables store it as text, where each row would need another type."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def weight_of(message: Mapping[str, Any], key: str, where: str) -> bool:
    """Return whether a message is to be learned, by its `weight` or `train`, if it has one of them.

    Args:
        message: the message.
        key: name of its key `weight`.
        where: origin of the message, for messages.

    Raises:
        DataError: the value is not 0, 1, false or true; or the two disagree.
    """
    found: dict[str, bool] = {}
    for name in (key, "train"):
        value = message.get(name)
        if value is None:
            continue
        if not isinstance(value, bool | int | float) or value not in (0, 1) or math.isnan(value):
            raise DataError(
                "data.chat.messages",
                f"{where} has {name}={value!a:.40}; legal are 0 or false (it is not learned) and 1 or true",
            )
        found[name] = bool(value)
    if len(set(found.values())) > 1:
        raise DataError(
            "data.chat.messages", f"{where} has {' and '.join(f'{name}={value}' for name, value in found.items())}; remove one"
        )
    return all(found.values())

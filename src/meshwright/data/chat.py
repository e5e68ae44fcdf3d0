"""From chats to tokens, with the loss on the assistant's words.

The tokenizer's own template writes the chat. If the template marks the assistant's words (`{% generation %}`), the marks
decide. Otherwise the words are found by extending the conversation turn by turn: the text that a turn adds after the generation
prompt is what the assistant must learn to say.

A template may silently leave out what it does not know, such as a call of a tool. So each answer is searched for in the text
that is learned. If it is not found literally (templates strip whitespace), another answer must give another text to learn.

An answer whose message has `weight` 0 is read by the model, and not learned.
"""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshwright.data.template import REMEDY, Messages, is_learned, template_of, without
from meshwright.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["check_chat_tokenizer", "encode_chat", "encode_whole_chat", "unwritten"]

_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles that templates know by convention; other roles are legal if the template names them."""


def check_chat_tokenizer(tokenizer: "PreTrainedTokenizerBase", source: str = "data") -> None:
    """Refuse a tokenizer that cannot write chats.

    Raises:
        DataError: it has no template, or does not give the text that a token stands for.
    """
    if not tokenizer.chat_template:
        raise DataError(
            "data.template.missing",
            f"{source}: the tokenizer has no chat template; set tokenizer.chat_template (jinja or a file)",
        )
    if not tokenizer.is_fast:
        raise DataError(
            "data.template.tokenizer",
            f"{source}: {type(tokenizer).__name__} does not say which text each token is for; use a fast tokenizer",
        )


def encode_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Messages,
    source: str = "this chat",
    arguments: Mapping[str, Any] | None = None,
) -> tuple[list[int], list[bool]]:
    """Return the token ids of a chat, and for each token whether the model is to learn it.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        messages: turns with `role` and `content`; an answer with `weight` 0 is not learned.
        source: origin of the chat, for messages.
        arguments: further arguments of the template, such as `tools`.

    Returns:
        The token ids, and a loss mask of the same length. The mask is true on the assistant's turns, with their end-of-turn
        tokens.

    Raises:
        DataError: there is no template; there is no turn of the assistant, or one without an answer; a role is unknown; or the
            template has turns that cannot be distinguished, or leaves an answer out.
    """
    check_chat_tokenizer(tokenizer, source)
    template = template_of(tokenizer, source, arguments or {})
    _check_turns(messages, template.jinja, source)
    ids, mask, learned = template.encode(messages)
    if not any(mask) and any(is_learned(message) for message in messages):
        raise DataError("data.template.marks", f"{source}: the chat template gives the assistant's turns no token; {REMEDY}")
    at = 0
    for turn, message in enumerate(messages):
        if not is_learned(message):
            continue
        answer = _said(message).strip()
        place = learned.find(answer, at)
        if place >= 0:
            at = place + len(answer)
        for part, other in _other_answers(message, answer_found=place >= 0):
            changed = [*messages[:turn], other, *messages[turn + 1 :]]
            if template.learned_of(changed) == learned:
                raise DataError(
                    "data.template.marks",
                    f"{source}: message {turn + 1}: the chat template leaves out the assistant's {part}, so it would not be "
                    "learned; set tokenizer.chat_template to a template that writes it",
                )
    return ids, mask


def encode_whole_chat(
    tokenizer: "PreTrainedTokenizerBase", messages: Messages, source: str, arguments: Mapping[str, Any]
) -> list[int]:
    """Return the token ids of a chat of which all tokens count, as the template writes it. It need not have an answer.

    Raises:
        DataError: there is no template, it refuses the messages, a role is unknown, or there are no messages.
    """
    check_chat_tokenizer(tokenizer, source)
    template = template_of(tokenizer, source, arguments)
    if not messages:
        raise DataError("data.chat.messages", f"{source}: there are no messages")
    _check_roles(messages, template.jinja, source)
    return list(tokenizer(template.text(messages), add_special_tokens=False, verbose=False)["input_ids"])


def unwritten(
    tokenizer: "PreTrainedTokenizerBase", messages: Messages, source: str, arguments: Mapping[str, Any], keys: set[str]
) -> tuple[list[str], list[str]]:
    """Return which arguments, and which keys of the messages, the template makes nothing of: without them it writes the same.

    Args:
        tokenizer: it has a template that accepts this chat.
        messages: turns with `role` and `content`.
        source: origin of the chat, for messages.
        arguments: further arguments of the template.
        keys: the keys to examine.
    """

    def written(messages: Messages, arguments: Mapping[str, Any]) -> list[str] | None:
        try:
            template = template_of(tokenizer, source, arguments)
            return [template.text(messages), template.text(messages, add_generation_prompt=True)]
        except DataError:
            return None

    whole = written(messages, arguments)
    return (
        [name for name in arguments if written(messages, {key: arguments[key] for key in arguments if key != name}) == whole],
        [name for name in sorted(keys) if written([without(message, name) for message in messages], arguments) == whole],
    )


def _said(message: dict[str, Any]) -> str:
    """Return the text of a message; several parts of text are joined."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _check_turns(messages: Messages, template: str, source: str) -> None:
    """Refuse a chat without an answer, unknown roles, and turns without content."""
    roles = [message.get("role") for message in messages]
    if "assistant" not in roles:
        shown = ", ".join(str(role) for role in roles[:8]) or "none"
        raise DataError("data.chat.answer", f"{source}: no turn of the assistant, so nothing to learn (roles: {shown})")
    _check_roles(messages, template, source)


def _check_roles(messages: Messages, template: str, source: str) -> None:
    """Refuse unknown roles, and turns without content."""
    for number, message in enumerate(messages, start=1):
        role, content = message.get("role"), message.get("content")
        where = f"{source}: message {number}"
        if role not in _ROLES and not any(f"{quote}{role}{quote}" in template for quote in "'\""):
            raise DataError(
                "data.chat.role",
                f"{where} has the role {role!r:.40}; legal are {', '.join(_ROLES)}, and what the template names",
            )
        if role == "assistant" and is_learned(message) and not _said(message).strip() and not _calls(message):
            raise DataError("data.chat.answer", f"{where}: the assistant's answer is {'null' if content is None else 'empty'}")
        if role != "assistant" and content is None:
            raise DataError("data.chat.content", f"{where}, of the {role}, has no content")


def _calls(message: dict[str, Any]) -> list[Any]:
    """Return the tool calls in a message, also that of the older key for a single one."""
    calls = message.get("tool_calls") or []
    return [
        *(calls if isinstance(calls, list) else [calls]),
        *([message["function_call"]] if message.get("function_call") else []),
    ]


def _other_answers(message: dict[str, Any], answer_found: bool) -> list[tuple[str, dict[str, Any]]]:
    """Return the message with another answer, or another tool call, one for each part that is not known to be learned."""
    changed = []
    if not answer_found:
        changed.append(("answer", {**message, "content": f"{_said(message)} (otherwise)"}))
    for number, call in enumerate(_calls(message), start=1):
        other = copy.deepcopy(message)
        inner = _calls(other)[number - 1]
        inner = inner.get("function", inner) if isinstance(inner, dict) else inner
        if isinstance(inner, dict):
            inner["name"] = f"{inner.get('name')}_otherwise"
            changed.append((f"tool call {number}", other))
        else:
            changed.append((f"tool call {number}, which is {type(call).__name__} and no object", message))
    return changed

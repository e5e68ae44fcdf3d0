"""From chats to tokens, with the loss on the assistant's words.

The tokenizer's own template writes the chat. If the template marks the assistant's words (`{% generation %}`), the marks
decide. Otherwise the words are found by extending the conversation turn by turn: the text that a turn adds after the generation
prompt is what the assistant must learn to say.

A template may silently leave out what it does not know, such as a call of a tool. So each answer is searched for in the text
that is learned. If it is not found literally (templates strip whitespace), another answer must give another text to learn.
"""

import copy
import re
from typing import TYPE_CHECKING, Any

from meshwright.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["check_chat_tokenizer", "encode_chat"]

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

_REMEDY = "set tokenizer.chat_template to a template that marks the assistant's words with {% generation %}"

_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles that templates know by convention; other roles are legal if the template names them."""

Messages = list[dict[str, Any]]
Spans = list[tuple[int, int]]


def check_chat_tokenizer(tokenizer: "PreTrainedTokenizerBase", source: str = "data") -> None:
    """Refuse a tokenizer that cannot write chats.

    Raises:
        DataError: it has no template, or does not give the text that a token stands for.
    """
    if not tokenizer.chat_template:
        raise DataError(f"{source}: the tokenizer has no chat template; set tokenizer.chat_template (jinja or a file)")
    if not tokenizer.is_fast:
        raise DataError(f"{source}: {type(tokenizer).__name__} does not say which text each token is for; use a fast tokenizer")


def encode_chat(
    tokenizer: "PreTrainedTokenizerBase", messages: Messages, source: str = "this chat"
) -> tuple[list[int], list[bool]]:
    """Return the token ids of a chat, and for each token whether the model is to learn it.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        messages: turns with `role` and `content`.
        source: origin of the chat, for messages.

    Returns:
        The token ids, and a loss mask of the same length. The mask is true on the assistant's turns, with their end-of-turn
        tokens.

    Raises:
        DataError: there is no template; there is no turn of the assistant, or one without an answer; a role is unknown; or the
            template has turns that cannot be distinguished, or leaves an answer out.
    """
    check_chat_tokenizer(tokenizer, source)
    template = tokenizer.get_chat_template()
    _check_turns(messages, template, source)
    marked = _GENERATION.search(template) is not None
    ids, mask, learned = _encode(tokenizer, messages, marked, source)
    if not any(mask):
        raise DataError(f"{source}: the chat template gives the assistant's turns no token; {_REMEDY}")
    at = 0
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        answer = _said(message).strip()
        place = learned.find(answer, at)
        if place >= 0:
            at = place + len(answer)
        for part, other in _other_answers(message, answer_found=place >= 0):
            changed = [*messages[:turn], other, *messages[turn + 1 :]]
            if _learned_of(tokenizer, changed, marked, source) == learned:
                raise DataError(
                    f"{source}: message {turn + 1}: the chat template leaves out the assistant's {part}, so it would not be "
                    "learned; set tokenizer.chat_template to a template that writes it"
                )
    return ids, mask


def _said(message: dict[str, Any]) -> str:
    """Return the text of a message; several parts of text are joined."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _check_turns(messages: Messages, template: str, source: str) -> None:
    """Refuse unknown roles, turns without content, and a chat without an answer."""
    roles = [message.get("role") for message in messages]
    if "assistant" not in roles:
        shown = ", ".join(str(role) for role in roles[:8]) or "none"
        raise DataError(f"{source}: no turn of the assistant, so nothing to learn (roles: {shown})")
    for number, message in enumerate(messages, start=1):
        role, content = message.get("role"), message.get("content")
        where = f"{source}: message {number}"
        if role not in _ROLES and not any(f"{quote}{role}{quote}" in template for quote in "'\""):
            raise DataError(f"{where} has the role {role!r:.40}; legal are {', '.join(_ROLES)}, and what the template names")
        if role == "assistant" and not _said(message).strip() and not _calls(message):
            raise DataError(f"{where}: the assistant's answer is {'null' if content is None else 'empty'}")
        if role != "assistant" and content is None:
            raise DataError(f"{where}, of the {role}, has no content")


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


def _learned_of(tokenizer: "PreTrainedTokenizerBase", messages: Messages, marked: bool, source: str) -> str | None:
    """Return the text that would be learned; ``None`` if the template, which accepts the original chat, refuses this one."""
    try:
        return _encode(tokenizer, messages, marked, source)[2]
    except DataError:
        return None


def _apply(tokenizer: "PreTrainedTokenizerBase", messages: Messages, source: str, **kwargs: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, **kwargs)
    except Exception as error:  # a template is code of others, run on data of others
        reason = str(error) or type(error).__name__
        raise DataError(f"{source}: the chat template refuses the messages: {reason}") from error


def _encode(
    tokenizer: "PreTrainedTokenizerBase", messages: Messages, marked: bool, source: str
) -> tuple[list[int], list[bool], str]:
    """Return token ids, loss mask, and the text of the tokens that are learned."""
    text: str = _apply(tokenizer, messages, source, tokenize=False)
    if marked:
        kwargs = {"return_dict": True, "return_assistant_tokens_mask": True}
        out = _apply(tokenizer, messages, source, tokenizer_kwargs={"return_offsets_mapping": True}, **kwargs)
        mask = [bool(bit) for bit in out["assistant_masks"]]
    else:
        spans = [_span(tokenizer, messages, turn, text, source) for turn, m in enumerate(messages) if m["role"] == "assistant"]
        # Texts are compared, and the whole text is tokenized once: tokens of a prefix need not be a prefix of the tokens.
        out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        mask = [any(start < last and end > first for first, last in spans) for start, end in out["offset_mapping"]]
    learned, at = [], 0
    for (start, end), bit in zip(out["offset_mapping"], mask, strict=True):
        if bit:  # tokens of one character have the same offsets
            learned.append(text[max(start, at) : end])
            at = max(at, end)
    return list(out["input_ids"]), mask, "".join(learned)


def _span(tokenizer: "PreTrainedTokenizerBase", messages: Messages, turn: int, whole: str, source: str) -> tuple[int, int]:
    """Return where in `whole` the assistant's words of one turn begin and end, in characters."""
    if turn == 0:
        raise DataError(f"{source}: begins with the assistant's turn, and the template does not mark it; {_REMEDY}")
    before: str = _apply(tokenizer, messages[:turn], source, tokenize=False, add_generation_prompt=True)
    after: str = _apply(tokenizer, messages[: turn + 1], source, tokenize=False)
    if not (whole.startswith(after) and after.startswith(before)):
        raise DataError(
            f"{source}: the chat template writes turn {turn + 1} differently when other turns follow, so the "
            f"assistant's words cannot be told from the rest; {_REMEDY}"
        )
    # Whitespace after the token that ends the turn belongs to the layout of the chat, not to the assistant's words.
    trimmed = after.rstrip()
    if any(trimmed.endswith(token) for token in tokenizer.added_tokens_encoder):
        after = trimmed
    return len(before), len(after)

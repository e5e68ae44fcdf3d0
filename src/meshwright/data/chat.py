"""Chats to tokens, with the loss on what the assistant says.

The tokenizer's own template writes the chat. Where that template marks the assistant's words (`{% generation %}`), the
marks decide. Otherwise the words are found by growing the conversation turn by turn: what a turn adds to the text,
after the generation prompt, is what the assistant must learn to say.
"""

import re
from typing import TYPE_CHECKING, Any

from meshwright.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["encode_chat"]

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

_REMEDY = "set tokenizer.chat_template to a template that marks the assistant's words with {% generation %}"


def encode_chat(
    tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, Any]], source: str = "this chat"
) -> tuple[list[int], list[bool]]:
    """Token ids of a chat, and for each token whether the model is to learn it.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        messages: turns with `role` and `content`.
        source: where the chat comes from, for messages.

    Returns:
        ids and loss mask, of one length. The mask is true on the assistant's turns, their end-of-turn token included.

    Raises:
        DataError: no template, no assistant's turn, or a template whose turns cannot be told apart.
    """
    if not tokenizer.chat_template:
        raise DataError(f"{source}: the tokenizer has no chat template; set tokenizer.chat_template (jinja or a file)")
    if not tokenizer.is_fast:
        raise DataError(f"{source}: {type(tokenizer).__name__} does not tell which text a token stands for; use a fast one")
    if not any(message.get("role") == "assistant" for message in messages):
        roles = ", ".join(str(message.get("role")) for message in messages) or "none"
        raise DataError(f"{source}: no turn of the assistant, so nothing to learn (roles: {roles})")
    if _GENERATION.search(tokenizer.get_chat_template()):
        ids, mask = _encode_marked(tokenizer, messages, source)
    else:
        ids, mask = _encode_by_prefixes(tokenizer, messages, source)
    if not any(mask):
        raise DataError(f"{source}: the chat template gives the assistant's turns no token; {_REMEDY}")
    return ids, mask


def _apply(tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, Any]], source: str, **kwargs: Any) -> Any:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, **kwargs)
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{source}: the chat template refuses the messages: {error}") from error


def _encode_marked(
    tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, Any]], source: str
) -> tuple[list[int], list[bool]]:
    out = _apply(tokenizer, messages, source, return_dict=True, return_assistant_tokens_mask=True)
    return list(out["input_ids"]), [bool(bit) for bit in out["assistant_masks"]]


def _encode_by_prefixes(
    tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, Any]], source: str
) -> tuple[list[int], list[bool]]:
    whole: str = _apply(tokenizer, messages, source, tokenize=False)
    spans = [_span(tokenizer, messages, turn, whole, source) for turn, m in enumerate(messages) if m["role"] == "assistant"]
    # Text is compared, and the whole is tokenized once: tokens of a prefix need not be a prefix of the tokens.
    out = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    mask = [False] * len(out["input_ids"])
    for index, (start, end) in enumerate(out["offset_mapping"]):
        mask[index] = any(start < last and end > first for first, last in spans)
    return list(out["input_ids"]), mask


def _span(
    tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, Any]], turn: int, whole: str, source: str
) -> tuple[int, int]:
    """Where in `whole` the assistant's words of one turn begin and end, in characters."""
    if turn == 0:
        raise DataError(f"{source}: begins with the assistant's turn, and the template does not mark it; {_REMEDY}")
    before: str = _apply(tokenizer, messages[:turn], source, tokenize=False, add_generation_prompt=True)
    after: str = _apply(tokenizer, messages[: turn + 1], source, tokenize=False)
    if not (whole.startswith(after) and after.startswith(before)):
        raise DataError(
            f"{source}: the chat template writes turn {turn + 1} differently when other turns follow, so the "
            f"assistant's words cannot be told from the rest; {_REMEDY}"
        )
    # Whitespace after the token that ends the turn belongs to the layout of the chat, not to what the assistant says.
    trimmed = after.rstrip()
    if any(trimmed.endswith(token) for token in tokenizer.added_tokens_encoder):
        after = trimmed
    return len(before), len(after)

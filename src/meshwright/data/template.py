"""A chat template at work: what it writes of a chat, and which tokens of that are the words that the assistant is to learn."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["REMEDY", "ChatTemplate", "Messages", "is_learned", "template_of", "without"]

REMEDY = "set tokenizer.chat_template to a template that marks the assistant's words with {% generation %}"

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

Messages = list[dict[str, Any]]
Spans = list[tuple[int, int]]


def without(message: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return a message without some of its keys."""
    return {key: part for key, part in message.items() if key not in names}


def is_learned(message: dict[str, Any]) -> bool:
    """Return whether a message is an answer that the model is to learn."""
    return message["role"] == "assistant" and message.get("weight") != 0


def template_of(tokenizer: "PreTrainedTokenizerBase", source: str, arguments: Mapping[str, Any]) -> "ChatTemplate":
    """Return the template that a tokenizer has for a chat with these arguments.

    Args:
        tokenizer: it has a template.
        source: origin of the chat, for messages.
        arguments: further arguments of the template, such as `tools`.
    """
    # A tokenizer may have another template for chats with tools.
    jinja = tokenizer.get_chat_template(tools=arguments.get("tools"))
    return ChatTemplate(tokenizer, jinja, arguments, source, marked=_GENERATION.search(jinja) is not None)


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, with the arguments of one row."""

    tokenizer: "PreTrainedTokenizerBase"
    jinja: str
    arguments: Mapping[str, Any]
    source: str
    marked: bool
    """Whether it marks the assistant's words."""

    def text(self, messages: Messages, **options: Any) -> str:
        """Return what the template writes."""
        text: str = self._apply(messages, tokenize=False, **options)
        return text

    def learned_of(self, messages: Messages) -> str | None:
        """Return the text that would be learned; ``None`` if the template, which accepts the original chat, refuses this."""
        try:
            return self.encode(messages)[2]
        except DataError:
            return None

    def encode(self, messages: Messages) -> tuple[list[int], list[bool], str]:
        """Return token ids, loss mask, and the text of the tokens that are learned."""
        text = self.text(messages)
        if self.marked:
            options = {"return_dict": True, "return_assistant_tokens_mask": True}
            out = self._apply(messages, tokenizer_kwargs={"return_offsets_mapping": True}, **options)
            silent = self._silent_spans(messages)
            marks = zip(out["assistant_masks"], out["offset_mapping"], strict=True)
            mask = [bool(bit) and not _meets(place, silent) for bit, place in marks]
        else:
            spans = [self._span(messages, turn, text) for turn, message in enumerate(messages) if is_learned(message)]
            # Texts are compared, and the whole text is tokenized once: tokens of a prefix need not be a prefix of the tokens.
            out = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            mask = [_meets(place, spans) for place in out["offset_mapping"]]
        learned, at = [], 0
        for (start, end), bit in zip(out["offset_mapping"], mask, strict=True):
            if bit:  # tokens of one character have the same offsets
                learned.append(text[max(start, at) : end])
                at = max(at, end)
        return list(out["input_ids"]), mask, "".join(learned)

    def _apply(self, messages: Messages, **options: Any) -> Any:
        try:
            shown = [without(message, "weight") for message in messages]
            return self.tokenizer.apply_chat_template(shown, **self.arguments, **options)
        except Exception as error:  # a template is code of others, run on data of others
            raise DataError(
                "data.template.refuses", f"{self.source}: the chat template refuses the messages: {_reason(error)}"
            ) from error

    def _span(self, messages: Messages, turn: int, whole: str) -> tuple[int, int]:
        """Return where in `whole` the assistant's words of one turn begin and end, in characters."""
        if turn == 0:
            raise DataError(
                "data.template.marks",
                f"{self.source}: begins with the assistant's turn, and the template does not mark it; {REMEDY}",
            )
        before = self.text(messages[:turn], add_generation_prompt=True)
        after = self.text(messages[: turn + 1])
        if not (whole.startswith(after) and after.startswith(before)):
            raise DataError(
                "data.template.marks",
                f"{self.source}: the chat template writes turn {turn + 1} differently when other turns follow, so the "
                f"assistant's words cannot be told from the rest; {REMEDY}",
            )
        # Whitespace after the token that ends the turn belongs to the layout of the chat, not to the assistant's words.
        trimmed = after.rstrip()
        if any(trimmed.endswith(token) for token in self.tokenizer.added_tokens_encoder):
            after = trimmed
        return len(before), len(after)

    def _silent_spans(self, messages: Messages) -> Spans:
        """Return where the marked words of the answers with weight 0 are, in characters.

        Those of a turn are the ones that it adds to the turns before it.
        """
        spans: Spans = []
        turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant" and not is_learned(message)]
        text, blocks = self._blocks(messages) if turns else ("", [])
        for turn in turns:
            first = len(self._blocks(messages[:turn])[1]) if turn else 0
            before, marked = self._blocks(messages[: turn + 1])
            if [before[slice(*block)] for block in marked] != [text[slice(*block)] for block in blocks[: len(marked)]]:
                raise DataError(
                    "data.template.marks",
                    f"{self.source}: message {turn + 1} has weight 0, but the chat template marks the assistant's words "
                    "differently when other turns follow, so those of this message cannot be told from the rest",
                )
            spans += blocks[first : len(marked)]
        return spans

    def _blocks(self, messages: Messages) -> tuple[str, Spans]:
        """Return what the template writes, and where it marks words, in characters."""
        from transformers.utils.chat_template_utils import render_jinja_template

        shown = [[{key: part for key, part in without(message, "weight").items() if part is not None} for message in messages]]
        named = {**self.tokenizer.special_tokens_map, **self.arguments}
        try:
            texts, blocks = render_jinja_template(
                conversations=shown, chat_template=self.jinja, return_assistant_tokens_mask=True, **named
            )
        except Exception as error:  # as in _apply
            raise DataError(
                "data.template.refuses", f"{self.source}: the chat template refuses the messages: {_reason(error)}"
            ) from error
        return texts[0], [(start, end) for start, end in blocks[0]]


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _meets(place: tuple[int, int], spans: Spans) -> bool:
    """Return whether a token has characters of one of the spans."""
    start, end = place
    return any(start < last and end > first for first, last in spans)

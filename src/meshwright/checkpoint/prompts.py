"""A prompt as tokens, and the tokens that end an answer."""

from typing import Any

from meshwright.errors import ModelError, described

__all__ = ["encoded", "ends"]


def encoded(tokenizer: Any, prompt: str, *, raw: bool) -> tuple[bool, Any]:
    """Return whether a prompt is a turn of a chat, and its ``input_ids`` and ``attention_mask``, each [1, tokens].

    Args:
        tokenizer: the tokenizer. If it has a chat template, the prompt is a user's turn.
        prompt: the text.
        raw: take the prompt as it is, even if there is a chat template.

    Raises:
        ModelError: it has no tokens, or the chat template refuses it.
    """
    asked = bool(tokenizer.chat_template) and not raw
    inputs = _asked(tokenizer, prompt) if asked else tokenizer(prompt, return_tensors="pt", add_special_tokens=True)
    if inputs["input_ids"].shape[1] == 0:
        raise ModelError("generate.prompt", "the prompt has no tokens")
    return asked, inputs


def _asked(tokenizer: Any, prompt: str) -> Any:
    """Return the token ids and the mask of a chat in which a user has said the prompt, and the assistant is to answer."""
    turn = [{"role": "user", "content": prompt}]
    try:
        return tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    except Exception as error:  # a template is a program of others
        raise ModelError(
            "generate.prompt", f"the chat template refuses the prompt ({described(error)}); raw does without it"
        ) from error


def ends(tokenizer: Any, known: int | list[int] | None) -> int | list[int] | None:
    """Return the token ids that end a text, or a turn of the assistant as the chat template writes it."""
    ids = [known] if isinstance(known, int) else list(known or ())
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            written = tokenizer.apply_chat_template(chat, tokenize=False).rstrip()
        except Exception:  # templates are programs of others; if one refuses this chat, nothing is known
            written = ""
        last = [number for token, number in tokenizer.added_tokens_encoder.items() if written.endswith(token)]
        ids += [number for number in last if number not in ids]
    return ids[0] if len(ids) == 1 else ids or None

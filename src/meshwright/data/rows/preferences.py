"""Rows of preferences: a prompt with a chosen and a rejected answer, or an answer with a label.

They become documents with a second one, which shares their prompt: the rejected answer, or, for a baseline, the answer of
another row (Ethayarajh et al., "KTO", arXiv 2402.01306, section 4.1: pairs of prompts and answers that do not belong together).
Only the answers are learned.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, takewhile
from typing import Any, NamedTuple

import numpy as np

from meshwright.data.rows.document import Document
from meshwright.data.rows.row_files import Row
from meshwright.data.rows.turns import field_of, kind_of, message_of, text_of
from meshwright.errors import DataError

__all__ = ["Preference", "answer", "check_label", "mismatched", "preference", "unpaired"]

Messages = list[dict[str, Any]]

_SPEAKER = re.compile(r"\n\n(Human|Assistant):")


class Preference(NamedTuple):
    """A prompt and two answers to it, as messages."""

    prompt: Messages
    chosen: Messages
    rejected: Messages


def preference(row: Row, column: Callable[[str], str], prompt: str | None) -> Preference:
    """Return the prompt of a row and its two answers.

    Each of ``prompt``, ``chosen`` and ``rejected`` is a text, or a list of messages. Without a prompt, it is what both answers
    begin with; so it is where answers are whole chats, or texts with the turns of ``Human:`` and ``Assistant:``.

    Args:
        row: the row.
        column: returns the column of a name of the format.
        prompt: the column of the prompt; ``None``: there is none.

    Raises:
        DataError: names file, line and what is missing.
    """
    given = {name: row.values.get(column(name)) for name in ("chosen", "rejected")}
    if len({isinstance(value, list) for value in given.values()}) > 1:
        kinds = " and ".join(f"{column(name)!a} is {kind_of(value)}" for name, value in given.items())
        raise DataError("data.pairs", f"{row.source}: {kinds}; both are texts, or both are lists of messages")
    texts = not isinstance(given["chosen"], list)
    asked = None if prompt is None or row.values.get(prompt) is None else _said(row, prompt, "user", column)
    if texts and asked is None:
        chats = {column(name): _transcript(text_of(row, column(name))) for name in given}
        if all(chats.values()):
            return preference(Row({**row.values, **chats}, row.source), column, None)
        asked = _shared_text(row, [text_of(row, column(name)) for name in given], column)
        cut = len(asked[0]["content"])
        chosen, rejected = ([{"role": "assistant", "content": text_of(row, column(name))[cut:]}] for name in given)
        return _answered(row, Preference(asked, chosen, rejected), column)
    chosen, rejected = (_said(row, column(name), "assistant", column) for name in given)
    shared = (
        [] if texts else [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))]
    )
    whole = bool(shared) and shared[0]["role"] != "assistant"  # the chats repeat the prompt, which is beside them as text
    if asked is not None and not (isinstance(row.values[prompt or ""], str) and whole):
        begin = len(asked) if chosen[: len(asked)] == asked and rejected[: len(asked)] == asked else 0
        found = _answered(row, Preference(asked, chosen[begin:], rejected[begin:]), column)
        for name, said in (("chosen", found.chosen), ("rejected", found.rejected)):
            if said[0]["role"] == "system" or said[0]["role"] == asked[-1]["role"] == "user":
                raise DataError(
                    "data.pairs",
                    f"{row.source}: field {column(name)!a} begins with a turn of the {said[0]['role']}, and not with the "
                    f"prompt in {prompt!a}; both answers begin with the whole prompt, or neither",
                )
        return found
    if chosen == rejected:  # the whole chats are alike: the last turn is the answer
        shared = shared[:-1]
    if not shared:
        raise DataError(
            "data.pairs",
            f"{row.source}: fields {column('chosen')!a} and {column('rejected')!a} begin with different messages, and there is "
            f"no field {column('prompt')!a}; a pair has one prompt",
        )
    return _answered(row, Preference(shared, chosen[len(shared) :], rejected[len(shared) :]), column)


def answer(row: Row, column: Callable[[str], str]) -> tuple[Messages, Messages]:
    """Return the prompt of a row and its one answer, as messages. Both are texts, or lists of messages.

    Raises:
        DataError: names file, line and what is missing.
    """
    prompt, said = _said(row, column("prompt"), "user", column), _said(row, column("completion"), "assistant", column)
    return _answered(row, Preference(prompt, said, said), column)[:2]


def check_label(label: Any, where: str) -> None:
    """Refuse a label of an answer that is neither 0 nor 1.

    Raises:
        DataError: names file, line and field.
    """
    if float(label) not in (0.0, 1.0):
        raise DataError(
            "data.pairs", f"{where} holds {float(label):g}; legal is true or 1 if the answer is desirable, or else false or 0"
        )


def _said(row: Row, field: str, role: str, column: Callable[[str], str]) -> Messages:
    value = field_of(row, field, "columns")
    if not isinstance(value, list):
        return [{"role": role, "content": text_of(row, field)}]
    if not all(isinstance(message, dict) for message in value):
        raise DataError("data.chat.messages", f"{row.source}: field {field!a} is not a list of messages")
    clean = [{name: part for name, part in message.items() if part is not None} for message in value]
    keys = column("role"), column("content"), "weight"
    return [message_of(one, *keys, f"{row.source}: field {field!a}, message {n}") for n, one in enumerate(clean, start=1)]


def _transcript(text: str) -> Messages:
    """Return the turns of a text as HH-RLHF writes them (Bai et al. 2022, arXiv 2204.05862); none: it is not written so.

    As one text it would be parted within the answers: after the words that both begin with.
    """
    begin, *parts = _SPEAKER.split(f"\n\n{text.lstrip()}")
    if begin or not {"Human", "Assistant"} <= {*parts[::2]}:
        return []
    turns = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": "user" if who == "Human" else "assistant", "content": said.strip()} for who, said in turns]


def _shared_text(row: Row, texts: Sequence[str], column: Callable[[str], str]) -> Messages:
    """Return the prompt that two texts begin with, up to the last white space in common."""
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False))))
    if same == len(texts[0]) == len(texts[1]):  # alike: there is no telling where the answer begins
        same = 0
    while same and not texts[0][same - 1].isspace():
        same -= 1
    if not texts[0][:same].strip():
        raise DataError(
            "data.pairs",
            f"{row.source}: fields {column('chosen')!a} and {column('rejected')!a} begin with different words, and there is no "
            f"field {column('prompt')!a}; a pair has one prompt",
        )
    return [{"role": "user", "content": texts[0][:same]}]


def _answered(row: Row, found: Preference, column: Callable[[str], str]) -> Preference:
    """Refuse answers that do not end with a turn of the assistant, and leave the turns of the prompt unlearned."""
    names = ("chosen", "rejected") if found.rejected is not found.chosen else ("completion",)
    for name, said in zip(names, found[1:], strict=False):
        if not said or said[-1]["role"] != "assistant":
            what = f"ends with a turn of the {said[-1]['role']}" if said else "adds nothing to the prompt"
            raise DataError("data.chat.answer", f"{row.source}: field {column(name)!a} {what}; an answer is the assistant's")
    if not found.prompt:
        raise DataError("data.pairs", f"{row.source}: field {column('prompt')!a} is empty; an answer needs a prompt")
    prompt = [{**message, "weight": 0} if message["role"] == "assistant" else message for message in found.prompt]
    return found._replace(prompt=prompt)


# -- a baseline ---------------------------------------------------------------------------------------------------------------


def unpaired(document: Document) -> list[Document]:
    """Return a pair as two documents: the chosen answer with the label 1, and the rejected one with 0."""
    assert document.second is not None
    labels = (np.asarray(1, np.float32), np.asarray(0, np.float32))
    both = zip((document.messages, document.second), labels, strict=True)
    return [
        replace(document, messages=messages, second=None, values={**document.values, "label": label})
        for messages, label in both
    ]


def mismatched(rows: Iterator[list[Document]], name: str) -> Iterator[Document]:
    """Give each document a second one: its prompt, with the answer at the same place of the last row with another prompt.

    Args:
        rows: the documents of each row, each with a place where its answer begins. The first row gets the answers of the
            second; rows before which no row has another prompt get those of any other row.
        name: the source, for messages.

    Raises:
        DataError: there is only one row.
    """
    first = next(rows, None)
    if first is None:
        return
    second = next(rows, None)
    if second is None:
        raise DataError("data.pairs", f"data: {name} holds one row; the answer of another row is needed for a baseline")
    before = others = second
    for row in chain([first, second], rows):
        if _prompt(row[0]) != _prompt(before[0]) or others is row:
            others = before
        for number, document in enumerate(row):
            other = others[number % len(others)]
            yield replace(document, second=_prompt(document) + (other.messages or [])[other.answer :])
        before = row


def _prompt(document: Document) -> Messages:
    return (document.messages or [])[: document.answer]

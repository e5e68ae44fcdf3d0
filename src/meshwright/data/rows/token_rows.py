"""Rows that are tokens already, such as those of `meshwright score`: ids of the tokenizer of the run, and which are learned."""

from collections.abc import Callable
from typing import Any

import numpy as np

from meshwright.data.rows.document import Tokens
from meshwright.data.rows.row_files import Row
from meshwright.data.rows.turns import kind_of
from meshwright.errors import DataError, number_of

__all__ = ["check_tokens", "numbers_of", "pair_of", "tokens_of"]


def tokens_of(row: Row, column: Callable[[str], str | None]) -> Tokens:
    """Return the tokens of a row.

    Args:
        row: the row.
        column: returns the column of a name of the format; ``None``: it is left out.

    Raises:
        DataError: they are no list of whole numbers, or the mask is not as long; names file, line and field.
    """
    ids = numbers_of(row, str(column("input_ids")), "ids")
    field = column("loss_mask")
    mask = _mask(row, field, len(ids)) if field is not None and row.values.get(field) is not None else None
    return Tokens(ids, mask, _made_by(row, column("tokenizer")))


def pair_of(row: Row, column: Callable[[str], str | None]) -> Tokens:
    """Return the tokens of a chosen and of a rejected answer, each with its prompt, end to end.

    Args:
        row: the row.
        column: returns the column of a name of the format; ``None``: it is left out.

    Raises:
        DataError: a list is none of whole numbers, empty, or not as long as that of the tokens; names file, line and field.
    """
    ids, mask = list[list[int]](), list[bool]()
    for name in ("chosen", "rejected"):
        field = str(column(f"{name}_ids"))
        ids.append(numbers_of(row, field, "ids"))
        if not ids[-1]:
            raise DataError("data.tokens", f"{row.source}: field {field!a} is empty; a pair has two answers")
        mask += _mask(row, str(column(f"{name}_mask")), len(ids[-1]))
    return Tokens(ids[0] + ids[1], mask, _made_by(row, column("tokenizer")), len(ids[0]))


def _mask(row: Row, field: str, tokens: int) -> list[bool]:
    """Return which of some tokens are learned, as a field says it."""
    mask = numbers_of(row, field, "0 or 1")
    if wrong := sorted(set(mask) - {0, 1}):
        raise DataError("data.tokens", f"{row.source}: field {field!a} holds {wrong[0]}; legal are 0 and 1")
    if len(mask) != tokens:
        raise DataError(
            "data.tokens", f"{row.source}: field {field!a} has {number_of(len(mask), 'value')} for {number_of(tokens, 'token')}"
        )
    return [bool(one) for one in mask]


def _made_by(row: Row, field: str | None) -> str | None:
    """Return the digest of the vocabulary that the tokens of a row are of, if it says it."""
    made = None if field is None else row.values.get(field)
    if not isinstance(made, str | None):
        raise DataError("data.tokens", f"{row.source}: field {field!a} is {kind_of(made)}; legal is the digest of a vocabulary")
    return made


def numbers_of(row: Row, field: str, legal: str) -> list[int]:
    """Return a list of whole numbers in a field of a row; ``legal`` says of what.

    Raises:
        DataError: it holds something else; names file, line and field.
    """
    value: Any = row.values.get(field)
    if field not in row.values or not isinstance(value, list):
        raise DataError("data.tokens", f"{row.source}: field {field!a} is {kind_of(value)}; legal is a list of {legal}")
    try:
        found = np.asarray(value) if value else np.zeros(0, np.int64)
    except ValueError:  # lists of different lengths
        found = np.zeros(0)
    if found.ndim != 1 or found.dtype.kind not in "biu":
        raise DataError("data.tokens", f"{row.source}: field {field!a} holds something else than a list of {legal}")
    return [int(one) for one in found]


def check_tokens(tokens: Tokens, source: str, largest: int, vocabulary: str) -> None:
    """Refuse tokens that are not those of a tokenizer.

    Args:
        tokens: the tokens.
        source: origin of the row.
        largest: its largest id.
        vocabulary: digest of its vocabulary.

    Raises:
        DataError: names file and line.
    """
    if tokens.tokenizer not in (None, vocabulary):
        raise DataError(
            "data.tokens",
            f"{source}: its tokens are those of another tokenizer: the digest of its vocabulary is {tokens.tokenizer}, that of "
            f"the tokenizer of the run {vocabulary}",
        )
    for place, token in enumerate(tokens.ids):
        if not 0 <= token <= largest:
            raise DataError(
                "data.tokens", f"{source}: token {place} is {token}; legal are the ids of the tokenizer, 0 to {largest}"
            )

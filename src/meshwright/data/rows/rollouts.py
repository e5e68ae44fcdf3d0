"""Rows that are rollouts: the tokens of a prompt and of an answer to it, how likely these were, and how good the answer is."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.data.rows.bad_rows import BadRows
from meshwright.data.rows.columns import TensorColumn
from meshwright.data.rows.document import Document, Rewarded, Tokens
from meshwright.data.rows.row_files import Row
from meshwright.data.rows.row_values import read_values
from meshwright.data.rows.token_rows import numbers_of
from meshwright.errors import DataError, number_of

__all__ = ["rollout", "with_advantages"]

SMALLEST = 1e-4
"""What is added to the standard deviation of the rewards of a group, as TRL does."""

ROUNDED = 1e-3
"""By how much the log-probability of a certain token may be above 0: engines compute it as a difference of rounded numbers."""

OLD, ADVANTAGES = "old_log_probs", "advantages"


def rollout(document: Document, row: Row, column: Callable[[str], str | None]) -> Document:
    """Return a document with the tokens of a rollout and their values: 0 at the prompt, which is not learned.

    Args:
        document: the document, with the values of columns of the user.
        row: ``prompt_ids`` and ``completion_ids``, lists of tokens; ``old_log_probs``, a number for each token of the
            completion; ``advantages``, a number or one for each of these tokens, or else ``reward`` and ``group``; and maybe
            ``completion_mask``, 0 for tokens that the model did not choose, such as the results of tools.
        column: returns the column of a name of the format; ``None``: it is left out.

    Raises:
        DataError: names file, line and field.
    """
    prompt, said = (numbers_of(row, str(column(name)), "ids") for name in ("prompt_ids", "completion_ids"))
    for name, ids in (("prompt_ids", prompt), ("completion_ids", said)):
        if not ids:
            raise DataError(
                "data.rollout", f"{row.source}: field {column(name)!a} is empty; a rollout has a prompt and an answer"
            )
    mask = [1] * len(said)
    if (field := column("completion_mask")) is not None and row.values.get(field) is not None:
        mask = numbers_of(row, field, "0 or 1")
        _check_length(row, field, mask, len(said))
        if wrong := sorted(set(mask) - {0, 1}):
            raise DataError("data.rollout", f"{row.source}: field {field!a} holds {wrong[0]}; legal are 0 and 1")
        if not any(mask):
            raise DataError("data.rollout", f"{row.source}: field {field!a} has no 1, so that nothing is learned")
    old = _values(row, str(column(OLD)), len(said))
    if (old > ROUNDED).any():
        raise DataError(
            "data.rollout", f"{row.source}: field {column(OLD)!a} holds {old.max():g}; a log-probability is at most 0"
        )
    values = {OLD: old}
    field, rewarded = column(ADVANTAGES), None
    if field is not None and row.values.get(field) is not None:
        values[ADVANTAGES] = _values(row, field, len(said))
    else:
        rewarded = _rewarded(row, column)
        values[ADVANTAGES] = np.zeros(len(said), np.float32)
    begin = len(prompt)
    padded = {name: np.concatenate([np.zeros(begin, one.dtype), one]) for name, one in values.items()}
    tokens = Tokens([*prompt, *said], [*[False] * begin, *map(bool, mask)], None)
    return replace(document, tokens=tokens, values={**document.values, **padded}, rewarded=rewarded)


def _values(row: Row, field: str, many: int) -> npt.NDArray[np.float32]:
    """Return a number for each token of the completion; one number alone is that of all."""
    alone = not isinstance(row.values.get(field), Sequence) and field != OLD
    column = TensorColumn(per="document" if alone else "token", column=field)
    found = read_values({"values": column}, row)["values"]
    if alone:
        return np.full(many, found, np.float32)
    _check_length(row, field, found, many)
    return np.asarray(found, np.float32)


def _check_length(row: Row, field: str, found: Any, many: int) -> None:
    if len(found) != many:
        raise DataError(
            "data.rollout",
            f"{row.source}: field {field!a} has {number_of(len(found), 'value')}, and the completion has "
            f"{number_of(many, 'token')}; each token has one",
        )


def _rewarded(row: Row, column: Callable[[str], str | None]) -> Rewarded:
    fields = [column(name) for name in ("reward", "group")]
    if any(field is None or row.values.get(field) is None for field in fields):
        raise DataError(
            "data.rollout",
            f"{row.source}: there is neither {column(ADVANTAGES) or ADVANTAGES!a} nor both of {fields[0] or 'reward'!a} and "
            f"{fields[1] or 'group'!a}; one of the two says how good an answer is",
        )
    reward = read_values({"reward": TensorColumn(per="document", column=fields[0])}, row)["reward"]
    group = row.values[str(fields[1])]
    if not isinstance(group, str | int):
        raise DataError("data.rollout", f"{row.source}: field {fields[1]!a} is {type(group).__name__}; legal is text or an int")
    return Rewarded(group, float(reward))


def with_advantages(rows: Iterator[list[Document]], scales: bool, bad: BadRows) -> Iterator[list[Document]]:
    """Give rollouts with a reward their advantage: the reward, less the mean of those of its group.

    Args:
        rows: the documents of each row. The rows of a group follow each other.
        scales: whether it is divided by the standard deviation of the rewards of the group, as GRPO does (arXiv 2402.03300,
            section 4.1.2).
        bad: collects groups of one row, and those that come again after another group.
    """
    seen, group = set[str | int](), list[Document]()
    for row in rows:
        if row[0].rewarded is None:
            yield row
            continue
        if group and _name(group[0]) != _name(row[0]):
            yield from _finished(group, seen, scales, bad)
            group = []
        group += row
    yield from _finished(group, seen, scales, bad)


def _name(document: Document) -> str | int | None:
    return None if document.rewarded is None else document.rewarded.group


def _finished(group: list[Document], seen: set[str | int], scales: bool, bad: BadRows) -> Iterator[list[Document]]:
    if not group:
        return
    name, wrong = _name(group[0]), ""
    assert name is not None
    if name in seen:
        wrong = "comes again after another group; the rows of a group follow each other"
    elif len(group) == 1:
        wrong = "has one row, whose reward can be compared with no other"
    seen.add(name)
    if wrong:
        for document in group:
            bad.add(DataError("data.rollout", f"{document.source}: group {name!a:.40} {wrong}"))
        return
    rewards = np.array([document.rewarded.reward for document in group if document.rewarded])
    advantages = rewards - rewards.mean()
    if scales:
        advantages = advantages / (rewards.std(ddof=1) + SMALLEST)
    for document, advantage in zip(group, advantages, strict=True):
        learned = np.array(document.tokens.mask if document.tokens else [])
        yield [replace(document, values={**document.values, ADVANTAGES: (advantage * learned).astype(np.float32)})]

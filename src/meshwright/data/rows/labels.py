"""The label of a row: a class, several at once, or numbers."""

from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.data.rows.row_files import Row
from meshwright.data.rows.turns import field_of, kind_of
from meshwright.data.rows.wanted import Labels
from meshwright.errors import DataError, number_of

__all__ = ["label_of"]


def label_of(row: Row, field: str, labels: Labels) -> npt.NDArray[Any]:
    """Return the label of a row [] or [labels], in the dtype of its column.

    Args:
        row: the row.
        field: the field that holds it.
        labels: what labels are.

    Raises:
        DataError: there is none, it is of another kind, or out of range; names file, line, field and what is legal.
    """
    value = field_of(row, field, "columns")
    found, names = None, dict(zip(labels.names, range(labels.count), strict=False))
    if labels.kind == "single_label_classification":
        number = names.get(value) if isinstance(value, str) else value
        if isinstance(number, int | np.integer) and 0 <= number < labels.count:
            found = np.asarray(int(number), np.int64)
    elif labels.kind == "multi_label_classification" and _all(value, str):
        if (value and set(value) <= names.keys()) or value == []:
            found = np.zeros(labels.count, np.float32)
            found[[names[name] for name in value]] = 1
    elif labels.kind == "multi_label_classification" and _are_classes(value, labels.count):
        found = np.zeros(labels.count, np.float32)
        found[value] = 1
    else:
        found = _numbers(value, labels)
    if found is None:
        said = f"{value!a:.60}" if isinstance(value, str | int | float | list) else kind_of(value)
        raise DataError("data.label", f"{row.source}: field {field!a} holds {said}; legal is {_legal(labels)}")
    return found


def _are_classes(value: Any, count: int) -> bool:
    """Return whether a list has the numbers of classes, and not a number from 0 to 1 for each label.

    With three labels or more it cannot be both: as many different numbers of classes as there are labels have a 2 among them.
    """
    whole = _all(value, int | np.integer) and not any(isinstance(one, bool) for one in value)
    return whole and count > 2 and len({*value}) == len(value) and all(0 <= one < count for one in value)


def _numbers(value: Any, labels: Labels) -> npt.NDArray[Any] | None:
    """Return numbers in the shape of the labels; ``None``: they are not legal."""
    shape = () if labels.column.width is None else (labels.count,)
    if not (_all(value, (int, float)) if shape else isinstance(value, int | float)):
        return None
    with np.errstate(over="ignore"):
        found = np.asarray(value, np.float32)
    if found.shape != shape or not np.isfinite(found).all():
        return None
    inside = labels.kind == "regression" or bool(((found >= 0) & (found <= 1)).all())
    return found if inside else None


def _all(value: Any, kind: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, kind) for one in value)


def _legal(labels: Labels) -> str:
    """What a row may hold, for messages."""
    names = f"{', '.join(map(repr, labels.names[:6]))}{', ...' if len(labels.names) > 6 else ''}" if labels.names else ""
    if labels.kind == "single_label_classification":
        return f"a whole number of 0 to {labels.count - 1}" + (f", or one of {names}" if names else "")
    if labels.kind == "multi_label_classification":
        each = f"a list of {number_of(labels.count, 'number')} from 0 to 1"
        if labels.count > 2:
            each += f", or of different whole numbers of 0 to {labels.count - 1}, those of its labels"
        return each + (f", or of some of {names}" if names else "")
    return "a finite number" if labels.count == 1 else f"a list of {labels.count} finite numbers"

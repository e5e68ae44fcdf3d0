"""The differences between two plans, row by row."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["PlanDifference", "field_differences", "row_differences"]


@dataclass(frozen=True)
class PlanDifference:
    """One difference between two plans.

    Attributes:
        row: ``layout``, ``options``, or kind and name of a row, such as ``parameter NAME`` or ``unit NAME``.
        field: the field that differs; empty if one of the plans does not have the row.
        left: value in the first plan; ``None`` if it has no such row.
        right: value in the second plan; ``None`` if it has no such row.
    """

    row: str
    field: str
    left: Any
    right: Any

    def __str__(self) -> str:
        if not self.field:
            return f"{self.row}: only in the {'second' if self.left is None else 'first'} plan"
        return f"{self.row}: {self.field} {self.left!r} -> {self.right!r}"


def field_differences(label: str, left: Any, right: Any) -> Iterator[PlanDifference]:
    """Yield the fields in which two objects of one dataclass differ."""
    for item in fields(left):
        ours, theirs = getattr(left, item.name), getattr(right, item.name)
        if ours != theirs:
            yield PlanDifference(label, item.name, ours, theirs)


def row_differences(kind: str, left: Sequence[Any], right: Sequence[Any]) -> Iterator[PlanDifference]:
    """Yield the differences between two tables, whose rows are matched by name."""
    ours, theirs = ({row.name: row for row in table} for table in (left, right))
    for name in (*ours, *(name for name in theirs if name not in ours)):
        label = f"{kind} {name or '(root)'}"
        if name not in theirs or name not in ours:
            yield PlanDifference(label, "", ours.get(name), theirs.get(name))
        else:
            yield from field_differences(label, ours[name], theirs[name])

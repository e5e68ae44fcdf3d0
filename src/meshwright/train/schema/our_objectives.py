"""The objectives that Meshwright brings, by the names that a configuration calls them, and which rows each reads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.data.rows.columns import FORMATS, PLAIN
from meshwright.user_code import PartConfig

__all__ = ["OURS", "OurObjective", "objective_of"]


@dataclass(frozen=True)
class OurObjective:
    """An objective of ours.

    Attributes:
        part: returns its class, as ``module:Name``, of its arguments.
        formats: returns the formats of rows that it reads, of its arguments.
        unpairs: returns whether it learns each answer of a pair by itself.
    """

    part: Callable[[Mapping[str, Any]], str]
    formats: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda arguments: PLAIN
    unpairs: Callable[[Mapping[str, Any]], bool] = lambda arguments: False


def _of_preference(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    return ("preference", "unpaired_preference") if _is_kto(arguments) else ("preference",)


def _is_kto(arguments: Mapping[str, Any]) -> bool:
    return arguments.get("loss_type") == "kto"


def _preference(arguments: Mapping[str, Any]) -> str:
    return f"meshwright.objectives.preference:{'Kto' if _is_kto(arguments) else 'Preference'}"


OURS = {
    "preference": OurObjective(_preference, _of_preference, _is_kto),
    "policy": OurObjective(lambda arguments: "meshwright.objectives.policy:Policy"),
}


def objective_of(part: PartConfig | None, format: str) -> tuple[str, tuple[str, ...], bool]:
    """Return the name of an objective, the formats of rows that it reads, and whether it learns answers by themselves.

    Args:
        part: the objective of a configuration; ``None``: that of the family.
        format: ``data.format``. An objective of the user's reads any format that is named.
    """
    if part is None or part.use not in OURS:
        own = part is not None and ":" in part.use
        named = (format,) if own and format in FORMATS else ()
        return "of the model" if part is None else part.use, named or PLAIN, False
    ours = OURS[part.use]
    return part.use, ours.formats(part.arguments), ours.unpairs(part.arguments)

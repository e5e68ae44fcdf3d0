"""The values of rows and actions by name: as people see them, as JSON has them, and read from there."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from meshwright.plan.axes.tensor.move_kinds import Bias, Kernel, Move
from meshwright.plan.given.closed_choices import ActivationCheckpointing, ContextBalance, ContextMethod, SyncPolicy
from meshwright.plan.given.cut_points import POSITIONS, ROWS
from meshwright.plan.result.program import ACTIONS, Action, Cut, Engine

__all__ = ["describe", "read_action", "read_row", "read_tuples", "values_of"]

_ROW_DEFAULTS: dict[str, Any] = {
    "entry": Move.NONE, "exit": Move.NONE, "sums": (), "token_axis": "", "causal": True, "window": None, "recompute": False,
    "output_dtype": None, "flat": False,
}  # fmt: skip
"""Values of rows that are not shown with an action."""


def values_of(action: Action) -> dict[str, Any]:
    """Return the values of an action by name, and those of its row that are carried out, as they are shown and saved."""
    names = action.SHOWN.split() if hasattr(action, "SHOWN") else [item.name for item in fields(action)]
    return {name: getattr(action if hasattr(action, name) else action.row, name) for name in names}  # type: ignore[union-attr]


def describe(action: Action) -> tuple[str, str]:
    """Return what an action is applied to (its first value), and how (the other values that are not defaults)."""
    (_, first), *others = values_of(action).items()
    defaults = {**_ROW_DEFAULTS, **{item.name: item.default for item in fields(action)}}
    shown = (f"{name} {_text(value)}" for name, value in others if value not in (defaults.get(name, MISSING), ()))
    return _text(first), "; ".join(shown)


def _text(value: Any) -> str:
    if value == ():
        return "none"
    if isinstance(value, tuple):
        return ", ".join(f"({_text(item)})" if isinstance(item, tuple) else _text(item) for item in value)
    return "(root)" if value == "" else str(value)


def read_tuples(value: Any) -> Any:
    """Return a value of JSON with tuples for its lists."""
    return tuple(read_tuples(item) for item in value) if isinstance(value, list) else value


def read_row(kind: type[Any], item: Mapping[str, Any]) -> Any:
    """Return a row, or another dataclass of a plan, from its values in JSON."""
    types, values = get_type_hints(kind), {name: read_tuples(value) for name, value in item.items()}
    choices = (SyncPolicy, ActivationCheckpointing, ContextMethod, ContextBalance, Move, Kernel, Bias, Engine)
    return kind(**{name: types[name](value) if types[name] in choices else value for name, value in values.items()})


def read_action(item: Mapping[str, Any], rows: Mapping[tuple[type[Any], str], Any]) -> Action:
    """Return an action from its values in JSON.

    Args:
        item: the values; the first is the kind of the action, the second what it is applied to.
        rows: the rows of the plan by their kind and their name.
    """
    kind, (_, applied_to, *_) = ACTIONS[item["action"]], item.values()
    if kind is Cut and "sizes" not in item:  # an earlier version knew the features, and streams between them and positions
        item = {**item, "sizes": [ROWS, POSITIONS, *item.get("streams", ()), item["features"]]}
    own = {field.name: item[field.name] for field in fields(kind) if field.name in item}
    held = get_type_hints(kind).get("row")
    action: Action = read_row(kind, own if held is None else {**own, "row": rows[held, applied_to]})
    return action

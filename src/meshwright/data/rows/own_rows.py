"""Rows by code of the user: a part that returns them (`data.source`), and a function that changes each (`data.map`)."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from meshwright.data.data_config import DataConfig
from meshwright.data.rows.bad_rows import BadRows
from meshwright.data.rows.row_files import Row, refuse_duplicates, without_nulls
from meshwright.errors import ConfigError, DataError, Problems
from meshwright.user_code import PartConfig, check_arguments, code_of, find_part, raised_by

__all__ = ["RowMap", "code_of_parts", "part_problems", "source_rows"]

SOURCE, MAP = "data.source", "data.map"


def part_problems(config: DataConfig) -> Problems:
    """Return what is wrong with the parts of the data: they do not exist, or have other arguments. None of them is called."""
    problems = Problems()
    for find, part in ((_source, config.source), (_map, config.map)):
        if part is not None:
            try:
                find(part)
            except ConfigError as error:
                problems.extend(error.problems)
    return problems


def code_of_parts(config: DataConfig) -> dict[str, Any]:
    """Return what the parts of the data are, by their keys: name, arguments, and a digest of the code of their module."""
    parts = {SOURCE: (_source, config.source), MAP: (_map, config.map)}
    return {
        where: {**part.model_dump(mode="json"), "code": code_of(find(part)[0])}
        for where, (find, part) in parts.items()
        if part is not None
    }


def _source(part: PartConfig) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the function or class of a source, and its arguments."""
    found = _callable(SOURCE, part, "sources")
    return found, check_arguments(SOURCE, found, part.arguments)


def _map(part: PartConfig) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the function or class that changes rows, and its arguments, without the row."""
    found = _callable(MAP, part, "maps")
    if isinstance(found, type):
        if "__call__" not in dir(found):
            raise ConfigError("part.signature", f"{MAP}={part.use}: lacks `def __call__(self, row)`")
        return found, check_arguments(MAP, found, part.arguments)
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    if not parameters or parameters[0].kind is parameters[0].KEYWORD_ONLY:
        raise ConfigError("part.signature", f"{MAP}={part.use}: takes no row; legal is (row, ...)")
    return found, check_arguments(MAP, found, part.arguments, given=1)


def _callable(where: str, part: PartConfig, kind: str) -> Callable[..., Any]:
    found = find_part(where, part.use, kind)
    if not callable(found):
        raise ConfigError("part.signature", f"{where}={part.use}: is {type(found).__name__}; legal is a function or a class")
    return found


def source_rows(config: DataConfig, bad: BadRows) -> Iterator[Row]:
    """Yield the rows of `data.source`, which is called anew.

    Args:
        config: its source; a row that is a string is a text.
        bad: counts the rows, and collects those that are no rows.

    Raises:
        ConfigError: there is no such part, or it has other arguments.
        DataError: it raises something, with the number of the row before and the user's own lines; or it returns no rows.
    """
    part = config.source
    assert part is not None
    find, arguments = _source(part)
    number = 0
    try:
        made = find(**arguments)
        rows = _iterator(made)
        if rows is not None:
            clean = type(made).__module__.partition(".")[0] == "datasets"  # arrow adds nulls
            for number, values in enumerate(rows, start=1):
                bad.rows += 1
                try:
                    row = _row(values, config.text_column, f"{part.use}, row {number}")
                except DataError as error:
                    bad.add(error)
                else:
                    yield Row(without_nulls(row.values), row.source) if clean else row
            return
    except Exception as error:
        where = f", after row {number}" if number else ""
        raise DataError("part.raised", f"{SOURCE}={part.use}{where}: {raised_by(error)}") from error
    raise DataError(
        "part.returned", f"{SOURCE}={part.use}: returned {type(made).__name__}; legal is an iterable or a sequence of rows"
    )


def _iterator(made: Any) -> Iterator[Any] | None:
    """Return an iterator over the rows of an iterable or a sequence; ``None``: it is neither."""
    if isinstance(made, str | bytes | Mapping):
        return None
    if hasattr(made, "__iter__"):
        return iter(made)
    if hasattr(made, "__len__") and hasattr(made, "__getitem__"):
        return (made[index] for index in range(len(made)))
    return None


def _row(values: Any, text: str, source: str) -> Row:
    """Return what code of the user gave as a row.

    Raises:
        DataError: it is none.
    """
    if isinstance(values, str):
        return Row({text: values}, source)
    if isinstance(values, Mapping) and all(isinstance(key, str) for key in values):
        return Row(dict(values), source)
    kind = "an object whose keys are not all text" if isinstance(values, Mapping) else type(values).__name__
    raise DataError("part.returned", f"{source}: holds {kind}, not an object with fields, or a text")


class RowMap:
    """Changes rows by `data.map`, if there is one.

    Raises:
        ConfigError: there is no such part, it has other arguments, or it cannot be made.
    """

    def __init__(self, config: DataConfig) -> None:
        self.part, self.text = config.map, config.text_column
        self._function: Callable[[dict[str, Any]], Any] | None = None
        if self.part is not None:
            found, arguments = _map(self.part)
            try:
                self._function = found(**arguments) if isinstance(found, type) else lambda row: found(row, **arguments)
            except Exception as error:
                raise ConfigError("config.part", f"{MAP}={self.part.use}: cannot be made: {raised_by(error)}") from error

    def __bool__(self) -> bool:
        return self._function is not None

    def rows(self, row: Row) -> list[Row]:
        """Return what becomes of a row: one row, several, or none.

        Raises:
            DataError: the map raises something, or returns no rows; names file and line.
        """
        if self._function is None or self.part is None:
            return [row]
        refuse_duplicates(row)
        try:
            found = self._function(dict(row.values))
            several = found if isinstance(found, Iterable) and not isinstance(found, str | bytes | Mapping) else [found]
            made = [] if found is None else list(several)
        except Exception as error:
            raise DataError("part.raised", f"{row.source}: {MAP}={self.part.use} raised {raised_by(error)}") from error
        try:
            return [_row(values, self.text, row.source) for values in made]
        except DataError as error:
            kind = str(error).removeprefix(f"{row.source}: holds ")
            raise DataError("part.returned", f"{row.source}: {MAP}={self.part.use} returned {kind}, several, or None") from None

"""How the parameters of a plan are arranged: their units, stages, and which are stored alike. Plans of other sizes share it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from meshwright.once import Once
from meshwright.plan.result.rows import ParameterRow

__all__ = ["ArrangedRows", "Arrangement", "Entry", "arrangement_of"]


class Entry(NamedTuple):
    """A parameter, without what depends on sizes of the layout.

    Attributes:
        name: first name of the parameter.
        aliases: its other names.
        unit: name of the unit that gathers it.
        stages: the stages that hold it.
        way: number of the way in which it is stored and updated.
        numel: number of its elements.
    """

    name: str
    aliases: tuple[str, ...]
    unit: str
    stages: tuple[int, ...]
    way: int
    numel: int


@dataclass(frozen=True)
class Arrangement(Once):
    """The parameters of a model, in order. A *place* is the number of one of them.

    Attributes:
        entries: the parameters.
    """

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, rows: Sequence[ParameterRow]) -> "Arrangement":
        """Return that of some rows. Those that were made one by one, as of a plan that was read, have a way each."""
        ways: dict[object, int] = {}
        numbers = [ways.setdefault(row.way, len(ways)) for row in rows]
        pairs = zip(rows, numbers, strict=True)
        return cls(tuple(Entry(row.name, row.aliases, row.unit, row.stages, way, row.numel) for row, way in pairs))

    @cached_property
    def of_units(self) -> dict[str, list[int]]:
        """The places of the parameters of each unit that has some, by its name."""
        places: dict[str, list[int]] = {}
        for place, entry in enumerate(self.entries):
            places.setdefault(entry.unit, []).append(place)
        return places

    @cached_property
    def ways(self) -> tuple[tuple[int, int], ...]:
        """A place of each way, and how many parameters are of it."""
        return self._ways_of(range(len(self.entries)))

    @cached_property
    def ways_of_units(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """The same for each unit that has parameters. Units of the same ways in the same order share theirs."""
        alike: dict[tuple[int, ...], tuple[tuple[int, int], ...]] = {}
        found = {}
        for name, places in self.of_units.items():
            if (ways := tuple([self.entries[place].way for place in places])) not in alike:
                alike[ways] = self._ways_of(places)
            found[name] = alike[ways]
        return found

    def _ways_of(self, places: Sequence[int]) -> tuple[tuple[int, int], ...]:
        first: dict[int, int] = {}
        for place in places:
            first.setdefault(self.entries[place].way, place)
        numbers = Counter(self.entries[place].way for place in places)
        return tuple((first[way], number) for way, number in numbers.items())

    @cached_property
    def ways_of_stages(self) -> set[tuple[int, int]]:
        """The ways of the parameters, each with the first stage of some."""
        return {(entry.way, entry.stages[0]) for entry in self.entries}

    @cached_property
    def of_stages(self) -> dict[int, list[int]]:
        """The places of the parameters that each stage has."""
        places: dict[int, list[int]] = {}
        for place, entry in enumerate(self.entries):
            for stage in entry.stages:
                places.setdefault(stage, []).append(place)
        return places

    @cached_property
    def tied(self) -> list[int]:
        """The places of parameters with several names, or in several stages."""
        return [place for place, entry in enumerate(self.entries) if entry.aliases or len(entry.stages) > 1]

    def on_stages(self, stages: tuple[int, ...]) -> "tuple[list[int], Arrangement]":
        """Return the places of the parameters that some stages have, and the arrangement of these."""
        return self.once(_on_stages, stages)


def _on_stages(whole: Arrangement, stages: tuple[int, ...]) -> tuple[list[int], Arrangement]:
    places = sorted({place for stage in stages for place in whole.of_stages.get(stage, ())})
    return places, Arrangement(tuple([whole.entries[place] for place in places]))


class ArrangedRows(tuple[ParameterRow, ...]):
    """Rows of parameters with an arrangement that they share with those of other plans. A copy of it is a tuple."""

    arrangement: Arrangement

    @classmethod
    def of(cls, arrangement: Arrangement, rows: Sequence[ParameterRow]) -> "ArrangedRows":
        """Return rows that are arranged so."""
        found = cls(rows)
        found.arrangement = arrangement
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)


def arrangement_of(rows: tuple[ParameterRow, ...]) -> Arrangement:
    """Return how rows are arranged."""
    return getattr(rows, "arrangement", None) or Arrangement.of(rows)

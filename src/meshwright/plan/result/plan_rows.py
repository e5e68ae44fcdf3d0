"""The rows of a plan, and what they alone say, whatever the sizes of the layout and the options are."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshwright.once import Once, once_for_each
from meshwright.plan.given.names import nearest
from meshwright.plan.result.arrangement import Arrangement, arrangement_of
from meshwright.plan.result.program import Cut
from meshwright.plan.result.rows import (
    AttentionRow,
    ExpertsRow,
    ParameterRow,
    StageRow,
    TensorParallelRow,
    UnitRow,
)

__all__ = ["PlanRows", "RowsByWay", "rows_of_plans"]


@dataclass(frozen=True, eq=False)
class RowsByWay:
    """Rows of parameters, of which few differ by more than names, units and stages.

    Attributes:
        pairs: a row of each way, and how many there are of it.
    """

    pairs: Sequence[tuple[ParameterRow, int]]

    def __iter__(self) -> Iterator[tuple[ParameterRow, int]]:
        return iter(self.pairs)

    @cached_property
    def gathered_bytes(self) -> int:
        """Those of all parameters, gathered."""
        return sum(number * row.gathered_bytes for row, number in self.pairs)

    @cached_property
    def reduced_bytes(self) -> int:
        """Those of all gradients, as they are reduced."""
        return sum(number * row.reduced_bytes for row, number in self.pairs)

    @cached_property
    def parameter_bytes(self) -> int:
        """Those of all shards."""
        return sum(number * row.bytes_per_rank for row, number in self.pairs)

    @cached_property
    def gradient_bytes(self) -> int:
        """Those of the shards of all gradients."""
        return sum(number * row.bytes_per_rank for row, number in self.pairs if row.trainable)


_NO_ROWS = RowsByWay(())


@dataclass(frozen=True, eq=False)
class PlanRows(Once):
    """Rows of a plan. Plans share one if their rows are the same objects, as those of many candidates of a search are.

    All but the last are those of :class:`~meshwright.plan.result.sharding_plan.ShardingPlan`.

    Attributes:
        layers: names of the layers.
        parameters: a row of each parameter.
        units: a row of each unit.
        tensor_parallel: a row of each module that computes with slices or has a move.
        experts: a row of each mixture.
        attentions: a row of each attention over `cp`.
        mixers: a row of each mixer that ranks of `cp` divide.
        stages: a row of each stage.
        cut: the action that makes the stages; ``None``: there are none, or the plan is a part for prices.
    """

    layers: tuple[str, ...]
    parameters: tuple[ParameterRow, ...]
    units: tuple[UnitRow, ...]
    tensor_parallel: tuple[TensorParallelRow, ...]
    experts: tuple[ExpertsRow, ...]
    attentions: tuple[AttentionRow, ...]
    mixers: tuple[Any, ...]
    stages: tuple[StageRow, ...]
    cut: Cut | None

    @cached_property
    def fsdp_units(self) -> tuple[UnitRow, ...]:
        """The rows of modules that are FSDP units."""
        return tuple(unit for unit in self.units if not unit.part_of)

    @cached_property
    def units_by_name(self) -> dict[str, UnitRow]:
        """The rows of units by name."""
        return {unit.name: unit for unit in self.units}

    @cached_property
    def sliced_modules(self) -> dict[str, TensorParallelRow]:
        """The rows of modules that compute with slices or have a move, by module."""
        return {row.module: row for row in self.tensor_parallel}

    @cached_property
    def arrangement(self) -> Arrangement:
        """How its parameters are arranged."""
        return arrangement_of(self.parameters)

    @cached_property
    def ways(self) -> RowsByWay:
        """The rows of all parameters, by the way in which they are stored and updated."""
        return self._by_way(self.arrangement.ways)

    @cached_property
    def ways_of_units(self) -> dict[str, RowsByWay]:
        """The same for each unit that has parameters, by its name."""
        own = self.arrangement.ways_of_units
        alike = {ways: self._by_way(ways) for ways in {*own.values()}}
        return {name: alike[ways] for name, ways in own.items()}

    def _by_way(self, ways: Sequence[tuple[int, int]]) -> RowsByWay:
        return RowsByWay([(self.parameters[place], number) for place, number in ways])

    @cached_property
    def first_trained_stage(self) -> int:
        """The first stage with a trained parameter; the number of stages if there is none."""
        trained = {
            self.arrangement.entries[place].way for place, _ in self.arrangement.ways if self.parameters[place].trainable
        }
        return min((stage for way, stage in self.arrangement.ways_of_stages if way in trained), default=len(self.stages))

    @cached_property
    def numbers(self) -> tuple[int, int]:
        """The number of elements of all parameters, each counted once, and of those that are trained."""
        sizes = [(row.numel * number, row.trainable) for row, number in self.ways]
        return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)

    def rows(self, unit: UnitRow) -> list[ParameterRow]:
        """Return the rows of the parameters that a unit gathers. The second of two twin units gathers those of the first."""
        places = self.arrangement.of_units.get(unit.twin_of or unit.name, ())
        return [self.parameters[place] for place in places]

    def ways_of(self, unit: UnitRow) -> RowsByWay:
        """Return the same by way."""
        return self.ways_of_units.get(unit.twin_of or unit.name, _NO_ROWS)

    def parts(self, unit: UnitRow) -> tuple[UnitRow, ...]:
        """Return the rows of the modules of a unit: its own row, and those of modules that were wrapped together with it."""
        return (unit, *self._parts_of_units.get(unit.name, ()))

    @cached_property
    def _parts_of_units(self) -> dict[str, list[UnitRow]]:
        parts: dict[str, list[UnitRow]] = {}
        for other in self.units:
            if other.part_of:
                parts.setdefault(other.part_of, []).append(other)
        return parts

    def runs(self, module: str) -> tuple[int, int]:
        """Return the forwards and the backwards of a module in a microbatch: those of the innermost unit around it."""
        units = self.units_by_name
        unit = units[module if module in units else nearest(module, units)]
        return unit.forwards * unit.places, unit.places


@once_for_each
def rows_of_plans(*rows: Any) -> PlanRows:
    """Return the rows of all plans that have these very objects as rows; the arguments are those of :class:`PlanRows`."""
    return PlanRows(*rows)

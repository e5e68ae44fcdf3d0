"""Layers of a plan of which rows say the same, but for names: what is found of one of them holds for the others."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from meshwright.plan.given.names import nearest
from meshwright.plan.result.arrangement import Arrangement
from meshwright.plan.result.plan_rows import PlanRows
from meshwright.plan.result.rows import ParameterRow, UnitRow

__all__ = ["alike_layers", "places_in"]

_OF_UNIT = attrgetter(*(item.name for item in fields(UnitRow) if item.name not in ("name", "parameters")))
"""What the row of a unit says beside its name and those of its parameters. Twins are named: their layers are like no other."""


@dataclass(frozen=True)
class LayerRows:
    """The rows of a layer, each with what its name has behind that of the layer.

    Attributes:
        parameters: those inside of it.
        units: its own, and those inside of it.
    """

    parameters: Sequence[tuple[str, ParameterRow]]
    units: Sequence[tuple[str, UnitRow]]


@dataclass(frozen=True)
class AlikeLayers:
    """The layers of a plan by kind. Of those of a kind, the rows of parameters and units say the same.

    Other rows, such as those of attentions, are not compared.

    Attributes:
        kinds: the kind of each layer, a number; kinds are in order of their first layer.
        examples: the rows of the first layer of each kind.
        parameters_outside: the rows of parameters that are in no layer.
        units_outside: the rows of units that are in no layer.
    """

    kinds: Sequence[int]
    examples: Sequence[LayerRows]
    parameters_outside: Sequence[ParameterRow]
    units_outside: Sequence[UnitRow]


def alike_layers(rows: PlanRows) -> AlikeLayers:
    """Return the kinds of the layers of a plan. The order of rows does not matter."""
    return rows.once(_alike_layers)


def _alike_layers(rows: PlanRows) -> AlikeLayers:
    places = places_in(rows.layers)
    parameters = rows.arrangement.once(_parameters_in_layers, rows.layers)
    units: dict[str, list[tuple[str, UnitRow]]] = {layer: [] for layer in ("", *rows.layers)}
    says: dict[str, list[Hashable]] = {layer: [] for layer in units}
    for unit in rows.units:
        layer, rest = places[unit.name]
        says[layer].append((rest, _OF_UNIT(unit)))
        units[layer].append((rest, unit))
    first: dict[Hashable, str] = {}
    firsts = [first.setdefault((parameters.kinds[layer], frozenset(says[layer])), layer) for layer in rows.layers]
    numbers = {layer: number for number, layer in enumerate(first.values())}
    return AlikeLayers(
        [numbers[layer] for layer in firsts],
        [
            LayerRows([(rest, rows.parameters[place]) for rest, place in parameters.places[layer]], units[layer])
            for layer in numbers
        ],
        [rows.parameters[place] for _, place in parameters.places[""]],
        [unit for _, unit in units[""]],
    )


class _ParametersInLayers(NamedTuple):
    """The parameters of each layer; those outside of layers have an empty name.

    Attributes:
        kinds: layers with the same number have the same parameters, stored alike and in units of the same names.
        places: what the name of each has behind that of the layer, and its place.
    """

    kinds: dict[str, int]
    places: dict[str, list[tuple[str, int]]]


def _parameters_in_layers(arrangement: Arrangement, layers: tuple[str, ...]) -> _ParametersInLayers:
    places = places_in(layers)
    found: dict[str, list[tuple[str, int]]] = {layer: [] for layer in ("", *layers)}
    says: dict[str, list[Hashable]] = {layer: [] for layer in found}
    for place, entry in enumerate(arrangement.entries):
        layer, rest = places[entry.name]
        around, rest_of_unit = places[entry.unit]
        found[layer].append((rest, place))
        says[layer].append((rest, rest_of_unit if around == layer else (entry.unit,), entry.way))
    kinds: dict[Hashable, int] = {}
    return _ParametersInLayers({layer: kinds.setdefault(frozenset(own), len(kinds)) for layer, own in says.items()}, found)


class Places(dict[str, tuple[str, str]]):
    """By name, the layer that a module or a parameter is or is in, and the rest of the name. If there is none, it is empty.

    Args:
        layers: names of the layers.
    """

    def __init__(self, layers: Sequence[str]) -> None:
        super().__init__()
        self.layers = frozenset(layers)

    def __missing__(self, name: str) -> tuple[str, str]:
        layer = name if name in self.layers else nearest(name, self.layers)
        self[name] = found = layer, name[len(layer) :]
        return found


@lru_cache(maxsize=64)
def places_in(layers: tuple[str, ...]) -> Places:
    """Return the places of names. Plans of a model have the same names, and there are many plans of one in a search."""
    return Places(layers)

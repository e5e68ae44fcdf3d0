"""Stacks that run twice: two lists of layers that share their parameters, as an encoder and a decoder may.

FSDP2 has two ways to hold them.

- *Shared unit*: both layers are one unit. It has one gathered copy and one gradient, which autograd hands over when both passes
  are through. The unit reduces once, and the gradients of the whole stack wait meanwhile.
- *Twin units*: each layer is a unit, and the two share one sharded parameter. Each gathers and reduces in its own pass, so that
  one layer is held, and twice as much is sent.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from meshwright.plan.options import ParallelOptions, SyncPolicy
from meshwright.plan.sharding_plan import ParameterRow
from meshwright.plan.spec import ParallelSpec, match_names

__all__ = ["choose_twins", "pair_units"]


class _Unit(Protocol):
    sync: SyncPolicy | None
    reshard_after_forward: bool
    forwards: int
    twin_of: str
    part_of: str


def pair_units(spec: ParallelSpec, units: Iterable[str], problems: list[str]) -> dict[str, str]:
    """Each unit of a second stack with its twin in the first.

    Args:
        spec: declares the stacks.
        units: names of all units.
        problems: what is wrong is added to it.
    """
    names = list(units)
    found: dict[str, str] = {}
    for pair in spec.twins:
        firsts, seconds = match_names(pair.first, names), match_names(pair.second, names)
        if not firsts or len(firsts) != len(seconds):
            problems.append(
                f"twins {pair.first!r} and {pair.second!r}: {len(firsts)} and {len(seconds)} layers, which cannot be paired"
            )
            continue
        for first, second in zip(firsts, seconds, strict=True):
            for name in names:
                if name == second or name.startswith(f"{second}."):
                    twin = first + name.removeprefix(second)
                    if twin in names:
                        found[name] = twin
                    else:
                        problems.append(f"twins {pair.first!r} and {pair.second!r}: unit {name!r} has no twin {twin!r}")
    return found


def choose_twins(
    spec: ParallelSpec,
    pairs: Mapping[str, str],
    units: Mapping[str, _Unit],
    rows: Sequence[ParameterRow],
    options: ParallelOptions,
    problems: list[str],
) -> None:
    """Make the units of each pair twins, or one.

    Args:
        spec: declares the stacks.
        pairs: of :func:`pair_units`.
        units: all of them by name; those of the pairs are changed.
        rows: of all parameters, each with the unit of its first name.
        options: ``twin_units`` and ``sync_budget`` are read.
        problems: what is wrong is added to it.
    """
    if options.twin_units is not None and not pairs:
        problems.append(f"twin_units={options.twin_units}: no two layers of {spec.family} share parameters; leave it out")
    held = sum(row.gathered_bytes for row in rows if row.trainable and row.unit in pairs.values())
    twin = held > options.sync_budget if options.twin_units is None else options.twin_units
    forwards = {
        name: pair.forwards for pair in spec.twins for name in pairs for layer in match_names(pair.second, pairs)
        if name == layer or name.startswith(f"{layer}.")
    }  # fmt: skip
    for name, first in pairs.items():
        unit, partner = units[name], units[first]
        unit.forwards = forwards[name]
        if twin:
            unit.twin_of = first
            # Backward does not begin in the first stack, so its last layer has nothing to wait for.
            partner.reshard_after_forward = partner.reshard_after_forward or options.reshard_after_forward is None
        else:
            unit.part_of = first
            if unit.sync is not partner.sync:
                problems.append(
                    f"sync_units: {name!r} and {first!r} are one unit, and are given {unit.sync} and {partner.sync}; give them "
                    "the same, or set twin_units=True"
                )

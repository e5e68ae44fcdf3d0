"""Stacks that run twice: two lists of layers that share their parameters, such as an encoder and a decoder.

FSDP2 allows two ways to shard them.

- *Shared unit*: both layers are one unit. It has one gathered copy and one gradient, which autograd completes when both passes
  have ended. The unit reduces once, and until then the gradients of the whole stack are held.
- *Twin units*: each layer is a unit, and the two share one sharded parameter. Each gathers and reduces in its own pass, so that
  only one layer is held at once, and twice as much is communicated.
"""

from dataclasses import replace

from meshwright.errors import Problems
from meshwright.plan.draft import Draft, Found, Twin
from meshwright.plan.given.names import match_names, nearest, within
from meshwright.plan.result.sharding_plan import ShardingPlan, UnitRow

__all__ = ["choose_twins", "pair_units", "twin_parameters"]


def pair_units(draft: Draft) -> Found[dict[str, Twin]]:
    """Find, for each unit of a second stack, its twin in the first."""
    problems, twins, names = Problems(), dict[str, Twin](), list(draft.units)
    for pair in draft.spec.twins:
        firsts, seconds = match_names(pair.first, names), match_names(pair.second, names)
        if not firsts or len(firsts) != len(seconds):
            problems.add(
                "fsdp.twins",
                f"twins {pair.first!r} and {pair.second!r}: {len(firsts)} and {len(seconds)} layers, which cannot be paired",
            )
            continue
        for first, second in zip(firsts, seconds, strict=True):
            for name in names:
                if not within(name, [second]):
                    continue
                if (twin := first + name.removeprefix(second)) in draft.units:
                    twins[name] = Twin(twin, pair.forwards)
                else:
                    problems.add("fsdp.twins", f"twins {pair.first!r} and {pair.second!r}: unit {name!r} has no twin {twin!r}")
    return Found(twins, problems)


def choose_twins(draft: Draft) -> Found[dict[str, UnitRow]]:
    """Make the units of each pair twins, or one unit. The bytes of the parameters must be known."""
    options, problems, units = draft.options, Problems(), dict(draft.units)
    if options.twin_units is not None and not draft.twins:
        problems.add(
            "fsdp.twins",
            f"twin_units={options.twin_units}: no two layers of {draft.spec.family} share parameters; leave it out",
        )
    firsts = {twin.first for twin in draft.twins.values()}
    gathered_bytes = sum(row.gathered_bytes for row in draft.rows if row.trainable and row.unit in firsts)
    chosen = gathered_bytes > options.sync_budget if options.twin_units is None else options.twin_units
    chosen = chosen or bool(options.sharded_by)  # a function of the user is called for each layer
    for name, (first, forwards) in draft.twins.items():
        if chosen:
            units[name] = replace(units[name], forwards=forwards, twin_of=first)
            # Backward does not begin in the first stack, so its last layer need not stay gathered after forward.
            anew = units[first].reshard_after_forward or options.reshard_after_forward is None
            units[first] = replace(units[first], reshard_after_forward=anew)
            continue
        units[name] = replace(units[name], forwards=forwards, part_of=first)
        ours, theirs = draft.policies.get(name), draft.policies.get(first)
        if ours is not theirs:
            problems.add(
                "fsdp.twins",
                f"sync_units: {name!r} and {first!r} are one unit, but have the policies {ours} and {theirs}; "
                "give both the same, or set twin_units=True",
            )
    return Found(units, problems)


def twin_parameters(plan: ShardingPlan) -> tuple[tuple[str, str], ...]:
    """Return the two names of each parameter of twin units: that in the first unit and that in the second."""
    first = {unit.name: unit.twin_of for unit in plan.units if unit.twin_of}
    units = {unit.name for unit in plan.units}
    pairs = []
    for row in plan.parameters if first else ():
        for name in (row.name, *row.aliases):
            unit = nearest(name, units)
            ours = f"{first.get(unit, '')}{name.removeprefix(unit)}"
            if unit in first and ours in (row.name, *row.aliases):
                pairs.append((ours, name))
    return tuple(pairs)

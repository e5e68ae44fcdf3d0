"""How each parameter is stored: its unit, whether it is trained, its placements and bytes."""

from collections.abc import Iterator, Sequence
from math import ceil, prod
from typing import NamedTuple

from meshwright.errors import Problems
from meshwright.plan.axes.tensor.styles import STYLES, canonical, tp_dim, tp_placement
from meshwright.plan.draft import Arranged, Draft, Found, Rate, Way, names_for
from meshwright.plan.given.names import nearest
from meshwright.plan.given.options import NF4, NF4_BLOCK
from meshwright.plan.result.arrangement import ArrangedRows, Arrangement, Entry
from meshwright.plan.result.program import Freeze, Pack
from meshwright.plan.result.rows import DECAYED, UnitRow
from meshwright.plan.result.sharding_plan import EXPERTS, ParameterRow, ShardingPlan, bytes_of, itemsize, shard_axis

__all__ = [
    "arrange_parameters",
    "assign_units",
    "choose_trained",
    "freeze_actions",
    "leave_out_units",
    "pack_actions",
    "parameter_rows",
]


def leave_out_units(draft: Draft) -> Found[dict[str, UnitRow]]:
    """Leave out the smaller of two units that hold one tied parameter, if it is one that FSDP can do without.

    An embedding in a unit of its own and a head in the root are an example. A layer, or a unit with a dtype of its own, stays.
    """
    units, remarks = dict(draft.units), []
    for parameter in draft.parameters:
        while True:
            around = dict.fromkeys(nearest(draft.model.home(name), units) for name in parameter.names)
            if len({_owner(draft, name) for name in around}) == 1:
                break
            sizes = {
                name: sum(map(prod, draft.model.parameters_inside(name).values()))
                for name in around
                if units[name].kind == "unit"
            }
            if not sizes:
                break
            least = min(sizes, key=lambda name: sizes[name])
            del units[least]
            remarks.append(
                f"unit {least!r}: left out, because {' and '.join(map(repr, parameter.names))} are one parameter, which one "
                "unit must hold"
            )
    return Found(units, remarks=remarks)


def assign_units(draft: Draft) -> Found[dict[str, str]]:
    """Assign each parameter to the innermost unit around it. All names of a tied parameter must be in one unit, or in twins."""
    problems, unit_of = Problems(), dict[str, str]()
    for parameter in draft.parameters:
        units = [nearest(draft.model.home(name), draft.units) for name in parameter.names]
        owners = [_owner(draft, unit) for unit in units]
        if len(set(owners)) > 1:
            shown = " and ".join(
                f"{name!r} in unit {unit or '(root)'!r}" for name, unit in zip(parameter.names, units, strict=True)
            )
            problems.add(
                "fsdp.tied", f"tied parameter is claimed twice: {shown}; let one unit hold both, or leave them to the root"
            )
        if not parameter.shape:
            problems.add(
                "fsdp.scalar",
                f"parameter {parameter.name!r} is a scalar, which FSDP cannot shard; make it a tensor of shape (1,)",
            )
        unit_of[parameter.name] = owners[0]
    together = [set(map(canonical, parameter.names)) for parameter in draft.parameters]
    for group in draft.spec.tied:
        if not any(set(group) <= names for names in together):
            problems.add("fsdp.tied", f"the spec ties {' and '.join(group)}, but in the model they are not one parameter")
    return Found(unit_of, problems)


def _owner(draft: Draft, unit: str) -> str:
    """Return the unit that holds the parameters of a unit."""
    twin = draft.twins.get(unit)
    return draft.units[unit].part_of or (twin.first if twin else unit)


def choose_trained(draft: Draft) -> Found[set[str]]:
    """Choose the trained parameters: those that require a gradient in the model and that the options do not freeze."""
    problems, frozen = Problems(), set[str]()
    first = {name: parameter.name for parameter in draft.parameters for name in parameter.names}
    for pattern in draft.options.freeze:
        frozen.update(first[name] for name in names_for(problems, "freeze", pattern, first, "parameter"))
    trained = {parameter.name for parameter in draft.parameters if parameter.requires_grad} - frozen
    if frozen and not trained:
        problems.add("plan.freeze", f"freeze={list(draft.options.freeze)}: leaves no parameter to train")
    return Found(trained, problems)


def arrange_parameters(draft: Draft) -> Found[Arranged]:
    """Find which parameters are stored and updated in the same way. No sizes of the layout matter for it."""
    units, unit_of, styles, holding = draft.units, draft.unit_of, draft.tensor.styles, draft.stages.holding
    trained, rates, decay_rules, rules, forms = draft.trained, draft.rates, draft.decay_rules, draft.rules, draft.forms
    ways: dict[Way, int] = {}
    entries = []
    for parameter in draft.parameters:
        name = parameter.name
        unit = units[unit_of[name]]
        way = Way(
            parameter.shape, parameter.dtype, (unit.kind, unit.param_dtype, unit.reduce_dtype), styles.get(name),
            name in trained, rates.get(name) or Rate(), decay_rules[name], rules[name], forms.get(name),
        )  # fmt: skip
        number = ways.setdefault(way, len(ways))
        entries.append(Entry(name, parameter.aliases, unit.name, holding.get(name, (0,)), number, prod(parameter.shape)))
    return Found(Arranged(Arrangement(tuple(entries)), tuple(ways)))


def parameter_rows(draft: Draft) -> Found[tuple[ParameterRow, ...]]:
    """Make the row of each parameter."""
    arrangement, ways = draft.arranged
    stored = [_stored(draft, way) for way in ways]
    first = [_first_row(way, own) for way, own in zip(ways, stored, strict=True)]
    rows = [first[entry.way].like(entry.name, entry.aliases, entry.unit, entry.stages) for entry in arrangement.entries]
    return Found(ArrangedRows.of(arrangement, rows), _shape_problems(arrangement, ways, stored))


class _Stored(NamedTuple):
    """What a rank stores of a parameter.

    Attributes:
        placements: axis and placement, for each axis that cuts or copies it.
        local: the shape of its slice.
        gathered: numbers of the slice that FSDP gathers.
        block: numbers that a row of a slice must have a multiple of.
    """

    placements: tuple[tuple[str, str], ...]
    local: tuple[int, ...]
    gathered: int
    block: int


def _stored(draft: Draft, way: Way) -> _Stored:
    """Return what a rank stores of a parameter."""
    shape, dtype, style, kind = way.shape, way.dtype, way.style, way.of_unit[0]
    layout, local = draft.layout, list(shape)
    whole = [1] * len(local)  # what is cut in no dimension
    if dtype == NF4:
        whole[-1] = NF4_BLOCK * (STYLES[style].pieces if style in STYLES else 1)
    placements: list[tuple[str, str]] = []
    by_fsdp = 0  # the dimension that FSDP shards
    tp_cut: int | None = None
    axis = shard_axis(layout, kind)
    shards = layout.size(axis)
    if by_ep := axis == "ep_shard":
        local[0] = ceil(local[0] / layout.ep)
    elif (tp_cut := tp_dim(style, shape)) is not None:
        local[tp_cut] = ceil(local[tp_cut] / layout.size("tp"))
        placements.append(("tp", tp_placement(style, tp_cut)))
        # Packed rows are several matrices. If FSDP sharded the rows too, torch could no longer tell the matrices apart.
        by_fsdp = int(shards > 1 and tp_cut == 0 and STYLES[style or ""].pieces > 1)
    if kind == EXPERTS and local[0] % shards:
        # 128 experts over 1,024 ranks would be padded to eight times their size; other dimensions divide evenly.
        even = (dim for dim in range(1, len(local)) if dim != tp_cut and local[dim] % (shards * whole[dim]) == 0)
        by_fsdp = next(even, by_fsdp)
    # FSDP shards the slice that the other axes leave, and pads it to a multiple of the number of shards.
    local[by_fsdp] = ceil(local[by_fsdp] / shards) * shards
    gathered = prod(local)
    local[by_fsdp] //= shards
    if shards > 1:
        placements.insert(0, ("dp_shard" if layout.size("cp") == 1 and not by_ep else axis, f"Shard({by_fsdp})"))
    if by_ep:
        placements.append(("ep", "Shard(0)"))
    if layout.replicated:
        placements.insert(0, ("dp_replicate", "Replicate()"))
    return _Stored(tuple(placements), tuple(local), gathered, whole[-1])


def _shape_problems(arrangement: Arrangement, ways: Sequence[Way], stored: Sequence[_Stored]) -> Problems:
    """Return a problem for each parameter without entries, and for each whose blocks of 4-bit numbers a slice would cut."""
    problems = Problems()
    empty = {number for number, way in enumerate(ways) if not prod(way.shape)}
    cut = {number for number, own in enumerate(stored) if own.local[-1] % own.block}
    for entry in arrangement.entries if empty or cut else ():
        if entry.way in empty:
            problems.add(
                "fsdp.empty",
                f"{entry.name!r} has the shape {list(ways[entry.way].shape)}: torch's FSDP stores a parameter without entries "
                "in another shape; legal is a model without it",
            )
        if entry.way in cut:
            own = stored[entry.way]
            problems.add(
                "adapter.blocks",
                f"adapter.base=nf4: {entry.name!r} has {own.local[-1]} numbers in a row on each rank; legal are layouts and "
                f"sizes that give multiples of {own.block}, because blocks have {NF4_BLOCK}",
            )
    return problems


def _first_row(way: Way, stored: _Stored) -> ParameterRow:
    """Return the row of a parameter without a name.

    Args:
        way: in what way it is stored and updated.
        stored: what a rank stores of it.
    """
    _, param_dtype, reduce_dtype = way.of_unit
    compute = NF4 if way.dtype == NF4 else param_dtype or way.dtype
    rate, decays = way.rate, way.decay_rule in DECAYED
    return ParameterRow(
        name="",
        aliases=(),
        shape=way.shape,
        dtype=way.dtype,
        unit="",
        placements=stored.placements,
        local_shape=stored.local,
        bytes_per_rank=bytes_of(prod(stored.local), way.dtype),
        gathered_bytes=bytes_of(stored.gathered, compute),
        reduced_bytes=stored.gathered * itemsize(reduce_dtype or compute) if way.trainable else 0,
        trainable=way.trainable,
        tp_style=way.style,
        decayed=way.trainable and decays and rate.weight_decay != 0,
        decay_rule="group" if decays and rate.weight_decay == 0 else way.decay_rule,
        rate=rate.share,
        weight_decay=rate.weight_decay,
        betas=rate.betas,
        eps=rate.eps,
        fused=rate.fused,
        update=way.update,
        form=way.form,
    )


def pack_actions(plan: ShardingPlan) -> Iterator[Pack]:
    """Yield the actions that store frozen matrices in 4 bits."""
    for row in plan.parameters:
        if row.dtype == NF4:
            yield Pack((row.name, *row.aliases))


def freeze_actions(plan: ShardingPlan) -> Iterator[Freeze]:
    """Yield the action that freezes the parameters without a gradient."""
    yield Freeze(tuple(row.name for row in plan.parameters if not row.trainable))

"""Which modules are FSDP units, and how each behaves: resharding, dtypes, sync policy, gathers in backward."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace

from meshwright.errors import Refusal
from meshwright.plan.axes.data.twin_stacks import twin_parameters
from meshwright.plan.draft import Draft, UnitDraft
from meshwright.plan.given.closed_choices import ActivationCheckpointing, GradientReduction, SyncPolicy
from meshwright.plan.given.names import inside, last_of_each_container, nearest, within
from meshwright.plan.result.program import Action, Engine, JoinTwins, PartTwins, Wrap
from meshwright.plan.result.sharding_plan import (
    EXPERTS,
    LAYER,
    ROOT,
    ParameterRow,
    ShardingPlan,
    UnitRow,
    nothing_is_sharded,
    shard_axis,
    unit_axes,
)

__all__ = ["assign_sync", "draft_units", "gathered_in_backward", "unit_actions", "unit_rows"]


def draft_units(draft: Draft) -> None:
    """Draft every unit, in model order, and decide its resharding and dtypes."""
    spec, options = draft.spec, draft.options
    order = {name: index for index, name in enumerate(draft.model.modules)}
    explicit = options.reshard_after_forward
    dtypes = (options.param_dtype, options.reduce_dtype)
    units = {ROOT: UnitDraft(ROOT, "root", "the model itself", bool(explicit), *dtypes, options.output_dtype, None)}

    def claim(name: str, kind: str, rule: str, reshard: bool, sync: SyncPolicy | None = None) -> None:
        if (earlier := units.get(name)) is not None:
            draft.problems.add("fsdp.claimed_twice", f"module {name!r} is claimed twice: by {earlier.rule} and by {rule}")
            return
        units[name] = UnitDraft(name, kind, rule, reshard if explicit is None else explicit, *dtypes, None, sync)

    def matched(rule: str, pattern: str) -> list[str]:
        return draft.match(rule, pattern, draft.model.modules, "module")

    def called(rule: str, pattern: str, kinds: tuple[str, ...]) -> list[str]:
        """Return the names that a pattern matches. A list or a dict, whose forward nobody calls, is a problem."""
        names = matched(rule, pattern)
        draft.problems += [
            Refusal(
                "plan.pattern",
                f"{rule} pattern {pattern!r} matches {name!r}, a {draft.model.modules[name].kind}, which is not called itself; "
                f"its entries are '{name}.*'",
            )
            for name in names
            if draft.model.modules[name].kind in kinds
        ]
        return names

    for pattern in spec.layers:
        names = called("layers", pattern, ("ModuleList",))
        last = last_of_each_container(names)
        for name in names:
            claim(name, LAYER, f"layers pattern {pattern!r}", name not in last)
    if not spec.layers:
        draft.remarks.append("layers: none; what no other unit has is one unit, gathered as a whole")
    for rule in spec.units:
        names = called("units", rule.pattern, ("ModuleList", "ModuleDict"))
        for name in names:
            reshard = True if rule.reshard_after_forward is None else rule.reshard_after_forward
            claim(name, "unit", f"units pattern {rule.pattern!r}", reshard, rule.sync)
            units[name].together = rule.together
            units[name].part_of = names[0] if rule.together and name != names[0] else ""
        if rule.together and draft.layout.size("pp") > 1:
            draft.problems.add(
                "pp.units", f"units pattern {rule.pattern!r}: modules of several stages are no unit; the legal value of pp is 1"
            )
    for experts in spec.experts:
        for name in matched("experts", experts.pattern):
            claim(name, EXPERTS, f"experts pattern {experts.pattern!r}", True)
    for pattern in spec.fp32:
        for name in matched("fp32", pattern):
            if options.param_dtype in (None, "float32", "float64"):
                continue  # no parameter is cast to a lower precision: no unit needed
            if name not in units:
                claim(name, "fp32", f"fp32 pattern {pattern!r}", True)
            units[name] = replace(units[name], param_dtype="float32", output_dtype=options.param_dtype)
    for pattern in spec.idle:
        for name in matched("idle", pattern):
            if name in units:
                units[name].forwards = 0
    for name, places in _in_several_places(draft):
        if name not in units and len({nearest(place, units) for place in places}) > 1:
            claim(name, "unit", "a module in several places", True)
            draft.remarks.append(f"unit {name!r}: it stands in {len(places)} places, and is one unit for all of them")
        if name in units:
            units[name].places = len(places)
    for first, *others in _tied_modules(draft) if not spec.twins else ():
        if first not in units and len({nearest(name, units) for name in (first, *others)}) > 1:
            claim(first, "unit", "tied modules", True)
            for name in others:
                claim(name, "unit", "tied modules", True)
                units[name].part_of = first
            draft.remarks.append(f"unit {first!r}: one with {', '.join(map(repr, others))}, whose parameters are the same")
    for name, unit in units.items():
        runs, with_gradient = draft.model.traces.runs.get(name, (1, 1))
        if runs == 0 and unit.kind != EXPERTS:
            unit.forwards = 0
        elif runs > 1:
            unit.places = max(1, with_gradient)
            unit.forwards = -(-runs // unit.places)
    for pattern in options.exclude_units:
        for name in draft.match("exclude_units", pattern, [name for name in units if name], "unit"):
            if units[name].kind == EXPERTS and draft.layout.ep > 1:
                draft.problems.add(
                    "fsdp.exclude_units", f"exclude_units: {name!r} is a mixture, which is a unit of its own with ep > 1"
                )
            if units[name].part_of or any(unit.part_of == name for unit in units.values()):
                draft.problems.add(
                    "fsdp.exclude_units",
                    f"exclude_units: {name!r} has the parameters of another module, so one unit must hold both",
                )
            else:
                del units[name]
    draft.units = dict(sorted(units.items(), key=lambda item: order[item[0]]))
    if options.sharded_by:
        draft.remarks.append(
            f"sharded by the user's function {options.sharded_by}, called for each unit, the root last; the plan shows what "
            "torch's fully_shard would make, and cannot know which units, placements, dtypes, bytes and collectives it makes"
        )
        draft.problems += [
            Refusal(
                "fsdp.function",
                f"fully_shard_fn: {unit.part_of!r} and {name!r} hold the same parameters, and are one unit, which a function "
                "of one module cannot make; leave it out",
            )
            for name, unit in draft.units.items()
            if unit.part_of
        ]
    if options.reshard_after_forward and all(map(draft.whole, draft.units.values())):
        draft.problems.add(
            "fsdp.reshard", "reshard_after_forward=True: with dp_shard=1 and replicas nothing is sharded; leave it out"
        )


def _in_several_places(draft: Draft) -> Iterator[tuple[str, list[str]]]:
    """Yield each module that stands in several places and holds parameters, and the names that it has there."""
    places: dict[str, list[str]] = {}
    for holder, module in draft.model.modules.items():
        for own, child in module.children.items():
            places.setdefault(child, []).append(f"{holder}.{own}" if holder else own)
    yield from ((name, of) for name, of in places.items() if len(of) > 1 and draft.model.holds_parameters(name))


def _tied_modules(draft: Draft) -> Iterator[list[str]]:
    """Yield the largest modules whose parameters all are tied to those of other modules, together with these."""
    found: set[str] = set()
    for parameter in draft.parameters:
        names = [name for name in parameter.names if draft.model.home(name) == name]
        if len(names) < 2 or within(names[0], found):
            continue
        parts = [name.split(".") for name in names]
        shortest = min(map(len, parts))
        common = next((index for index in range(shortest) if len({path[-1 - index] for path in parts}) > 1), shortest)
        for depth in range(common, 1, -1):  # the last component is the parameter
            heads = [".".join(path[: len(path) - depth + 1]) for path in parts]
            inner = [set(draft.model.parameters_inside(head)) for head in heads]
            facts = draft.model.parameter_of
            if all(same == inner[0] for same in inner) and all(
                len({facts[f"{head}.{own}"].name for head in heads}) == 1 for own in inner[0]
            ):
                found.add(heads[0])
                yield heads
                break


def assign_sync(draft: Draft) -> None:
    """Set sync policies. Patterns of the options win over the spec, and the spec wins over the default of the options."""
    options = draft.options
    for unit in draft.units.values():
        unit.sync = unit.sync or options.sync  # if still None: decided when the bytes are known
    for pattern, policy in options.sync_units.items():
        for name in draft.match("sync_units", pattern, draft.units, "unit"):
            draft.units[name].sync = policy
    deferring = [name or "(root)" for name, unit in draft.units.items() if unit.sync is SyncPolicy.DEFER]
    if options.reshard_after_forward and deferring:
        draft.problems.add(
            "fsdp.reshard",
            f"reshard_after_forward=True and sync=defer (unit {deferring[0]!r}): defer keeps parameters gathered; "
            "legal with it are reshard_each and reduce_each",
        )


def unit_rows(draft: Draft, modes: Mapping[str, ActivationCheckpointing]) -> tuple[UnitRow, ...]:
    """Return the row of each unit.

    Args:
        draft: a draft that has the rows of the parameters.
        modes: activation checkpointing mode of each layer.
    """
    options, rows = draft.options, draft.rows
    for unit in draft.units.values():
        if draft.whole(unit):
            unit.reshard_after_forward = False
    _afford(draft)
    units = []
    in_backward = gathered_in_backward(list(draft.units), rows, implicit=options.prefetch_backward is None)
    for unit in draft.units.values():
        assert unit.sync is not None
        units.append(
            UnitRow(
                name=unit.name,
                kind=unit.kind,
                parameters=tuple(row.name for row in rows if row.unit == unit.name),
                reshard_after_forward=unit.reshard_after_forward,
                param_dtype=unit.param_dtype,
                reduce_dtype=unit.reduce_dtype,
                output_dtype=unit.output_dtype,
                sync=unit.sync,
                activation_checkpointing=modes.get(unit.name, ActivationCheckpointing.NONE),
                compile=unit.kind == LAYER and options.compile,
                gathers_in_backward=(unit.twin_of or unit.name) in in_backward,
                forwards=unit.forwards,
                places=unit.places,
                twin_of=unit.twin_of,
                part_of=unit.part_of,
                together=unit.together,
            )
        )
    _check_dtypes(draft, units)
    return tuple(units)


def _afford(draft: Draft) -> None:
    """Choose the sync policies that are still open.

    A policy is ``defer`` if everything that ``defer`` keeps unsharded through a step fits the budget and neither
    ``reshard_after_forward=True`` nor ``prefetch_backward`` is set; otherwise it is ``reduce_each``. If not everything fits,
    experts, which are most of a model, are the first to lose ``defer``.
    """
    options = draft.options
    undecided = {name: unit for name, unit in draft.units.items() if unit.sync is None}
    copies: dict[str, list[str]] = {}  # unit that owns parameters -> units that gather a copy of them
    for name, unit in draft.units.items():
        if not unit.part_of:
            copies.setdefault(unit.twin_of or name, []).append(name)

    def kept(names: Container[str]) -> int:
        total = 0
        for row in draft.rows:
            gathered = row.gathered_bytes + (row.reduced_bytes if options.microbatches > 1 else 0)
            total += gathered * sum(name in names for name in copies[row.unit])
        return total

    without = {name for name, unit in undecided.items() if unit.kind != EXPERTS}
    anew = options.reshard_after_forward or options.prefetch_backward is not None
    deferred = next((names for names in (set(undecided), without) if not anew and kept(names) <= options.sync_budget), set())
    for name, unit in undecided.items():
        unit.sync = SyncPolicy.DEFER if name in deferred else SyncPolicy.REDUCE_EACH


def gathered_in_backward(names: Sequence[str], rows: Sequence[ParameterRow], *, implicit: bool) -> set[str]:
    """Return the units whose gathered parameters backward needs. Units that were not resharded are not gathered again.

    These are the units that a gradient flows through: those that have trainable parameters or come after some. If prefetching
    is left to FSDP2 (``implicit``), there is one more, because FSDP2 prefetches, before the backward of a unit, the unit that
    finished forward before it.
    """
    last_row = {row.unit: index for index, row in enumerate(rows)}
    first_trainable = next((index for index, row in enumerate(rows) if row.trainable), len(rows))
    finishing: list[str] = []  # units as their forwards end: inner units before the unit around them, the root last
    running: list[str] = []
    for name in names:
        while running and not inside(name, running[-1]):
            finishing.append(running.pop())
        running.append(name)
    finishing.extend(reversed(running))
    flows = [first_trainable <= last_row.get(name, -1) for name in finishing]
    following = [implicit and flow for flow in (*flows[1:], False)]
    return {name for name, flow, ahead in zip(finishing, flows, following, strict=True) if flow or ahead}


def _check_dtypes(draft: Draft, units: Sequence[UnitRow]) -> None:
    """Check that the trainable parameters of a unit have one stored dtype, because FSDP gathers them as one buffer."""
    for unit in units:
        by_dtype: dict[str, str] = {}
        for row in draft.rows:
            if row.unit == unit.name and row.trainable:
                by_dtype.setdefault(row.dtype, row.name)
        if len(by_dtype) > 1:
            shown = ", ".join(f"{name!r} is {dtype}" for dtype, name in by_dtype.items())
            draft.problems.add(
                "fsdp.dtypes",
                f"unit {unit.label!r} mixes stored dtypes: {shown}; store them in one dtype or declare units apart",
            )


def unit_actions(plan: ShardingPlan) -> Iterator[Action]:
    """Yield the actions that wrap the units, from the inside out, the root last."""
    twins, pairs = twin_parameters(plan), tuple((unit.twin_of, unit.name) for unit in plan.units if unit.twin_of)
    if plan.options.sharded_by:  # the function shards both stacks
        twins, pairs = (), ()
    if twins:
        yield PartTwins(twins)
    no_grad_runs = any(unit.forwards > 1 or unit.twin_of for unit in plan.units)
    # A module in several places comes before everything that one of the places is inside of.
    shared = [unit.name for unit in plan.units if unit.places > 1 or (len(plan.parts(unit)) > 1 and unit.kind == "unit")]
    parts: tuple[list[UnitRow], list[UnitRow]] = [], []
    for unit in reversed(plan.fsdp_units):  # in the rows, parents come first
        parts[not within(unit.name, shared)].append(unit)
    for unit in (*parts[0], *parts[1]):
        yield _wrap(plan, unit, no_grad_runs)
    if pairs:
        yield JoinTwins(twins, pairs)


def _around(plan: ShardingPlan, parts: Sequence[UnitRow]) -> tuple[str, ...]:
    """Return the layers around modules that are one unit, and those of the modules that are in no layer."""
    return tuple(dict.fromkeys(next((layer for layer in plan.layers if inside(part.name, layer)), part.name) for part in parts))


def _wrap(plan: ShardingPlan, unit: UnitRow, no_grad_runs: bool) -> Wrap:
    layout = plan.layout
    replicas, axis = layout.size("dp_replicate"), shard_axis(layout, unit.kind)
    experts = axis == "ep_shard"
    divisor, plain_sum = None, False
    if plan.options.gradient_reduction is GradientReduction.SUM:
        divisor, plain_sum = 1.0, True  # NCCL and gloo do not support premultiplied sums in all cases
    elif experts:
        # FSDP2's default divisor is the size of the unit's reduction group. An expert gets tokens of all data ranks, so their
        # number is set here. In a reduce-scatter group of one rank FSDP2 copies and divides in the copy; with a plain sum it
        # would divide a second time afterwards (foreach_reduce of torch 2.13).
        divisor, plain_sum = float(replicas * layout.size("dp_shard_cp")), layout.size(axis) > 1
    parts, by_user = plan.parts(unit), plan.options.sharded_by
    return Wrap(
        unit=unit.name,
        modules=tuple(part.name for part in parts),
        engine=Engine.REPLICATE if nothing_is_sharded(layout) and not by_user else Engine.SHARD,
        axes=("dp_replicate", "dp_shard") if nothing_is_sharded(layout) and by_user else unit_axes(layout, unit.kind),
        experts=experts,
        dims=tuple((name, row.fsdp_dim) for row in plan.rows(unit) if row.fsdp_dim for name in (row.name, *row.aliases)),
        param_dtype=unit.param_dtype,
        reduce_dtype=unit.reduce_dtype,
        output_dtype=unit.output_dtype,
        reshard_after_forward=unit.reshard_after_forward,
        offload=plan.options.cpu_offload,
        divisor=divisor,
        plain_sum=plain_sum,
        each_run=len(parts) > 1,
        around=_around(plan, parts) if unit.together else (),
        no_grad_runs=no_grad_runs,
        sync=unit.sync,
        sharded_by=by_user,
    )

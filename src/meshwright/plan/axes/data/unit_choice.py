"""Which modules are FSDP units, and what options and spec say of each: resharding, dtypes, sync policy."""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.errors import Problems, Refusal
from meshwright.plan.draft import Draft, Found, names_for
from meshwright.plan.given.closed_choices import SyncPolicy
from meshwright.plan.given.names import last_of_each_container, match_names, nearest, within
from meshwright.plan.result.sharding_plan import ADDED, EXPERTS, LAYER, ROOT, UnitRow

__all__ = ["choose_policies", "choose_units"]


def choose_units(draft: Draft) -> Found[dict[str, UnitRow]]:
    """Choose the units, their resharding and their dtypes. In their rows, what depends on bytes has its default."""
    spec, options, problems = draft.spec, draft.options, Problems()
    remarks: list[str] = [] if spec.layers else ["layers: none; what no other unit has is one unit, gathered as a whole"]
    root = replace(_row(draft, ROOT, "root", reshard=False), output_dtype=options.output_dtype)
    units, rules = {ROOT: root}, {ROOT: "the model itself"}

    def claim(row: UnitRow, rule: str) -> None:
        if earlier := rules.get(row.name):
            problems.add("fsdp.claimed_twice", f"module {row.name!r} is claimed twice: by {earlier} and by {rule}")
            return
        units[row.name], rules[row.name] = row, rule

    for row, rule in _declared(draft, problems):
        claim(row, rule)
    for pattern in spec.fp32:
        for name in names_for(problems, "fp32", pattern, draft.model.modules, "module"):
            if options.param_dtype in (None, "float32", "float64"):
                continue  # no parameter is cast to a lower precision: no unit needed
            if name not in units:
                claim(_row(draft, name, "fp32"), f"fp32 pattern {pattern!r}")
            units[name] = replace(units[name], param_dtype="float32", output_dtype=options.param_dtype)
    for pattern in spec.idle:
        for name in names_for(problems, "idle", pattern, draft.model.modules, "module"):
            if name in units:
                units[name] = replace(units[name], forwards=0)
    for name, places in _in_several_places(draft):
        if name not in units and len({nearest(place, units) for place in places}) > 1:
            claim(_row(draft, name, "unit"), "a module in several places")
            remarks.append(f"unit {name!r}: it stands in {len(places)} places, and is one unit for all of them")
        if name in units:
            units[name] = replace(units[name], places=len(places))
    for first, *others in _tied_modules(draft) if not spec.twins else ():
        if first not in units and len({nearest(name, units) for name in (first, *others)}) > 1:
            claim(_row(draft, first, "unit"), "tied modules")
            for name in others:
                claim(replace(_row(draft, name, "unit"), part_of=first), "tied modules")
            remarks.append(f"unit {first!r}: one with {', '.join(map(repr, others))}, whose parameters are the same")
    units = {name: _with_runs(draft, unit) for name, unit in units.items()}
    excluded, found = _excluded(draft, units)
    problems += found
    units = {name: units[name] for name in draft.model.modules if name in units and name not in excluded}
    if options.sharded_by:
        remarks.append(
            f"sharded by the user's function {options.sharded_by}, called for each unit, the root last; the plan shows what "
            "torch's fully_shard would make, and cannot know which units, placements, dtypes, bytes and collectives it makes"
        )
        problems += [
            Refusal(
                "fsdp.function",
                f"fully_shard_fn: {unit.part_of!r} and {name!r} hold the same parameters, and are one unit, which a function "
                "of one module cannot make; leave it out",
            )
            for name, unit in units.items()
            if unit.part_of
        ]
    if options.reshard_after_forward and all(map(draft.whole, units.values())):
        problems.add(
            "fsdp.reshard", "reshard_after_forward=True: with dp_shard=1 and replicas nothing is sharded; leave it out"
        )
    return Found(units, problems, remarks)


def _stored(draft: Draft, name: str) -> str:
    """Return the dtype in which a module stores its parameters."""
    first = next(iter(draft.model.parameters_inside(name)))
    return draft.model.parameter_of[f"{name}.{first}"].dtype


def _row(draft: Draft, name: str, kind: str, *, reshard: bool = True) -> UnitRow:
    """Return the row of a unit; an option wins over ``reshard``."""
    options = draft.options
    explicit = options.reshard_after_forward
    return UnitRow(name, kind, (), reshard if explicit is None else explicit, options.param_dtype, options.reduce_dtype)


def _declared(draft: Draft, problems: Problems) -> Iterator[tuple[UnitRow, str]]:
    """Yield the row of each layer, unit and mixture that the spec declares, and the rule that does; add what is wrong."""

    def called(rule: str, pattern: str, kinds: tuple[str, ...]) -> list[str]:
        """Return the names that a pattern matches. A list or a dict, whose forward nobody calls, is a problem."""
        modules = draft.model.modules
        names = names_for(problems, rule, pattern, modules, "module")
        problems.extend(
            Refusal(
                "plan.pattern",
                f"{rule} pattern {pattern!r} matches {name!r}, a {modules[name].kind}, which is not called itself; "
                f"its entries are '{name}.*'",
            )
            for name in names
            if modules[name].kind in kinds
        )
        return names

    for pattern in draft.spec.layers:
        names = called("layers", pattern, ("ModuleList",))
        last = last_of_each_container(names)
        for name in names:
            yield _row(draft, name, LAYER, reshard=name not in last), f"layers pattern {pattern!r}"
    for rule in draft.spec.units:
        names = called("units", rule.pattern, ("ModuleList", "ModuleDict"))
        for name in names:
            row = _row(draft, name, "unit", reshard=rule.reshard_after_forward is not False)
            part_of = names[0] if rule.together and name != names[0] else ""
            if rule.added:
                row = replace(row, kind=ADDED, param_dtype=_stored(draft, name))
            yield replace(row, together=rule.together, part_of=part_of), f"units pattern {rule.pattern!r}"
        if rule.together and draft.layout.size("pp") > 1:
            problems.add(
                "pp.units", f"units pattern {rule.pattern!r}: modules of several stages are no unit; the legal value of pp is 1"
            )
    for experts in draft.spec.experts:
        for name in names_for(problems, "experts", experts.pattern, draft.model.modules, "module"):
            yield _row(draft, name, EXPERTS), f"experts pattern {experts.pattern!r}"


def _with_runs(draft: Draft, unit: UnitRow) -> UnitRow:
    """Return a unit with the number of its runs, if a trace counted them."""
    runs, with_gradient = draft.model.traces.runs.get(unit.name, (1, 1))
    if runs == 0 and unit.kind != EXPERTS:
        return replace(unit, forwards=0)
    places = max(1, with_gradient)
    return replace(unit, places=places, forwards=-(-runs // places)) if runs > 1 else unit


def _excluded(draft: Draft, units: dict[str, UnitRow]) -> tuple[set[str], Problems]:
    """Return the units that the options leave out."""
    excluded, problems, left = set[str](), Problems(), dict(units)
    for pattern in draft.options.exclude_units:
        for name in names_for(problems, "exclude_units", pattern, [name for name in left if name], "unit"):
            if left[name].kind == EXPERTS and draft.layout.ep > 1:
                problems.add(
                    "fsdp.exclude_units", f"exclude_units: {name!r} is a mixture, which is a unit of its own with ep > 1"
                )
            if left[name].kind == ADDED:
                problems.add(
                    "fsdp.exclude_units", f"exclude_units: {name!r} is called by the objective, so it must be a unit of its own"
                )
                continue
            if left[name].part_of or any(unit.part_of == name for unit in left.values()):
                problems.add(
                    "fsdp.exclude_units",
                    f"exclude_units: {name!r} has the parameters of another module, so one unit must hold both",
                )
                continue
            excluded.add(name)
            del left[name]
    return excluded, problems


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


def choose_policies(draft: Draft) -> Found[dict[str, SyncPolicy]]:
    """Choose sync policies. Patterns of the options win over the spec, and the spec wins over the default of the options."""
    options, problems = draft.options, Problems()
    policies = {} if options.sync is None else dict.fromkeys(draft.units, options.sync)
    for rule in draft.spec.units:
        if rule.sync is not None:
            policies |= dict.fromkeys(match_names(rule.pattern, draft.units), rule.sync)
    for pattern, policy in options.sync_units.items():
        policies |= dict.fromkeys(names_for(problems, "sync_units", pattern, draft.units, "unit"), policy)
    deferring = [name or "(root)" for name in draft.units if policies.get(name) is SyncPolicy.DEFER]
    if options.reshard_after_forward and deferring:
        problems.add(
            "fsdp.reshard",
            f"reshard_after_forward=True and sync=defer (unit {deferring[0]!r}): defer keeps parameters gathered; "
            "legal with it are reshard_each and reduce_each",
        )
    return Found(policies, problems)

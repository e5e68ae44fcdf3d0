"""resolve(): spec x model x layout x options -> ShardingPlan. Reads names and shapes, so a meta model does."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

from torch import nn

from meshwright.errors import LayoutError, PlanError
from meshwright.layout import Layout, ModelSizes
from meshwright.plan.decay import decayed_names
from meshwright.plan.expert_parallel import resolve_experts
from meshwright.plan.options import ActivationCheckpointing, ParallelOptions, SyncPolicy
from meshwright.plan.prefetch import prefetch_problems
from meshwright.plan.recompute import checkpointing_modes
from meshwright.plan.sharding_plan import EXPERTS, ROOT, ParameterRow, ShardingPlan, UnitRow, itemsize, shard_axis
from meshwright.plan.spec import ParallelSpec, generalize, last_of_each_container, match_names
from meshwright.plan.tensor_parallel import resolve_tensor_parallel
from meshwright.plan.tp_styles import STYLES, tp_dim, tp_placement
from meshwright.plan.twins import choose_twins, pair_units

__all__ = ["model_sizes", "resolve"]


def resolve(
    spec: ParallelSpec,
    model: nn.Module,
    layout: Layout,
    options: ParallelOptions | None = None,
    *,
    world_size: int | None = None,
) -> ShardingPlan:
    """Resolve a spec against a model, a layout and options.

    Args:
        spec: what the family declares.
        model: the model; on the meta device it needs no memory. Only names, shapes, dtypes, ties and ``requires_grad``
            are read.
        layout: sizes; unresolved ones are inferred from ``world_size``.
        options: the choices; defaults if ``None``.
        world_size: number of ranks; needed where the layout is not resolved.

    Raises:
        LayoutError: sizes that fit neither the world size nor the model.
        PlanError: patterns without a match, modules or parameters that two rules claim, parameters that cannot be
            sharded. All of them in one report.
    """
    options = options or ParallelOptions()
    sizes = model_sizes(spec, model)
    if world_size is None:
        try:
            world_size = layout.world_size
        except LayoutError as error:
            raise LayoutError([*error.problems, "or pass world_size"]) from None
    layout = layout.resolve(world_size, sizes)

    problems: list[str] = []
    drafts = _draft_units(spec, model, options, problems)
    whole = [d for d in drafts.values() if layout.size("dp_replicate") > 1 and layout.size(shard_axis(layout, d.kind)) == 1]
    if options.reshard_after_forward and len(whole) == len(drafts):
        problems.append("reshard_after_forward=True: with dp_shard=1 and replicas nothing is sharded; leave it out")
    pairs = pair_units(spec, drafts, problems)
    claims = _claim_parameters(spec, model, drafts, pairs, problems)
    frozen = _frozen_names(options, [claim.name for claim in claims], problems)
    if frozen and all(claim.name in frozen or not claim.requires_grad for claim in claims):
        problems.append(f"freeze={list(options.freeze)}: leaves no parameter to train")
    decayed = decayed_names(spec, model, options, {claim.name: (claim.name, *claim.aliases) for claim in claims}, problems)
    _assign_sync(drafts, options, problems)
    problems += prefetch_problems(options, layout, [draft.sync for draft in drafts.values()])
    layers = tuple(draft.name for draft in drafts.values() if draft.kind == "layer")
    modes = checkpointing_modes(options, model, layers, [d.name for d in drafts.values() if d.kind == EXPERTS], problems)
    sharing = resolve_tensor_parallel(spec, model, layout, options, sizes, claims, problems)
    experts = resolve_experts(spec, model, layout, options, problems)
    if problems:
        raise PlanError(problems)

    stages = _stages(layout, drafts, claims)
    rows = tuple(
        _parameter_row(
            claim,
            drafts[claim.unit],
            layout,
            trainable=claim.requires_grad and claim.name not in frozen,
            stage=stages[claim.name],
            tp_style=sharing.styles.get(claim.name),
            decayed=claim.name in decayed,
        )
        for claim in claims
    )
    choose_twins(spec, pairs, drafts, rows, options, problems)
    if problems:
        raise PlanError(problems)
    for draft in whole:
        draft.reshard_after_forward = False
    _afford(drafts, rows, options)
    units = _unit_rows(drafts, rows, options, modes)
    _check_units(units, rows)
    return ShardingPlan(
        spec.family,
        layout,
        options,
        layers,
        rows,
        units,
        sharing.rows,
        experts,
        tp_level=sharing.level,
        tp_passed_over=sharing.passed_over,
        flags_of_use=not spec.uses_all_parameters and layout.size("dp_cp") > 1,
    )


def model_sizes(spec: ParallelSpec, model: nn.Module) -> ModelSizes:
    """The sizes that limit a layout, read from the model's config through the names that the spec gives."""
    found = {}
    for field_name, attribute in spec.sizes.items():
        value = getattr(model, "config", None)
        for part in attribute.split("."):
            value = getattr(value, part, None)
        if isinstance(value, int):
            found[field_name] = value
    groups = spec.structure is not None and bool(spec.structure.kv_projections)
    return ModelSizes(**found, kv_groups=groups)


# -- units ----------------------------------------------------------------------------------------------------------------


@dataclass
class _Draft:
    name: str
    kind: str
    rule: str
    reshard_after_forward: bool
    param_dtype: str | None
    reduce_dtype: str | None
    output_dtype: str | None
    sync: SyncPolicy | None
    forwards: int = 1
    twin_of: str = ""
    part_of: str = ""


def _draft_units(spec: ParallelSpec, model: nn.Module, options: ParallelOptions, problems: list[str]) -> dict[str, _Draft]:
    """Name every unit, in model order, and decide reshard and dtypes."""
    names = [name for name, _ in model.named_modules()]
    order = {name: index for index, name in enumerate(names)}
    explicit = options.reshard_after_forward
    dtypes = (options.param_dtype, options.reduce_dtype)
    drafts = {ROOT: _Draft(ROOT, "root", "the model itself", bool(explicit), *dtypes, options.output_dtype, None)}

    def claim(name: str, kind: str, rule: str, reshard: bool, sync: SyncPolicy | None = None) -> None:
        if (earlier := drafts.get(name)) is not None:
            problems.append(f"module {name!r} is claimed twice: by {earlier.rule} and by {rule}")
            return
        drafts[name] = _Draft(name, kind, rule, reshard if explicit is None else explicit, *dtypes, None, sync)

    for pattern in spec.layers:
        matched = _match("layers", pattern, names, problems)
        last = last_of_each_container(matched)
        for name in matched:
            claim(name, "layer", f"layers pattern {pattern!r}", name not in last)
    for rule in spec.units:
        for name in _match("units", rule.pattern, names, problems):
            reshard = True if rule.reshard_after_forward is None else rule.reshard_after_forward
            claim(name, "unit", f"units pattern {rule.pattern!r}", reshard, rule.sync)

    for experts in spec.experts:
        for name in _match("experts", experts.pattern, names, problems):
            claim(name, EXPERTS, f"experts pattern {experts.pattern!r}", True)

    for pattern in spec.fp32:
        for name in _match("fp32", pattern, names, problems):
            if options.param_dtype in (None, "float32", "float64"):
                continue  # no less precise anyway: no unit needed
            if name not in drafts:
                claim(name, "fp32", f"fp32 pattern {pattern!r}", True)
            drafts[name] = replace(drafts[name], param_dtype="float32", output_dtype=options.param_dtype)
    for pattern in spec.idle:
        for name in _match("idle", pattern, names, problems):
            if name in drafts:
                drafts[name].forwards = 0
    return dict(sorted(drafts.items(), key=lambda item: order[item[0]]))


def _match(where: str, pattern: str, names: Sequence[str], problems: list[str]) -> list[str]:
    matched = match_names(pattern, names)
    if not matched:
        problems.append(f"{where} pattern {pattern!r} matches no module; there are, for example, {_examples(names)}")
    return matched


def _examples(names: Iterable[str]) -> str:
    return ", ".join(sorted({generalize(name) for name in names if name})[:12])


def _assign_sync(drafts: Mapping[str, _Draft], options: ParallelOptions, problems: list[str]) -> None:
    """The option's pattern wins over the spec, the spec over the default."""
    for draft in drafts.values():
        draft.sync = draft.sync or options.sync  # None still: decided once the bytes are known
    for pattern, policy in options.sync_units.items():
        matched = match_names(pattern, list(drafts))
        if not matched:
            problems.append(f"sync_units pattern {pattern!r} matches no unit; units are {_examples(drafts)}")
        for name in matched:
            drafts[name].sync = policy
    deferring = [name or "(root)" for name, draft in drafts.items() if draft.sync is SyncPolicy.DEFER]
    if options.reshard_after_forward and deferring:
        problems.append(
            f"reshard_after_forward=True and sync=defer (unit {deferring[0]!r}): defer keeps parameters gathered; "
            "legal with it are reshard_each and reduce_each"
        )


# -- parameters -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Claim:
    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    unit: str


def _claim_parameters(
    spec: ParallelSpec, model: nn.Module, drafts: Mapping[str, _Draft], pairs: Mapping[str, str], problems: list[str]
) -> list[_Claim]:
    """Each parameter with the innermost unit around it; a tied one must have one unit, or twins, for all its names."""
    names_of: dict[int, list[str]] = {}
    tensors = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    claims = []
    for key, names in names_of.items():
        parameter = tensors[key]
        units = [_innermost(name, drafts) for name in names]
        if len({pairs.get(unit, unit) for unit in units}) > 1:
            shown = " and ".join(f"{name!r} in unit {unit or '(root)'!r}" for name, unit in zip(names, units, strict=True))
            problems.append(f"tied parameter is claimed twice: {shown}; let one unit hold both, or leave them to the root")
        if parameter.ndim == 0:
            problems.append(f"parameter {names[0]!r} is a scalar, which FSDP cannot shard; make it a tensor of shape (1,)")
        dtype = str(parameter.dtype).removeprefix("torch.")
        claims.append(
            _Claim(
                names[0],
                tuple(names[1:]),
                tuple(parameter.shape),
                dtype,
                parameter.requires_grad,
                pairs.get(units[0], units[0]),
            )
        )
    together = [{claim.name, *claim.aliases} for claim in claims]
    for group in spec.tied:
        if not any(set(group) <= names for names in together):
            problems.append(f"the spec ties {' and '.join(group)}, but in the model they are not one parameter")
    return claims


def _innermost(parameter: str, drafts: Mapping[str, _Draft]) -> str:
    module = parameter.rpartition(".")[0]
    while module and module not in drafts:
        module = module.rpartition(".")[0]
    return module


def _frozen_names(options: ParallelOptions, names: list[str], problems: list[str]) -> set[str]:
    frozen: set[str] = set()
    for pattern in options.freeze:
        matched = match_names(pattern, names)
        if not matched:
            problems.append(f"freeze pattern {pattern!r} matches no parameter; there are, for example, {_examples(names)}")
        frozen.update(matched)
    return frozen


def _stages(layout: Layout, drafts: Mapping[str, _Draft], claims: Sequence[_Claim]) -> dict[str, int]:
    """Pipeline stage of each parameter: layers cut evenly, what precedes them on the first stage, the rest on the last."""
    count = layout.size("pp")
    layers = [draft.name for draft in drafts.values() if draft.kind == "layer"]
    stages: dict[str, int] = {}
    current = 0
    for claim in claims:
        inside = next((index for index, name in enumerate(layers) if claim.name.startswith(f"{name}.")), None)
        if inside is not None:
            current = inside * count // len(layers)
        elif layers and any(claim_name.startswith(f"{layers[0]}.") for claim_name in stages):
            current = count - 1
        stages[claim.name] = current
    return stages


def _parameter_row(
    claim: _Claim,
    unit: _Draft,
    layout: Layout,
    *,
    trainable: bool,
    stage: int,
    tp_style: str | None,
    decayed: bool,
) -> ParameterRow:
    local = list(claim.shape)
    placements: list[tuple[str, str]] = []
    by_fsdp = 0  # the dimension that FSDP shards
    tp_cut: int | None = None
    axis = shard_axis(layout, unit.kind)
    shards = layout.size(axis)
    if by_ep := axis == "ep_shard":
        local[0] = ceil(local[0] / layout.ep)
    elif (tp_cut := tp_dim(tp_style, claim.shape)) is not None:
        local[tp_cut] = ceil(local[tp_cut] / layout.size("tp"))
        placements.append(("tp", tp_placement(tp_style, tp_cut)))
        # Rows that are packed are several matrices, which torch could not tell apart any more if FSDP sharded them too.
        by_fsdp = int(shards > 1 and tp_cut == 0 and STYLES[tp_style or ""].pieces > 1)
    if unit.kind == EXPERTS and local[0] % shards:
        # 128 experts over 1,024 ranks would be padded to eight times their size; their matrices are even otherwise.
        even = (dim for dim in range(1, len(local)) if dim != tp_cut and local[dim] % shards == 0)
        by_fsdp = next(even, by_fsdp)
    # FSDP shards what the other axes left, and pads it to a multiple of the shards.
    local[by_fsdp] = ceil(local[by_fsdp] / shards) * shards
    gathered = prod(local)
    local[by_fsdp] //= shards
    if shards > 1:
        placements.insert(0, ("dp_shard" if layout.size("cp") == 1 and not by_ep else axis, f"Shard({by_fsdp})"))
    if by_ep:
        placements.append(("ep", "Shard(0)"))
    if layout.size("dp_replicate") > 1:
        placements.insert(0, ("dp_replicate", "Replicate()"))
    compute = unit.param_dtype or claim.dtype
    reduce = _reduce_dtype(unit, claim.dtype)
    return ParameterRow(
        name=claim.name,
        aliases=claim.aliases,
        shape=claim.shape,
        dtype=claim.dtype,
        unit=claim.unit,
        placements=tuple(placements),
        local_shape=tuple(local),
        bytes_per_rank=prod(local) * itemsize(claim.dtype),
        gathered_bytes=gathered * itemsize(compute),
        reduced_bytes=gathered * itemsize(reduce) if trainable else 0,
        trainable=trainable,
        stage=stage,
        tp_style=tp_style,
        decayed=trainable and decayed,
    )


def _reduce_dtype(unit: _Draft, stored: str) -> str:
    return unit.reduce_dtype or unit.param_dtype or stored


def _afford(drafts: Mapping[str, _Draft], rows: Sequence[ParameterRow], options: ParallelOptions) -> None:
    """Policies that nobody chose: ``defer`` where all that it keeps unsharded through a step fits the budget, and gathering
    anew is not asked for. Experts, which are most of a model, are the first to go without.
    """
    undecided = {name: draft for name, draft in drafts.items() if draft.sync is None}
    copies: dict[str, list[str]] = {}  # of the parameters of a unit, by whom
    for name, draft in drafts.items():
        if not draft.part_of:
            copies.setdefault(draft.twin_of or name, []).append(name)

    def kept(names: Container[str]) -> int:
        total = 0
        for row in rows:
            gathered = row.gathered_bytes + (row.reduced_bytes if options.microbatches > 1 else 0)
            total += gathered * sum(name in names for name in copies[row.unit])
        return total

    without = {name for name, draft in undecided.items() if draft.kind != EXPERTS}
    anew = options.reshard_after_forward or options.prefetch_backward is not None
    deferred = next((names for names in (set(undecided), without) if not anew and kept(names) <= options.sync_budget), set())
    for name, draft in undecided.items():
        draft.sync = SyncPolicy.DEFER if name in deferred else SyncPolicy.REDUCE_EACH


def _unit_rows(
    drafts: Mapping[str, _Draft],
    rows: Sequence[ParameterRow],
    options: ParallelOptions,
    modes: Mapping[str, ActivationCheckpointing],
) -> tuple[UnitRow, ...]:
    units = []
    in_backward = _gathered_in_backward(list(drafts), rows, implicit=options.prefetch_backward is None)
    for draft in drafts.values():
        assert draft.sync is not None
        units.append(
            UnitRow(
                name=draft.name,
                kind=draft.kind,
                parameters=tuple(row.name for row in rows if row.unit == draft.name),
                reshard_after_forward=draft.reshard_after_forward,
                param_dtype=draft.param_dtype,
                reduce_dtype=draft.reduce_dtype,
                output_dtype=draft.output_dtype,
                sync=draft.sync,
                activation_checkpointing=modes.get(draft.name, ActivationCheckpointing.NONE),
                compile=draft.kind == "layer" and options.compile,
                gathers_in_backward=(draft.twin_of or draft.name) in in_backward,
                forwards=draft.forwards,
                twin_of=draft.twin_of,
                part_of=draft.part_of,
            )
        )
    return tuple(units)


def _gathered_in_backward(names: Sequence[str], rows: Sequence[ParameterRow], *, implicit: bool) -> set[str]:
    """Units whose parameters backward gathers: a gradient flows through those that hold or follow something trainable.

    And one more, if it is left to FSDP (``implicit``): before it runs the backward of a unit, it prefetches the one that
    finished forward before it.
    """
    last_row = {row.unit: index for index, row in enumerate(rows)}
    first_trainable = next((index for index, row in enumerate(rows) if row.trainable), len(rows))
    finishing: list[str] = []  # units as their forward ends: those inside a unit before the unit, the root last
    running: list[str] = []
    for name in names:
        while running and running[-1] != ROOT and not name.startswith(f"{running[-1]}."):
            finishing.append(running.pop())
        running.append(name)
    finishing.extend(reversed(running))
    flows = [first_trainable <= last_row.get(name, -1) for name in finishing]
    following = [implicit and flow for flow in (*flows[1:], False)]
    return {name for name, flow, ahead in zip(finishing, flows, following, strict=True) if flow or ahead}


def _check_units(units: Sequence[UnitRow], rows: Sequence[ParameterRow]) -> None:
    """FSDP gathers a unit as one buffer, so its trainable parameters need one stored dtype."""
    problems = []
    for unit in units:
        by_dtype: dict[str, str] = {}
        for row in rows:
            if row.unit == unit.name and row.trainable:
                by_dtype.setdefault(row.dtype, row.name)
        if len(by_dtype) > 1:
            shown = ", ".join(f"{name!r} is {dtype}" for dtype, name in by_dtype.items())
            problems.append(f"unit {unit.label!r} mixes stored dtypes: {shown}; store them in one dtype or declare units apart")
    if problems:
        raise PlanError(problems)

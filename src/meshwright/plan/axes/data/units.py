"""What the bytes of FSDP units decide (sync policies, gathers in backward), and the actions that wrap the units."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from meshwright.errors import Problems, Refusal
from meshwright.plan.axes.data.twin_stacks import twin_parameters
from meshwright.plan.draft import Draft, Found
from meshwright.plan.given.closed_choices import ActivationCheckpointing, GradientReduction, SyncPolicy
from meshwright.plan.given.names import inside, outermost, within
from meshwright.plan.result.program import Action, Engine, JoinTwins, PartTwins, Wrap
from meshwright.plan.result.sharding_plan import (
    EXPERTS,
    LAYER,
    ParameterRow,
    ShardingPlan,
    UnitRow,
    nothing_is_sharded,
    shard_axis,
    unit_axes,
)

__all__ = ["complete_units", "gathered_in_backward", "unit_actions"]


def complete_units(draft: Draft) -> Found[dict[str, UnitRow]]:
    """Fill in what the rows of the units lack. The rows of the parameters must be known."""
    options, rows = draft.options, draft.rows
    policies = _affordable_policies(draft)
    in_backward = gathered_in_backward(list(draft.units), rows, implicit=options.prefetch_backward is None)
    names: dict[str, list[str]] = {name: [] for name in draft.units}
    for row in rows:
        names[row.unit].append(row.name)
    units = {
        name: replace(
            unit,
            parameters=tuple(names[name]),
            reshard_after_forward=unit.reshard_after_forward and not draft.whole(unit),
            sync=policies[name],
            activation_checkpointing=draft.modes.get(name, ActivationCheckpointing.NONE),
            compile=unit.kind == LAYER and options.compile,
            gathers_in_backward=(unit.twin_of or name) in in_backward,
        )
        for name, unit in draft.units.items()
    }
    return Found(units, Problems([*_dtype_problems(units.values(), rows), *_problems_of_passes(draft, policies)]))


def _problems_of_passes(draft: Draft, policies: Mapping[str, SyncPolicy]) -> Iterator[Refusal]:
    """Yield a problem where a stage has several backwards in a microbatch, and units gather or reduce in each of them."""
    cut, layout = draft.stages.cut, draft.layout
    waiting = [name for name, policy in policies.items() if policy is not SyncPolicy.DEFER]
    if cut is not None and cut.passes > 1 and waiting and (layout.size("dp_shard_cp") > 1 or layout.replicated):
        yield Refusal(
            "pp.twice",
            f"pp={layout.size('pp')}: unit {waiting[0] or '(root)'!r} has sync={policies[waiting[0]]}, and each of "
            f"{cut.passes} passes through the stages has a backward of its own, whose collectives are not planned; legal is "
            "sync=defer, for all units",
        )


def _affordable_policies(draft: Draft) -> dict[str, SyncPolicy]:
    """Return the policies that are chosen, and choose those that are still open.

    A policy is ``defer`` if everything that ``defer`` keeps unsharded through a step fits the budget and neither
    ``reshard_after_forward=True`` nor ``prefetch_backward`` is set; otherwise it is ``reduce_each``. If not everything fits,
    experts, which are most of a model, are the first to lose ``defer``.
    """
    options = draft.options
    undecided = {name: unit for name, unit in draft.units.items() if name not in draft.policies}
    copies: dict[str, list[str]] = {}  # unit that owns parameters -> units that gather a copy of them
    for name, unit in draft.units.items():
        if not unit.part_of:
            copies.setdefault(unit.twin_of or name, []).append(name)

    sizes, several = dict.fromkeys(copies, 0), options.microbatches > 1
    for row in draft.rows:
        sizes[row.unit] += row.gathered_bytes + (row.reduced_bytes if several else 0)

    def kept(names: Container[str]) -> int:
        return sum(sizes[unit] * sum(name in names for name in own) for unit, own in copies.items())

    without = {name for name, unit in undecided.items() if unit.kind != EXPERTS}
    anew = options.reshard_after_forward or options.prefetch_backward is not None
    deferred = next((names for names in (set(undecided), without) if not anew and kept(names) <= options.sync_budget), set())
    chosen = {name: SyncPolicy.DEFER if name in deferred else SyncPolicy.REDUCE_EACH for name in undecided}
    return {**draft.policies, **chosen}


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


def _dtype_problems(units: Iterable[UnitRow], rows: Sequence[ParameterRow]) -> Problems:
    """Check that the trainable parameters of a unit have one stored dtype, because FSDP gathers them as one buffer."""
    problems = Problems()
    found: dict[str, dict[str, str]] = {}  # unit -> dtype -> its first parameter
    for row in rows:
        if row.trainable and row.dtype not in (by_dtype := found.setdefault(row.unit, {})):
            by_dtype[row.dtype] = row.name
    for unit in units:
        if len(mixed := found.get(unit.name, {})) > 1:
            shown = ", ".join(f"{name!r} is {dtype}" for dtype, name in mixed.items())
            problems.add(
                "fsdp.dtypes",
                f"unit {unit.label!r} mixes stored dtypes: {shown}; store them in one dtype or declare units apart",
            )
    return problems


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
    layers = set(plan.layers)
    return tuple(dict.fromkeys(outermost(part.name, layers) or part.name for part in parts))


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
        unit,
        modules=tuple(part.name for part in parts),
        engine=Engine.REPLICATE if nothing_is_sharded(layout) and not by_user else Engine.SHARD,
        axes=("dp_replicate", "dp_shard") if nothing_is_sharded(layout) and by_user else unit_axes(layout, unit.kind),
        experts=experts,
        dims=tuple((name, row.fsdp_dim) for row in plan.rows(unit) if row.fsdp_dim for name in (row.name, *row.aliases)),
        offload=plan.options.cpu_offload,
        divisor=divisor,
        plain_sum=plain_sum,
        each_run=len(parts) > 1,
        around=_around(plan, parts) if unit.together else (),
        no_grad_runs=no_grad_runs,
        sharded_by=by_user,
    )

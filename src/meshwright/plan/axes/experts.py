"""How a plan distributes mixtures of experts, and which rank sends which tokens.

With ``ep`` above 1, each rank of `ep` stores whole experts, ``experts / ep`` of every layer. Tokens are sent to them with an
all-to-all, and the results are sent back with another. FSDP shards the experts of a rank over `ep_shard`: the
``dp_shard * cp * tp / ep`` ranks of a replica that have the same experts.
Every rank of a replica has its own tokens, except for the ranks of `tp`, which have the same: each of these sends its share,
and the results are all-gathered. Under sequence parallel, a mixture that a layer calls itself gets the tokens of a slice: then
the ranks of `tp` have their own tokens, too.
"""

from collections import Counter
from collections.abc import Iterator

from meshwright.errors import Problems
from meshwright.layout import undivided
from meshwright.plan.draft import Draft, Found
from meshwright.plan.given import widths
from meshwright.plan.given.closed_choices import GradientReduction
from meshwright.plan.given.inspection import EXPERTS_ATTRIBUTE
from meshwright.plan.given.names import holder_of, inside, match_names
from meshwright.plan.given.spec import ExpertsRule
from meshwright.plan.result.program import Action, Assign, Dispatch, Slice
from meshwright.plan.result.sharding_plan import ExpertsRow, ShardingPlan

__all__ = ["expert_parallel_actions", "expert_parallel_bytes", "expert_parallel_counts", "resolve_experts"]


def resolve_experts(draft: Draft) -> Found[tuple[ExpertsRow, ...]]:
    """Return a row for each mixture of experts, in model order."""
    layout, options, problems = draft.layout, draft.options, Problems()
    mean = options.gradient_reduction is GradientReduction.MEAN
    if layout.ep > 1 and mean and (options.reduce_dtype or options.param_dtype) == "float16" and layout.ep_shard == 1:
        problems.add(
            "ep.reduce_dtype",
            f"reduce_dtype=float16 with ep={layout.ep}, gradient_reduction=mean and experts that are not sharded: FSDP2 would "
            "divide their gradients twice; legal are bfloat16 and float32",
        )
    if layout.ep > 1 and not draft.spec.experts:
        problems.add(
            "ep.dense",
            f"ep={layout.ep}: {draft.spec.family} declares no experts (experts of its ParallelSpec); the legal value is 1",
        )
    rows = {}
    for rule in draft.spec.experts:
        for name in match_names(rule.pattern, draft.model.modules):
            if (row := _row(draft, rule, name, problems)) is not None:
                rows[name] = row
    return Found(tuple(rows[name] for name in draft.model.modules if name in rows), problems)


def _row(draft: Draft, rule: ExpertsRule, name: str, problems: Problems) -> ExpertsRow | None:
    """Return the row of a mixture, and add what is wrong with it; ``None``: it has no number of experts."""
    ep, modules = draft.layout.ep, draft.model.modules
    inside_it = draft.model.parameters_inside(name)
    shapes = {own: shape for own, shape in inside_it.items() if ".lora_" not in f".{own}"}  # others are adapters of peft
    adapted = len(shapes) < len(inside_it)
    counts = {shape[0] if shape else 0 for shape in shapes.values()}
    if len(counts) != 1:
        problems.add(
            "ep.parameters",
            f"experts {name!r}: the first dimension of each parameter must be the number of experts; the shapes are {shapes}",
        )
        return None
    (experts,) = counts
    if ep > 1 and experts % ep:
        problems.append(undivided("ep", ep, experts, "expert").within("", f" (of {name!r})"))
    if ep > 1 and adapted:
        problems.add(
            "ep.adapters",
            f"ep={ep}: peft wraps the experts {name!r}, and their adapters count experts in another dimension; the legal value "
            "is 1",
        )
    elif ep > 1 and any("." in own for own in shapes):
        problems.add(
            "ep.parameters",
            f"ep={ep}: the experts {name!r} keep their parameters in submodules, and ep needs stacked parameters (one tensor "
            "with an entry for each expert); the legal value is 1",
        )
    router = _beside(draft, name, rule.router)
    if rule.router is not None and router is None:
        problems.add("ep.router", f"router pattern {rule.router!r} matches no module beside {name!r}")
    bias = ""
    if router and rule.bias:
        places = (router, holder_of(name))
        holder = next((place for place in places if rule.bias in modules[place].buffers), None)
        if holder is None:
            problems.add(
                "ep.router", f"bias {rule.bias!r} is a buffer neither of the router {router!r} nor of its parent module"
            )
        bias = f"{holder}.{rule.bias}" if holder else rule.bias
    return ExpertsRow(
        module=name,
        router=router or "",
        scores=rule.scores,
        bias=bias,
        experts=experts,
        local=experts // ep,
        token_axis="tp" if ep > 1 and draft.layout.size("tp") > 1 and name not in draft.tensor.on_slices else "",
        features=widths.experts_width(draft, name),
        slice_axis="tp" if name in draft.tensor.on_slices else "",
    )


def _beside(draft: Draft, name: str, pattern: str | None) -> str | None:
    """Return the first module that matches a pattern and is in the module that also holds ``name``."""
    matched = match_names(pattern, draft.model.names) if pattern is not None else []
    return next((other for other in matched if inside(other, holder_of(name))), None)


def expert_parallel_actions(draft: Draft, plan: ShardingPlan) -> Iterator[Action]:
    """Yield the actions that distribute whole experts over `ep` and send tokens to them."""
    for parameter in plan.parameters:
        if "ep" in dict(parameter.placements):
            yield Slice((parameter.name, *parameter.aliases), "ep", 0)
    for row in plan.experts if plan.layout.ep > 1 else ():
        counts = tuple((own, row.local) for own in draft.model.modules[row.module].counts if own == EXPERTS_ATTRIBUTE)
        if counts:  # the implementation computes with this number
            yield Assign(row.module, counts)
        yield Dispatch(row)


_EXCHANGES = (3, 2)
"""All-to-alls in forward (the numbers of tokens, the tokens, the results) and in backward (gradients of the latter two)."""

_GATHERS = (1, 2)
"""All-gathers over the token axis in forward (results) and in backward (gradients of hidden states, and of routing weights)."""


def expert_parallel_counts(plan: ShardingPlan) -> dict[str, Counter[str]]:
    """Return axis to the collectives of one optimizer step on one rank, by kind. Their bytes depend on the routing.

    The counts assume that everything is trained and nothing is recomputed.
    """
    if plan.layout.ep == 1:
        return {}
    steps = plan.options.microbatches
    counts: dict[str, Counter[str]] = {"ep": Counter()}
    for row in plan.experts:
        forwards, backwards = plan.runs(row.module)
        counts["ep"]["all_to_all"] += steps * (forwards * _EXCHANGES[0] + backwards * _EXCHANGES[1])
        if row.token_axis:
            gathers = steps * (forwards * _GATHERS[0] + backwards * _GATHERS[1])
            counts.setdefault(row.token_axis, Counter())["all_gather"] += gathers
    return counts


def expert_parallel_bytes(plan: ShardingPlan, tokens: int, compute: int) -> dict[str, Counter[str]]:
    """Return axis to the bytes of these collectives in one microbatch, if the load is balanced.

    Args:
        plan: the plan.
        tokens: tokens of a microbatch on a rank.
        compute: bytes of a number in the dtype of compute.
    """
    sizes: dict[str, Counter[str]] = {"ep": Counter()}
    chosen = plan.options.experts_of_token or 1
    for mixture in plan.experts if plan.layout.ep > 1 else ():
        forwards, backwards = plan.runs(mixture.module)
        axis = mixture.token_axis or mixture.slice_axis
        share = plan.layout.size(axis) if axis else 1
        routed = tokens * chosen // share
        sizes["ep"]["all_to_all"] += 2 * (forwards + backwards) * routed * mixture.features * compute
        if mixture.token_axis:
            gathered = tokens * (mixture.features * (forwards + backwards) + backwards * chosen) * compute
            sizes.setdefault(mixture.token_axis, Counter())["all_gather"] += gathered
    return sizes

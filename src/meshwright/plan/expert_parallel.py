"""How a plan holds mixtures of experts, and who sends which tokens.

With ``ep`` above 1 each rank of `ep` holds whole experts, ``experts / ep`` of every layer, and tokens travel to them:
all-to-all there, all-to-all back. FSDP shards an expert over `ep_shard`, the other ranks of its replica. Every rank of a
replica has tokens of its own, except for those of `tp`, which have the same: each of them sends its share, and the results are
gathered.
"""

from collections import Counter

from torch import nn

from meshwright.layout import Layout, divisors
from meshwright.plan.options import GradientReduction, ParallelOptions
from meshwright.plan.sharding_plan import ExpertsRow, ShardingPlan
from meshwright.plan.spec import ExpertsRule, ParallelSpec, match_names

__all__ = ["expert_parallel_counts", "resolve_experts"]


def resolve_experts(
    spec: ParallelSpec, model: nn.Module, layout: Layout, options: ParallelOptions, problems: list[str]
) -> tuple[ExpertsRow, ...]:
    """A row for each mixture of experts, in the order of the model.

    Args:
        spec: declares them.
        model: to read names and shapes from.
        layout: resolved.
        options: what does not go together with ``ep`` is refused.
        problems: what is wrong is added to it.
    """
    mean = options.gradient_reduction is GradientReduction.MEAN
    if layout.ep > 1 and layout.ep_shard == 1 and mean and (options.reduce_dtype or options.param_dtype) == "float16":
        problems.append(
            f"reduce_dtype=float16 with ep={layout.ep}, gradient_reduction=mean and experts that are not sharded: FSDP2 would "
            "divide their gradients twice; legal are bfloat16 and float32"
        )
    if layout.ep > 1 and not spec.experts:
        problems.append(
            f"ep={layout.ep}: {spec.family} declares no experts (experts of its ParallelSpec); the legal value is 1"
        )
    modules = dict(model.named_modules())
    rows = {}
    for rule in spec.experts:
        for name in match_names(rule.pattern, modules):
            if (row := _row(rule, name, modules, layout, problems)) is not None:
                rows[name] = row
    return tuple(rows[name] for name in modules if name in rows)


def _row(rule: ExpertsRule, name: str, modules: dict[str, nn.Module], layout: Layout, problems: list[str]) -> ExpertsRow | None:
    module, ep = modules[name], layout.ep
    shapes = {own: tuple(parameter.shape) for own, parameter in module.named_parameters()}
    counts = {shape[0] if shape else 0 for shape in shapes.values()}
    if len(counts) != 1:
        problems.append(f"experts {name!r}: the first dimension of its parameters should count experts, and they are {shapes}")
        return None
    (experts,) = counts
    if ep > 1 and experts % ep:
        problems.append(f"ep={ep}: {experts} experts of {name!r} are divisible by {', '.join(map(str, divisors(experts)))}")
    if ep > 1 and any("." in own for own in shapes):
        problems.append(
            f"ep={ep}: {name!r} has modules with parameters in it, and no matrices of its own; the legal value is 1"
        )
    router = _beside(name, rule.router, modules)
    if rule.router is not None and router is None:
        problems.append(f"router pattern {rule.router!r} matches no module beside {name!r}")
    bias = ""
    if router and rule.bias:
        holders = [router, name.rpartition(".")[0]]
        holder = next((other for other in holders if rule.bias in dict(modules[other].named_buffers(recurse=False))), None)
        if holder is None:
            problems.append(f"bias {rule.bias!r} is no buffer of the router {router!r}, nor of the module that holds it")
        bias = f"{holder}.{rule.bias}" if holder else rule.bias
    return ExpertsRow(
        module=name,
        router=router or "",
        scores=rule.scores,
        bias=bias,
        experts=experts,
        local=experts // ep,
        token_axis="tp" if ep > 1 and layout.size("tp") > 1 else "",
    )


def _beside(name: str, pattern: str | None, modules: dict[str, nn.Module]) -> str | None:
    """The first module of a pattern that is in the same module as another one."""
    parent = name.rpartition(".")[0]
    found = match_names(pattern, modules) if pattern is not None else []
    return next((other for other in found if other.startswith(f"{parent}." if parent else "")), None)


_EXCHANGES = (3, 2)
"""All-to-alls of a forward and of a backward: the numbers of tokens, the tokens and the results; both of the latter."""

_GATHERS = (1, 2)
"""All-gathers over the token axis: results in forward; gradients of hidden states and of routing weights in backward."""


def expert_parallel_counts(plan: ShardingPlan) -> dict[str, Counter[str]]:
    """Axis to collectives of one optimizer step on one rank, by kind. Their bytes depend on the routing.

    Where everything is trained and nothing recomputed.
    """
    if plan.layout.ep == 1:
        return {}
    steps = plan.options.microbatches
    found: dict[str, Counter[str]] = {"ep": Counter()}
    for row in plan.experts:
        forwards = plan.forwards(row.module)
        found["ep"]["all_to_all"] += steps * (forwards * _EXCHANGES[0] + _EXCHANGES[1])
        if row.token_axis:
            gathers = steps * (forwards * _GATHERS[0] + _GATHERS[1])
            found.setdefault(row.token_axis, Counter())["all_gather"] += gathers
    return found

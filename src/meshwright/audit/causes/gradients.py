"""In which way a gradient is wrong: a factor, a lost microbatch, an average over ranks, or none of these."""

import math
from collections.abc import Iterator, Sequence

from meshwright.audit.causes.findings import Finding, Kind, described, in_ranks
from meshwright.audit.causes.replicas import apart, differing, sharded_over
from meshwright.audit.compare import Row
from meshwright.audit.one_process.reference import Reference
from meshwright.audit.result import RankResult
from meshwright.layout import AXES, FLATTENED, Layout
from meshwright.plan.result.sharding_plan import ShardingPlan

__all__ = ["averages", "gradient_findings"]

EXACT = 0.01
"""A weight or ratio counts as equal to a number if it is this near to it."""


def gradient_findings(
    plan: ShardingPlan, reference: Reference, rows: Sequence[Row], ranks: Sequence[RankResult]
) -> Iterator[Finding]:
    """Yield one finding for each way in which gradients are wrong, with all parameters that are wrong in this way."""
    lacking = tuple(dict.fromkeys(name for result in ranks for name in result.without_gradient))
    wrong = [row for row in rows if row.what == "gradient" and not row.passed]
    arrived = [row for row in wrong if row.name not in lacking]
    unarrived = tuple(dict.fromkeys(row.name for row in wrong if row.name in lacking))
    if unarrived:
        where = [result.rank for result in ranks if set(unarrived) & set(result.without_gradient)]
        yield Finding(
            Kind.UNREDUCED,
            f"no gradient of {described(plan, unarrived)} arrived on {in_ranks(where)}: it is never reduced",
            unarrived,
        )
    ways: dict[tuple[Kind, str], list[Row]] = {}
    sharded = sharded_over(plan)
    for row in arrived:
        pairs = differing(plan.layout, sharded[row.name], row.name, "gradient", ranks)
        copies = () if pairs else differing(plan.layout, sharded[row.name], row.name, "gradient", ranks, stages=True)
        if pairs:
            way = Kind.UNREDUCED, apart(plan.layout, pairs)
        elif copies:
            way = Kind.UNREDUCED, _COPIES
        else:
            way = _way(plan, reference, row)
        ways.setdefault(way, []).append(row)
    agree = any(result.borders for result in ranks) and all(row.passed for result in ranks for row in result.borders)
    # The largest error comes first: it is nearer to the cause than the errors that the cause leaves elsewhere.
    for (kind, words), alike in sorted(ways.items(), key=lambda item: -max(row.error for row in item[1])):
        names, worst = list(dict.fromkeys(row.name for row in alike)), max(alike, key=lambda row: row.error)
        more = ""
        if words in _UNEXPLAINED:
            more = f" (off by {worst.error:.2g}{f' in {worst.name}' if len(names) > 1 else ''})"
            more += _BORDERS_AGREE if agree else ""
        yield Finding(kind, f"the gradient of {described(plan, names)} {words}{more}", tuple(names))


_BORDERS_AGREE = (
    "; in the first microbatch activations and their gradients agree at every border, so look at the gradients of parameters, "
    "their reduction, and later microbatches"
)


_COPIES = "is another one on each stage that has a copy of it: the gradients of the copies are not added"
_DIVISOR = ": look at what divides the loss of a microbatch, which has to be the tokens of the whole step"
_FOREIGN = "is no weighted sum of the gradients of the microbatches: it has other contributions, or lacks a part of one"
_ALIKE = "is wrong, and the gradients of the microbatches are too much alike to tell which of them are in it"
_UNEXPLAINED = (_FOREIGN, _ALIKE)


def _way(plan: ShardingPlan, reference: Reference, row: Row) -> tuple[Kind, str]:
    """Return the way in which one gradient is wrong."""
    if math.isinf(row.error):
        return Kind.GRADIENT, "is not finite" if not row.missing else "is missing"
    weights = [weight for weight in row.weights if not math.isnan(weight)]
    layout, microbatches = plan.layout, plan.options.microbatches
    if len(weights) > 1:
        if not _alike(weights):
            return _weighed(layout.size("dp"), reference, row)
        factor = sum(weights) / len(weights)
        if not _is_one(factor):
            return Kind.GRADIENT, _factor(layout, microbatches, factor)
    elif row.residual < EXACT and not _is_one(row.ratio):
        return Kind.GRADIENT, _factor(layout, microbatches, row.ratio)
    return Kind.GRADIENT, _ALIKE if len(row.weights) > 1 and not weights else _FOREIGN


def _weighed(readers: int, reference: Reference, row: Row) -> tuple[Kind, str]:
    """Describe a gradient that is a sum of those of the microbatches, with weights that are not all equal."""
    by_rank = _by_rank(row.weights, readers)
    if (one := _only(by_rank)) is not None:
        return Kind.UNREDUCED, f"is that of data rank {one} alone: it is not summed over the ranks"
    by_microbatch = _by_rank([row.weights[i] for i in _transposed(len(row.weights), readers)], len(row.weights) // readers)
    if (one := _only(by_microbatch)) is not None:
        return Kind.GRADIENT, f"is that of microbatch {one + 1} alone: those of the others are lost"
    if lost := [index + 1 for index, group in enumerate(by_microbatch) if _is_lost(group)]:
        return Kind.GRADIENT, f"lacks microbatch {', '.join(map(str, lost))} of {len(by_microbatch)}"
    if lost := [index for index, group in enumerate(by_rank) if _is_lost(group)]:
        return Kind.UNREDUCED, f"lacks what data {in_ranks(lost)} computed: it is not summed over all ranks"
    for averaged_over, average in averages(reference, readers):
        if _fits(row.weights, average):
            return Kind.GRADIENT, f"is averaged over {averaged_over}, not over tokens{_DIVISOR}"
    shown = ", ".join("?" if math.isnan(weight) else f"{weight:.3f}" for weight in row.weights)
    return Kind.GRADIENT, f"weighs the microbatches of the ranks by {shown}; each should weigh 1"


def _is_one(factor: float) -> bool:
    """Return whether a factor would be printed as 1, so that it explains nothing."""
    return f"{factor:.4g}" == "1"


def _is_lost(group: Sequence[float]) -> bool:
    """Return whether there are weights of some microbatches, and all are 0."""
    return bool(group) and all(abs(weight) < EXACT for weight in group)


def _factor(layout: Layout, microbatches: int, factor: float) -> str:
    """Describe a factor, and which number of the layout it is."""
    sizes = {**{axis: layout.size(axis) for axis in (*AXES, "ep")}, "the number of microbatches": microbatches}
    products = {name: layout.size(name) for name in FLATTENED}
    said = f"is {factor:.4g} times that of one process, and right otherwise"
    for verb, number in (("multiplied", factor), ("divided", 1 / factor if factor else math.nan)):
        for named in (sizes, products):
            if fitting := [name for name, size in named.items() if size > 1 and abs(number / size - 1) < EXACT]:
                return f"{said}: {verb} by {named[fitting[0]]} ({' or '.join(fitting)}) once too often"
    return said


def averages(reference: Reference, readers: int) -> Iterator[tuple[str, list[float]]]:
    """Yield the weights that microbatches would have if the loss were an average of averages, and what it is averaged over."""
    tokens = reference.microbatch_tokens
    total, count = sum(tokens), len(tokens)
    each = count // readers
    yield "microbatches", [total / (count * number) if number else math.nan for number in tokens]
    by_rank = [sum(tokens[reader * each : (reader + 1) * each]) for reader in range(readers)]
    yield (
        "ranks",
        [total / (readers * by_rank[index // each]) if by_rank[index // each] else math.nan for index in range(count)],
    )


def _alike(weights: Sequence[float]) -> bool:
    return max(weights) - min(weights) < EXACT * max(map(abs, weights), default=0.0)


def _by_rank(weights: Sequence[float], groups: int) -> list[list[float]]:
    each = len(weights) // groups
    parts = [weights[index * each : (index + 1) * each] for index in range(groups)]
    return [[weight for weight in part if not math.isnan(weight)] for part in parts]


def _transposed(count: int, readers: int) -> list[int]:
    each = count // readers
    return [reader * each + microbatch for microbatch in range(each) for reader in range(readers)]


def _only(groups: Sequence[Sequence[float]]) -> int | None:
    """Return the index of the only group of weights that is not 0; ``None`` if there is not exactly one."""
    known = [index for index, group in enumerate(groups) if group]
    there = [index for index in known if any(abs(weight) >= EXACT for weight in groups[index])]
    return there[0] if len(there) == 1 and len(known) > 1 else None


def _fits(weights: Sequence[float], expected: Sequence[float]) -> bool:
    pairs = [(w, e) for w, e in zip(weights, expected, strict=True) if not math.isnan(w) and not math.isnan(e)]
    return bool(pairs) and all(abs(w - e) < EXACT * abs(e) for w, e in pairs)

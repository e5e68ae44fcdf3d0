"""From numbers to words: what is wrong, in the order of causes. The first finding is the verdict."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from meshwright.audit.compare import Row
from meshwright.audit.ranks import RankResult, axis_names
from meshwright.audit.reference import Reference
from meshwright.audit.tolerance import TOLERANCES, Tolerances
from meshwright.layout import AXES, FLATTENED, Layout
from meshwright.plan.expert_parallel import expert_parallel_counts
from meshwright.plan.price import tensor_parallel_counts, totals
from meshwright.plan.sharding_plan import ShardingPlan

__all__ = ["Finding", "Kind", "diagnose"]

EXACT = 0.01
"""A weight or ratio is said to be a number if it is this near to it."""


class Kind(StrEnum):
    """What can be wrong, causes before their consequences."""

    VALUES = "values"
    """The ranks began with other parameters than one process."""

    DATA = "data"
    """A rank was fed other sequences than its share."""

    RANDOM = "random"
    """Random numbers were drawn in the step: dropout, or routing with noise."""

    MODE = "mode"
    """Modules are in evaluation mode where one process trains, or the reverse."""

    TIES = "ties"
    """Parameters that are one in the plan are several in the model."""

    LOST = "lost"
    """Parameters or buffers that only one side has."""

    FROZEN = "frozen"
    """A parameter that is not trained got a gradient or another value."""

    UNREDUCED = "unreduced"
    """A gradient was not summed over the ranks: each rank has only its own, or none has any."""

    GRADIENT = "gradient"
    """A gradient is wrong otherwise: a factor, a lost microbatch, a foreign part."""

    REPLICAS = "replicas"
    """Ranks that hold the same tensor hold different values."""

    LOSS = "loss"
    """The loss that is reported is not that of one process."""

    NORM = "norm"
    """The norm of the gradient, or what clipping made of it."""

    DECAY = "decay"
    """Weight decay is for other parameters than the configuration says."""

    STATE = "state"
    """Parameters, optimizer state or buffers after the steps, though the gradients are right."""

    LATER = "later"
    """The loss or the norm of a later step, though everything else is right."""

    COLLECTIVES = "collectives"
    """Other collectives, or other bytes, than the plan promised."""


_AFTER_GRADIENTS = (Kind.REPLICAS, Kind.NORM, Kind.STATE, Kind.LATER)
_ALL_NUMBERS = (Kind.UNREDUCED, Kind.GRADIENT, Kind.LOSS, *_AFTER_GRADIENTS)
_CONSEQUENCES = {
    Kind.VALUES: _ALL_NUMBERS,
    Kind.DATA: _ALL_NUMBERS,
    Kind.RANDOM: _ALL_NUMBERS,
    Kind.LOST: _ALL_NUMBERS,
    Kind.TIES: (*_ALL_NUMBERS, Kind.LOST),
    Kind.UNREDUCED: _AFTER_GRADIENTS,
    Kind.GRADIENT: _AFTER_GRADIENTS,
    Kind.REPLICAS: (Kind.LATER,),
    Kind.NORM: (Kind.STATE, Kind.LATER),
    Kind.DECAY: (Kind.STATE, Kind.LATER),
    Kind.STATE: (Kind.LATER,),
}
"""What is bound to be wrong too, and is not worth words. The rows of the report still have all numbers."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong.

    Attributes:
        kind: of cause.
        message: one sentence for people.
        names: parameters, buffers or ranks that it is about.
    """

    kind: Kind
    message: str
    names: tuple[str, ...] = ()


def diagnose(plan: ShardingPlan, reference: Reference, ranks: Sequence[RankResult], tolerances: Tolerances) -> list[Finding]:
    """What is wrong, causes first and without what follows from them; empty if the layout computes what one process does."""
    rows = ranks[0].rows
    found = [
        *_values(plan, rows, ranks),
        *_data(plan.layout, reference, ranks),
        *_random(ranks),
        *_ties(ranks),
        *_frozen(ranks),
        *_gradients(plan, reference, rows, ranks),
        *_replicas(plan, ranks),
        *_modes(reference, ranks),
        *_lost(ranks),
        *_loss(plan.layout, reference, ranks, tolerances),
        *_norms(reference, ranks, rows, tolerances),
        *_decay(reference, ranks),
        *_state(rows),
        *_collectives(plan, ranks),
    ]
    there = {finding.kind for finding in found}
    follows = {kind for cause in there for kind in _CONSEQUENCES.get(cause, ())}
    order = list(Kind)
    return sorted((item for item in found if item.kind not in follows), key=lambda finding: order.index(finding.kind))


# -- before the gradient -----------------------------------------------------------------------------------------------------


def _values(plan: ShardingPlan, rows: Sequence[Row], ranks: Sequence[RankResult]) -> Iterator[Finding]:
    sharded = _sharded_over(plan)
    for name in dict.fromkeys(name for result in ranks for name in result.digests.get("initial value", {})):
        if pairs := _differing(plan.layout, sharded.get(name, set()), name, "initial value", ranks):
            (first, other), *_ = pairs
            yield Finding(Kind.VALUES, f"ranks {first} and {other} begin with different values of {name}", (name,))
    wrong = [row for row in rows if row.what == "initial value" and not row.passed]
    if wrong:
        names = tuple(row.name for row in wrong)
        yield Finding(
            Kind.VALUES, f"the ranks begin with other values than one process: {_listed(names)}; nothing else can agree", names
        )


def _data(layout: Layout, reference: Reference, ranks: Sequence[RankResult]) -> Iterator[Finding]:
    readers = layout.size("dp")
    for step, truth in enumerate(reference.sequences):
        share = len(truth) // readers
        for result in ranks:
            place = layout.coordinates(result.rank)
            reader = place["dp_replicate"] * layout.size("dp_shard") + place["dp_shard"]
            due = truth[reader * share : (reader + 1) * share]
            fed = result.sequences[step] if step < len(result.sequences) else []
            if fed == due:
                continue
            others = [
                other for other in range(readers) if other != reader and fed == truth[other * share : (other + 1) * share]
            ]
            what = f"the data of data rank {others[0]}" if others else _strange(fed, due, truth)
            yield Finding(
                Kind.DATA,
                f"rank {result.rank} was fed {what} in step {step + 1}; it is data rank {reader}",
                (f"rank {result.rank}",),
            )
            return


def _strange(fed: Sequence[str], due: Sequence[str], truth: Sequence[str]) -> str:
    if len(fed) != len(due):
        return f"{len(fed)} sequences where {len(due)} are due"
    foreign = sum(digest not in truth for digest in fed)
    return (
        f"{foreign} sequences that are not in this step" if foreign else "its sequences in another order, or others' among them"
    )


def _random(ranks: Sequence[RankResult]) -> Iterator[Finding]:
    drew = [result.rank for result in ranks if result.drew]
    if drew:
        yield Finding(
            Kind.RANDOM,
            f"{_ranks(drew)} drew random numbers in the step (dropout, or noise in a router): no two runs of it agree, and "
            "ranks that share a sample do not either",
            tuple(f"rank {rank}" for rank in drew),
        )


def _modes(reference: Reference, ranks: Sequence[RankResult]) -> Iterator[Finding]:
    for result in ranks:
        if other := sorted(set(result.evaluating) ^ set(reference.evaluating)):
            names = tuple(name or "(root)" for name in other)
            yield Finding(
                Kind.MODE, f"rank {result.rank} has {len(names)} modules in another mode (train, eval): {_listed(names)}", names
            )
            return


def _lost(ranks: Sequence[RankResult]) -> Iterator[Finding]:
    names = tuple(dict.fromkeys(name for result in ranks for name in result.lost))
    if names:
        yield Finding(Kind.LOST, f"only one process or only the ranks have, after the steps: {_listed(names)}", names)


def _ties(ranks: Sequence[RankResult]) -> Iterator[Finding]:
    for group in dict.fromkeys(group for result in ranks for group in result.come_apart):
        yield Finding(
            Kind.TIES,
            f"tied parameters came apart: {' and '.join(group)} are one parameter in the plan, and several now",
            group,
        )


def _frozen(ranks: Sequence[RankResult]) -> Iterator[Finding]:
    names = tuple(dict.fromkeys(name for result in ranks for name in result.frozen_moved))
    if names:
        yield Finding(Kind.FROZEN, f"moved, or got a gradient, though frozen: {_listed(names)}", names)


# -- gradients ---------------------------------------------------------------------------------------------------------------


def _gradients(plan: ShardingPlan, reference: Reference, rows: Sequence[Row], ranks: Sequence[RankResult]) -> Iterator[Finding]:
    """One finding for each way in which gradients are wrong, with all parameters that are wrong in that way."""
    lacking = tuple(dict.fromkeys(name for result in ranks for name in result.without_gradient))
    wrong = [row for row in rows if row.what == "gradient" and not row.passed]
    arrived = [row for row in wrong if row.name not in lacking]
    unarrived = tuple(row.name for row in wrong if row.name in lacking)
    if unarrived:
        where = [result.rank for result in ranks if set(unarrived) & set(result.without_gradient)]
        yield Finding(
            Kind.UNREDUCED,
            f"no gradient of {_described(plan, unarrived)} arrived on {_ranks(where)}: it is never reduced",
            unarrived,
        )
    ways: dict[tuple[Kind, str], list[str]] = {}
    sharded = _sharded_over(plan)
    for row in arrived:
        pairs = _differing(plan.layout, sharded[row.name], row.name, "gradient", ranks)
        way = (Kind.UNREDUCED, _apart(plan.layout, pairs)) if pairs else _way(plan, reference, row)
        ways.setdefault(way, []).append(row.name)
    for (kind, words), names in sorted(ways.items(), key=lambda item: -len(item[1])):
        yield Finding(kind, f"the gradient of {_described(plan, names)} {words}", tuple(names))


def _way(plan: ShardingPlan, reference: Reference, row: Row) -> tuple[Kind, str]:
    """How one gradient is wrong."""
    readers = plan.layout.size("dp")
    weights = [weight for weight in row.weights if not math.isnan(weight)]
    if len(weights) > 1:
        if _alike(weights):
            return Kind.GRADIENT, _factor(plan.layout, plan.options.microbatches, sum(weights) / len(weights))
        by_rank = _by_rank(row.weights, readers)
        if (one := _only(by_rank)) is not None:
            return Kind.UNREDUCED, f"is that of data rank {one} alone: it is not summed over the ranks"
        by_microbatch = _by_rank([row.weights[i] for i in _transposed(len(row.weights), readers)], len(row.weights) // readers)
        if (one := _only(by_microbatch)) is not None:
            return Kind.GRADIENT, f"is that of microbatch {one + 1} alone: those of the others are lost"
        if lost := [index + 1 for index, group in enumerate(by_microbatch) if all(abs(w) < EXACT for w in group)]:
            return Kind.GRADIENT, f"lacks microbatch {', '.join(map(str, lost))} of {len(by_microbatch)}"
        if lost := [index for index, group in enumerate(by_rank) if all(abs(w) < EXACT for w in group)]:
            return Kind.UNREDUCED, f"lacks what data {_ranks(lost)} computed: it is not summed over all ranks"
        for what, average in _averages(reference, readers):
            if _fits(row.weights, average):
                return Kind.GRADIENT, f"is averaged over {what}, not over tokens"
        shown = ", ".join("?" if math.isnan(weight) else f"{weight:.3f}" for weight in row.weights)
        return Kind.GRADIENT, f"weighs the microbatches of the ranks by {shown}; each should weigh 1"
    if row.residual < EXACT:
        return Kind.GRADIENT, _factor(plan.layout, plan.options.microbatches, row.ratio)
    if math.isinf(row.error):
        return Kind.GRADIENT, "is not finite"
    return (
        Kind.GRADIENT,
        "is not made of the gradients of the microbatches: something foreign is in it, or part of it is missing",
    )


def _factor(layout: Layout, microbatches: int, factor: float) -> str:
    """A factor, and which number of the layout it is."""
    sizes = {**{axis: layout.size(axis) for axis in (*AXES, "ep")}, "the number of microbatches": microbatches}
    products = {name: layout.size(name) for name in FLATTENED}
    said = f"is {factor:.4g} times that of one process, and right otherwise"
    for verb, number in (("multiplied", factor), ("divided", 1 / factor if factor else math.nan)):
        for named in (sizes, products):
            if fitting := [name for name, size in named.items() if size > 1 and abs(number / size - 1) < EXACT]:
                return f"{said}: {verb} by {named[fitting[0]]} ({' or '.join(fitting)}) once too often"
    return said


def _averages(reference: Reference, readers: int) -> Iterator[tuple[str, list[float]]]:
    """Weights that the microbatches would have if the loss were an average of averages."""
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
    """The one group of weights that is there, where all others are 0."""
    there = [index for index, group in enumerate(groups) if any(abs(weight) >= EXACT for weight in group)]
    return there[0] if len(there) == 1 and len(groups) > 1 else None


def _fits(weights: Sequence[float], expected: Sequence[float]) -> bool:
    pairs = [(w, e) for w, e in zip(weights, expected, strict=True) if not math.isnan(w) and not math.isnan(e)]
    return bool(pairs) and all(abs(w - e) < EXACT * abs(e) for w, e in pairs)


def _decay(reference: Reference, ranks: Sequence[RankResult]) -> Iterator[Finding]:
    for result in ranks:
        for wrong, words in (
            (set(result.decayed) - set(reference.decayed), "decays what is no matrix, or is excepted"),
            (set(reference.decayed) - set(result.decayed), "does not decay what is a matrix"),
        ):
            if wrong:
                names = tuple(sorted(wrong))
                yield Finding(Kind.DECAY, f"rank {result.rank} {words}: {_listed(names)}", names)
                return


# -- after the gradient ------------------------------------------------------------------------------------------------------


def _replicas(plan: ShardingPlan, ranks: Sequence[RankResult]) -> Iterator[Finding]:
    """Ranks that differ only on axes that a tensor is not sharded over must hold the same bits."""
    sharded = _sharded_over(plan)
    # Where a gradient was not summed over replicas, that is said already, and all that follows from it needs no words.
    wrong = (row.name for row in ranks[0].rows if row.what == "gradient" and not row.passed)
    reported = {name for name in wrong if _differing(plan.layout, sharded[name], name, "gradient", ranks)}
    for what in dict.fromkeys(kind for result in ranks for kind in result.digests if kind != "initial value"):
        differing: dict[tuple[tuple[int, ...], ...], list[str]] = {}
        for name in dict.fromkeys(name for result in ranks for name in result.digests.get(what, {})):
            if name in reported:
                continue
            pairs = _differing(plan.layout, sharded.get(name, set()), name, what, ranks)
            if pairs:
                differing.setdefault(pairs, []).append(name)
                reported.add(name)
        for pairs, names in differing.items():
            noun = {"parameter": "values", "gradient": "the gradient", "buffer": "the buffer"}.get(what, what)
            yield Finding(
                Kind.REPLICAS,
                f"replicas differ: {noun} of {_described(plan, names)} {_apart(plan.layout, pairs)}",
                tuple(names),
            )


def _sharded_over(plan: ShardingPlan) -> dict[str, set[str]]:
    """Parameter name to the axes that shard it."""
    return {row.name: {axis for axis, placement in row.placements if "Shard" in placement} for row in plan.parameters}


def _apart(layout: Layout, pairs: Sequence[Sequence[int]]) -> str:
    """That some ranks hold different values of what should be the same, and over which axes it was not summed."""
    axes = dict.fromkeys(axis for pair in pairs for axis in _axes_between(layout, pair))
    shown = " and ".join(f"ranks {pair[0]} and {pair[1]}" for pair in pairs[:2])
    return f"differs between {shown}, which should hold the same: it is not summed, or not kept in step, over {', '.join(axes)}"


def _differing(
    layout: Layout, sharded: set[str], name: str, what: str, ranks: Sequence[RankResult]
) -> tuple[tuple[int, ...], ...]:
    """Pairs of ranks that should hold the same of a tensor, and do not."""
    holders: dict[tuple[int, ...], list[RankResult]] = {}
    for result in ranks:
        holders.setdefault(_share(layout, result.rank, sharded), []).append(result)
    pairs = []
    for group in holders.values():
        first = group[0]
        for other in group[1:]:
            if first.digests.get(what, {}).get(name) != other.digests.get(what, {}).get(name):
                pairs.append((first.rank, other.rank))
    return tuple(pairs)


def _share(layout: Layout, rank: int, sharded: set[str]) -> tuple[int, ...]:
    """Which part of a tensor a rank holds: its coordinates on the axes that shard it, and its pipeline stage."""
    place = {**layout.coordinates(rank), **layout.coordinates(rank, experts=True)}
    place["dp_shard_cp"] = place["dp_shard"] * layout.size("cp") + place["cp"]
    return (place["pp"], *(place[axis] for axis in sorted(sharded)))


def _axes_between(layout: Layout, pair: Sequence[int]) -> list[str]:
    first, second = (layout.coordinates(rank) for rank in pair)
    return [axis for axis in AXES if first[axis] != second[axis]]


def _loss(layout: Layout, reference: Reference, ranks: Sequence[RankResult], tolerances: Tolerances) -> Iterator[Finding]:
    for step, truth in enumerate(reference.losses):
        for result in ranks:
            loss = result.losses[step]
            if _near(loss, truth, tolerances.scalar("loss", step)):
                continue
            how = f"{loss / truth:.4g} times it"
            tokens = sum(reference.microbatch_tokens)
            for what, weights in _averages(reference, layout.size("dp")) if step == 0 else ():
                parts = zip(weights, reference.microbatch_losses, strict=True)
                average = sum(weight * part for weight, part in parts if not math.isnan(weight)) / tokens
                if _near(loss, average, max(tolerances.scalar("loss", step), 1e-6)):
                    how = f"averaged over {what}, not over tokens"
            where = f"rank {result.rank} in step {step + 1}"
            kind = Kind.LATER if step else Kind.LOSS
            yield Finding(kind, f"the loss on {where} is {loss:.9g}, that of one process {truth:.9g}: {how}")
            return


def _norms(reference: Reference, ranks: Sequence[RankResult], rows: Sequence[Row], tolerances: Tolerances) -> Iterator[Finding]:
    right = all(row.passed for row in rows if row.what == "gradient")
    compared = [(0, "after clipping", [result.clipped_norm for result in ranks], reference.clipped_norm)]
    # Where rounding is not that of one process, the norm should be that of the layout's own gradients, which were compared.
    own = tolerances.rounded()
    for step, truth in enumerate([ranks[0].gathered_norm, *reference.norms[1:]] if own else reference.norms):
        compared.insert(step, (step, "before clipping", [result.norms[step] for result in ranks], truth))
    for step, when, values, truth in compared:
        for result, value in zip(ranks, values, strict=True):
            exact = own and step == 0 and when.startswith("before")
            if _near(value, truth, TOLERANCES[tolerances.dtype] if exact else tolerances.scalar("norm", step)):
                continue
            why = ""
            if right and step == 0 and value < truth and len({round(other, 12) for other in values}) > 1:
                why = "; the gradients are right and the ranks have different norms, each that of its own shards: not summed"
            elif right and step == 0:
                why = "; the gradients are right, so it is the norm itself, or the scaling"
            yield Finding(
                Kind.LATER if step else Kind.NORM,
                f"the norm of the gradient {when} is {value:.6g} on rank {result.rank} in step {step + 1}, {truth:.6g} "
                f"{'of the gathered gradients' if exact else 'in one process'}{why}",
            )
            return


def _near(value: float, truth: float, tolerance: float) -> bool:
    return abs(value - truth) <= tolerance * abs(truth)


def _state(rows: Sequence[Row]) -> Iterator[Finding]:
    """Only where the gradient of the parameter is right: otherwise it follows from that."""
    blamed = {row.name for row in rows if row.what in ("gradient", "initial value") and not row.passed}
    wrong: dict[str, list[Row]] = {}
    for row in rows:
        if row.what not in ("gradient", "initial value") and not row.passed and row.name not in blamed:
            wrong.setdefault(row.what, []).append(row)
    for what, found in wrong.items():
        found.sort(key=lambda row: -row.severity)
        worst, names = found[0], tuple(row.name for row in found)
        noun = {"parameter": "the values", "buffer": "the buffers"}.get(what, f"the optimizer's {what}")
        yield Finding(
            Kind.STATE,
            f"{noun} of {_listed(names)} differ after the steps, the worst first (error {worst.error:.2g}, ratio "
            f"{worst.ratio:.4g}), though the first gradients agree",
            names,
        )


def _collectives(plan: ShardingPlan, ranks: Sequence[RankResult]) -> Iterator[Finding]:
    traffic = totals(plan).traffic
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    due = {"dp": Counter({kind: getattr(traffic, f"{kind}s") for kind in kinds})}
    sizes = Counter({kind: getattr(traffic, f"{kind}_bytes") for kind in kinds})
    due["tp"] = tensor_parallel_counts(plan)
    for axis, more in expert_parallel_counts(plan).items():
        due.setdefault(axis, Counter()).update(more)
    # What recomputation repeats, and what no gradient flows through, is not in the counts of the model's own axes.
    frozen = any(not row.trainable and plan.unit(row.unit).forwards for row in plan.parameters)
    exact = not frozen and not any(unit.activation_checkpointing for unit in plan.units)
    for step, result in [(step, of_rank) for of_rank in ranks for step in range(len(of_rank.counts))]:
        wrong = []
        counts, sizes_made = result.counts[step], result.bytes[step]
        narrower = plan.layout.coordinates(result.rank)["tp"] > 0  # the plan is that of the rank with the widest slices
        for axes in _together([*due, *axis_names(plan.layout, result.rank).values(), *counts]):
            names = [name for name in counts if set(name.split("+")) <= axes]
            made, made_bytes = _added(counts, names), _added(sizes_made, names)
            planned = _added(due, axes)
            for kind in dict.fromkeys([*planned, *made]):
                if not exact and ("tp" in axes or ("ep" in axes and kind not in kinds)):
                    continue
                count, size = made[kind], made_bytes[kind]
                of_plan = kind in kinds and "dp" in axes and "tp" not in axes  # other bytes depend on the batch
                if count != planned[kind] or (of_plan and not (size == sizes[kind] or (narrower and size < sizes[kind]))):
                    what = f"{count} {kind} of {size:,} bytes over {'+'.join(sorted(axes))}"
                    wrong.append(f"{what} where the plan has {planned[kind]}" + (f" of {sizes[kind]:,}" if of_plan else ""))
        if wrong:
            yield Finding(Kind.COLLECTIVES, f"rank {result.rank} in step {step + 1} made {'; '.join(wrong)}", kinds)
            return


def _added(counts: Mapping[str, Counter[str]], names: Iterable[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for name in names:
        found.update(counts.get(name, {}))
    return found


def _together(names: Iterable[str]) -> list[set[str]]:
    """Axes that are over the same ranks somewhere, so that their collectives cannot be told apart."""
    found: list[set[str]] = []
    for name in names:
        axes = set(name.split("+"))
        touching = [other for other in found if other & axes]
        found = [other for other in found if not other & axes] + [axes.union(*touching)]
    return found


# -- words -------------------------------------------------------------------------------------------------------------------


def _described(plan: ShardingPlan, names: Sequence[str]) -> str:
    """Parameters by their units, where those are wholly meant. Other names, of buffers, as they are."""
    if not set(names) <= {row.name for row in plan.parameters}:
        return _listed(names)
    if len(names) == 1:
        return f"{names[0]} (unit {plan.unit(plan.parameter(names[0]).unit).label})"
    trained = {row.name for row in plan.parameters if row.trainable}
    if trained <= set(names):
        return f"all {len(names)} parameters"
    units = list(dict.fromkeys(plan.parameter(name).unit for name in names))
    whole = all(set(plan.unit(unit).parameters) & trained <= set(names) for unit in units)
    labels = [plan.unit(unit).label for unit in units]
    if whole:
        return f"all {len(names)} parameters of unit {_listed(labels)}"
    return f"{len(names)} parameters ({_listed(names)}) of unit {_listed(labels)}"


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"


def _listed(names: Iterable[str], most: int = 4) -> str:
    shown = list(names)
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")

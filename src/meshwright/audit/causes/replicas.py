"""Ranks that should hold the same values, and do not: found by digests of what each rank holds."""

from collections.abc import Iterator, Sequence

from meshwright.audit.causes.findings import Finding, Kind, described
from meshwright.audit.result import RankResult
from meshwright.layout import AXES, Layout
from meshwright.plan.result.sharding_plan import ShardingPlan

__all__ = ["apart", "differing", "replica_findings", "sharded_over"]


def replica_findings(plan: ShardingPlan, ranks: Sequence[RankResult]) -> Iterator[Finding]:
    """Yield a finding for ranks whose copies of a tensor differ, although the axes between these ranks do not shard it."""
    sharded = sharded_over(plan)
    # A gradient that was not summed over replicas is reported already, and its consequences are not reported.
    wrong = (row.name for result in ranks for row in result.rows if row.what == "gradient" and not row.passed)
    reported = {name for name in wrong if differing(plan.layout, sharded[name], name, "gradient", ranks)}
    for digested in dict.fromkeys(kind for result in ranks for kind in result.digests if kind != "initial value"):
        names_of: dict[tuple[tuple[int, ...], ...], list[str]] = {}
        for name in dict.fromkeys(name for result in ranks for name in result.digests.get(digested, {})):
            if name in reported:
                continue
            pairs = differing(plan.layout, sharded.get(name, set()), name, digested, ranks)
            if pairs:
                names_of.setdefault(pairs, []).append(name)
                reported.add(name)
        for pairs, names in names_of.items():
            noun = {"parameter": "values", "gradient": "the gradient", "buffer": "the buffer"}.get(digested, digested)
            yield Finding(
                Kind.REPLICAS,
                f"replicas differ: {noun} of {described(plan, names)} {apart(plan.layout, pairs)}",
                tuple(names),
            )


def sharded_over(plan: ShardingPlan) -> dict[str, set[str]]:
    """Return parameter name to the axes that shard it."""
    return {row.name: {axis for axis, placement in row.placements if "Shard" in placement} for row in plan.parameters}


def apart(layout: Layout, pairs: Sequence[Sequence[int]]) -> str:
    """Return words for ranks that hold different values where these should be equal, and the axes between these ranks."""
    axes = dict.fromkeys(axis for pair in pairs for axis in _axes_between(layout, pair))
    shown = " and ".join(f"ranks {pair[0]} and {pair[1]}" for pair in pairs[:2])
    return f"differs between {shown}, which should hold the same: it is not summed, or not kept in step, over {', '.join(axes)}"


def differing(
    layout: Layout, sharded: set[str], name: str, kind: str, ranks: Sequence[RankResult], *, stages: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Return pairs of ranks that should hold the same values of a tensor, and do not.

    ``stages``: compare the ranks of all stages that have it, and not only those of one stage.
    """
    holders: dict[tuple[int, ...], list[RankResult]] = {}
    for result in ranks:
        if stages and name not in result.digests.get(kind, {}):
            continue
        share = _share(layout, result.rank, sharded)
        holders.setdefault(share[1:] if stages else share, []).append(result)
    pairs = []
    for group in holders.values():
        first = group[0]
        for other in group[1:]:
            if first.digests.get(kind, {}).get(name) != other.digests.get(kind, {}).get(name):
                pairs.append((first.rank, other.rank))
    return tuple(pairs)


def _share(layout: Layout, rank: int, sharded: set[str]) -> tuple[int, ...]:
    """Return which part of a tensor a rank holds: its coordinates on the axes that shard it, and its pipeline stage."""
    place = {**layout.coordinates(rank), **layout.coordinates(rank, experts=True)}
    place["dp_shard_cp"] = place["dp_shard"] * layout.size("cp") + place["cp"]
    return (place["pp"], *(place[axis] for axis in sorted(sharded)))


def _axes_between(layout: Layout, pair: Sequence[int]) -> list[str]:
    first, second = (layout.coordinates(rank) for rank in pair)
    return [axis for axis in AXES if first[axis] != second[axis]]

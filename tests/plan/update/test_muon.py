"""Who owns which matrix, which parts go where, and what that costs: on paper, for any number of ranks."""

from collections.abc import Iterator
from itertools import product
from math import prod

import pytest

from meshwright.plan.update.matrices import Apart, Cut, Form, Held, Spans, matrices_of, piece_of, shape_of, splitting_axes
from meshwright.plan.update.muon import Bucket, decide, flows, index_of, newton_schulz_work, place_of
from meshwright.plan.update.muon_cost import traffic_of

FSDP = (("dp_shard", 4),)
BOTH = (("dp_replicate", 2), ("dp_shard", 2), ("tp", 3))
QKV = Form(apart=Apart((8, 4, 4)))
BY_HEAD = Form(apart=Apart((8, 4, 4), heads=(4, 2, 2)))
ALTERNATING = Form(transposed=True, apart=Apart((1, 1), runs=6))
PER_HEAD = Form(apart=Apart((2, 2, 2), runs=3))
CASES = {
    "rows": Held((7, 5), FSDP, (Cut("dp_shard", 0),)),
    "fewer rows than ranks": Held((3, 5), FSDP, (Cut("dp_shard", 0),)),
    "columns": Held((5, 8), FSDP, (Cut("dp_shard", 1),)),
    "both": Held((12, 10), BOTH, (Cut("tp", 0), Cut("dp_shard", 0))),
    "rowwise": Held((12, 9), BOTH, (Cut("tp", 1), Cut("dp_shard", 0))),
    "packed": Held((12, 8), BOTH, (Cut("tp", 0, 2), Cut("dp_shard", 1)), Form(apart=Apart((6, 6)))),
    "fused": Held((16, 6), FSDP, (Cut("dp_shard", 0),), QKV),
    "heads": Held((16, 6), FSDP, (Cut("dp_shard", 0),), BY_HEAD),
    "each head": Held((18, 6), FSDP, (Cut("dp_shard", 0),), PER_HEAD),
    "experts": Held((8, 5, 6), FSDP, (Cut("dp_shard", 0),)),
    "experts, uneven": Held((5, 5, 6), FSDP, (Cut("dp_shard", 0),)),
    "experts, alternating": Held((3, 5, 12), FSDP, (Cut("dp_shard", 2),), ALTERNATING),
    "experts, ep": Held((8, 6, 5), (("ep_shard", 2), ("ep", 2)), (Cut("ep", 0), Cut("ep_shard", 1))),
    "replicas": Held((6, 6), (("dp_replicate", 4),)),
    "experts, replicas": Held((8, 6, 5), (("dp_replicate", 2), ("ep_shard", 2), ("ep", 2)), (Cut("ep", 0), Cut("ep_shard", 0))),
}


def indices(spans: Spans) -> Iterator[int]:
    for begin, end in spans:
        yield from range(begin, end)


def ranks_of(held: Held) -> Iterator[dict[str, int]]:
    for place in product(*(range(size) for _, size in held.axes)):
        yield {name: index for (name, _), index in zip(held.axes, place, strict=True)}


@pytest.mark.parametrize("held", CASES.values(), ids=CASES.keys())
def test_parts_tile_the_matrices_once_in_each_replica(held: Held) -> None:
    replicas = prod(size for name, size in held.axes if name in held.replicas)
    stacked = len(held.shape) == 3
    for matrix in range(len(matrices_of(held))):
        seen: dict[tuple[int, int], int] = {}
        for at in ranks_of(held):
            piece = piece_of(held, matrix, place_of(held, at))
            if stacked and "dp_shard" in at and held.cuts[0].dim == 0 and at["dp_shard"]:
                continue  # another rank has other experts, and the same part of each
            for entry in product(indices(piece.rows), indices(piece.columns)):
                seen[entry] = seen.get(entry, 0) + 1
        others = prod(
            size for name, size in held.axes if any(cut.axis == name and stacked and cut.dim == 0 for cut in held.cuts)
        )
        others = 1 if stacked and held.cuts and held.cuts[0] == Cut("dp_shard", 0) else others
        assert seen == dict.fromkeys(product(*map(range, shape_of(held, matrix))), replicas * others)


def test_matrices_are_taken_apart_as_told() -> None:
    def features(form: Form, shape: tuple[int, ...]) -> list[list[int]]:
        return [list(indices(spans)) for spans in matrices_of(Held(shape, form=form))]

    assert features(QKV, (16, 6)) == [list(range(8)), list(range(8, 12)), list(range(12, 16))]
    assert features(BY_HEAD, (16, 6)) == [list(range(begin, begin + 2)) for begin in range(0, 16, 2)]
    assert features(ALTERNATING, (3, 5, 12)) == [list(range(0, 12, 2)), list(range(1, 12, 2))]
    assert features(PER_HEAD, (18, 6))[1] == [2, 3, 8, 9, 14, 15]


def test_only_axes_that_split_a_matrix_are_exchanged_over() -> None:
    assert splitting_axes(CASES["both"]) == ("dp_shard", "tp")
    assert splitting_axes(CASES["experts"]) == splitting_axes(CASES["experts, replicas"]) == ()
    assert splitting_axes(CASES["experts, ep"]) == ("ep_shard",)
    assert splitting_axes(CASES["heads"]) == ()  # 4 rows a rank, 2 a head
    assert splitting_axes(CASES["fused"]) == ("dp_shard",)  # two ranks share the queries


@pytest.mark.parametrize("held", CASES.values(), ids=CASES.keys())
def test_all_ranks_agree_on_what_they_exchange(held: Held) -> None:
    """What one sends another receives; each matrix has one owner in a group; and the totals are those of the plan."""
    together = [held, held, held]
    buckets = {tuple(at.items()): decide(together, at, 20) for at in ranks_of(held)}
    most = {"bytes": 0, "sent": 0}
    for at in ranks_of(held):
        mine = buckets[tuple(at.items())]
        moved = sent = 0
        for place, bucket in enumerate(mine):
            me, own = index_of(bucket, at), flows(together, bucket, at)
            for member in ranks_of(held):
                if {**at, **{name: member[name] for name, _ in bucket.axes}} != member:
                    continue
                theirs = buckets[tuple(member.items())][place]
                assert theirs == bucket
                other, of_other = index_of(bucket, member), flows(together, bucket, member)
                assert own.sent_in[other] == of_other.received_in[me]
                assert own.sent_out[other] == of_other.received_out[me]
            if bucket.ranks > 1:
                moved += max(sum(own.sent_in), sum(own.received_in)) + max(sum(own.sent_out), sum(own.received_out))
                sent += sum(own.sent_in) - own.sent_in[me] + sum(own.sent_out) - own.sent_out[me]
        most = {"bytes": max(most["bytes"], moved), "sent": max(most["sent"], sent)}
        assert sum(item.weights for bucket in mine for item in bucket.items) == _weights(mine, together)
    traffic = traffic_of(together, dict.fromkeys(dict(held.axes), 0), 4, [4, 4, 4], bucket=20)
    assert (traffic.bytes, traffic.sent) == (4 * most["bytes"], 4 * most["sent"])
    assert traffic.all_to_alls == sum(bucket.all_to_alls for bucket in buckets[tuple(next(ranks_of(held)).items())])


def _weights(buckets: tuple[Bucket, ...], held: list[Held]) -> int:
    """The number of different matrices in some buckets."""
    return len(
        {
            (item.parameter, item.matrix, weight)
            for bucket in buckets
            for item in bucket.items
            for weight in range(item.begin, item.end)
        }
    )


def test_work_is_divided_evenly_and_buckets_are_as_large_as_told() -> None:
    shapes = [(16, 16), (16, 16), (8, 16), (8, 16), (48, 16), (16, 48), (48, 16)] * 4
    held = [Held(shape, FSDP, (Cut("dp_shard", 0),)) for shape in shapes]
    buckets = decide(held, {"dp_shard": 0}, 400)
    work = [0] * 4
    for bucket in buckets:
        assert sum(prod(held[index].shape) for index in bucket.parameters) <= 4 * max(400, 48 * 16)
        for item in bucket.items:
            work[item.owner] += newton_schulz_work(shape_of(held[item.parameter], item.matrix))
    assert min(work) > 0.95 * max(work)
    assert [bucket.all_to_alls for bucket in buckets] == [2] * len(buckets)
    traffic = traffic_of(held, {"dp_shard": 0}, 2, [4] * len(held), bucket=400)
    assert traffic.even == sum(work) / 4 / max(work)
    # Two exchanges in half the bytes of a momentum in fp32; 1.1 for matrices that do not divide evenly.
    assert traffic.sent <= 1.1 * sum(prod(shape) for shape in shapes) / 4 * 4


def test_replicas_share_the_work() -> None:
    axes = (("dp_replicate", 2), ("dp_shard", 2))
    held = [Held((8, 8), axes, (Cut("dp_shard", 0),))] * 8
    alone = traffic_of([Held((8, 8), axes[1:], (Cut("dp_shard", 0),))] * 8, {"dp_shard": 0}, 4, [4] * 8)
    both = traffic_of(held, {"dp_replicate": 0, "dp_shard": 0}, 4, [4] * 8)
    assert both.work == alone.work // 2


def test_a_thousand_ranks_are_planned_in_a_moment() -> None:
    axes = (("dp_shard", 1024),)
    shapes = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)] * 32
    held = [Held(shape, axes, (Cut("dp_shard", 0),)) for shape in shapes]
    traffic = traffic_of(held, {"dp_shard": 0}, 2, [4] * len(held))
    assert traffic.all_to_alls == 2

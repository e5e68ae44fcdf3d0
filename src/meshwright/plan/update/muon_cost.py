"""What an update of Muon sends, computes and holds. Plain arithmetic over the buckets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from meshwright.plan.update.matrices import Held, own_spans, piece_of, shape_of
from meshwright.plan.update.muon import BUCKET, Bucket, decide, newton_schulz_work, place_of, places, replica_of

__all__ = ["UpdateTraffic", "traffic_of"]


@dataclass(frozen=True)
class UpdateTraffic:
    """What an update costs the rank that it costs most, in each number for itself.

    Attributes:
        groups: for each kind of group, the names of its axes, the number of all-to-alls, and the bytes of the larger buffer of
            each, added up, as :class:`~meshwright.distributed.comm_counter.CommCounter` counts.
        sent: bytes that go to other ranks.
        work: multiply-adds of Newton-Schulz.
        held: bytes of buffers and intermediate results at the peak, beside parameters, gradients and momentum.
        even: work of all ranks, divided by their number and by the work of that rank; 1: all have the same.
    """

    groups: tuple[tuple[tuple[str, ...], int, int], ...]
    sent: int
    work: int
    held: int
    even: float

    @property
    def all_to_alls(self) -> int:
        """Number of collectives."""
        return sum(calls for _, calls, _ in self.groups)

    @property
    def bytes(self) -> int:
        """Bytes of the larger buffer of each, added up."""
        return sum(size for _, _, size in self.groups)


class _Volumes(NamedTuple):
    """Numbers of one bucket for each rank of its group, in elements.

    Attributes:
        sent_in: in the buffer of the first all-to-all that is sent.
        received_in: in the one that is received.
        sent_out: so too, of the second one; without ranks beside, what is computed.
        received_out: so too.
        to_others: what really leaves the rank in both.
        work: multiply-adds of a step of Newton-Schulz.
        computing: what the largest batch holds.
    """

    sent_in: list[int]
    received_in: list[int]
    sent_out: list[int]
    received_out: list[int]
    to_others: list[int]
    work: list[int]
    computing: list[int]


def traffic_of(
    held: Sequence[Held],
    at: Mapping[str, int],
    itemsize: int,
    stored: Sequence[int],
    *,
    steps: int = 5,
    nesterov: bool = True,
    bucket: int = BUCKET,
) -> UpdateTraffic:
    """Return what an update costs, if all parameters have a gradient.

    Args:
        held: how each parameter is held.
        at: index of a rank on each axis. The numbers are of the groups that it is in.
        itemsize: bytes of a number in the dtype of Newton-Schulz, in which matrices are exchanged.
        stored: bytes of a number of each parameter, as it is stored.
        steps: steps of Newton-Schulz.
        nesterov: whether what is orthogonalised is another tensor than the momentum.
        bucket: see :func:`~meshwright.plan.update.muon.decide`.
    """
    buckets = decide(held, at, bucket)
    volumes = [_volumes(held, own, at) for own in buckets]
    groups: dict[tuple[object, tuple[tuple[str, int], ...], bool], list[_Volumes]] = {}
    for own, volume in zip(buckets, volumes, strict=True):
        groups.setdefault((held[own.items[0].parameter].axes, own.axes, own.split), []).append(volume)
    sent = work = 0
    moved: list[tuple[tuple[str, ...], int, int]] = []
    shares: list[float] = []
    for (_, axes, split), together in groups.items():
        ranks = range(len(together[0].work))
        larger = itemsize * max(sum(_larger(one, rank) for one in together) for rank in ranks)
        if axes:
            moved.append((tuple(name for name, _ in axes), len(together) * (1 + split), larger))
        sent += max(sum(one.to_others[rank] for one in together) for rank in ranks)
        each = [sum(one.work[rank] for one in together) for rank in ranks]
        work += max(each)
        shares.append(sum(each) / len(ranks))
    updates = [_updates(held, own, at, stored) if nesterov else 0 for own in buckets]
    return UpdateTraffic(
        groups=tuple(moved),
        sent=sent * itemsize,
        work=steps * work,
        held=_peak(buckets, volumes, updates, itemsize),
        even=sum(shares) / work if work else 1.0,
    )


def _larger(volume: _Volumes, rank: int) -> int:
    """Return the elements of the larger buffer of each all-to-all."""
    first = max(volume.sent_in[rank], volume.received_in[rank])
    return first + (max(volume.sent_out[rank], volume.received_out[rank]) if len(volume.work) > 1 else 0)


def _updates(held: Sequence[Held], bucket: Bucket, at: Mapping[str, int], stored: Sequence[int]) -> int:
    """Return the bytes of what is orthogonalised, of the shards of a bucket."""
    total = 0
    for index in bucket.parameters:
        place = place_of(held[index], at)
        shard = prod(sum(end - begin for begin, end in own_spans(held[index], dim, place)) for dim in range(3))
        total += shard * stored[index]
    return total


def _volumes(held: Sequence[Held], bucket: Bucket, at: Mapping[str, int]) -> _Volumes:
    """Return the volumes of a bucket. Matrices of parameters that are held alike are counted together."""
    ranks = range(bucket.ranks)
    found = _Volumes(*([0] * bucket.ranks for _ in _Volumes._fields))
    replica = [replica_of(bucket, rank) for rank in ranks]
    alike: dict[tuple[Held, int], dict[int, int]] = {}
    for item in bucket.items:
        owners = alike.setdefault((held[item.parameter], item.matrix), {})
        owners[item.owner] = owners.get(item.owner, 0) + item.weights
    batches: dict[tuple[int, tuple[int, int]], int] = {}
    for (own, matrix), owners in alike.items():
        shape = shape_of(own, matrix)
        short, long = sorted(shape)
        of_rank = [prod(piece_of(own, matrix, place).shape) for place in places(own, bucket, at)]
        of_replica: dict[tuple[int, ...], int] = {}
        for owner, count in owners.items():
            of_replica[replica[owner]] = of_replica.get(replica[owner], 0) + count
            if bucket.split:
                found.received_in[owner] += count * short * long
                found.to_others[owner] -= count * of_rank[owner]
            found.sent_out[owner] += bucket.copies * count * short * long
            found.to_others[owner] += count * (bucket.copies * short * long - of_rank[owner])
            found.work[owner] += count * newton_schulz_work(shape)
            batches[owner, (short, long)] = batches.get((owner, (short, long)), 0) + count
        for rank in ranks:
            found.received_out[rank] += sum(owners.values()) * of_rank[rank]
            if bucket.split:
                found.sent_in[rank] += of_replica.get(replica[rank], 0) * of_rank[rank]
                found.to_others[rank] += of_replica.get(replica[rank], 0) * of_rank[rank]
    for (owner, (short, long)), count in batches.items():
        # What goes in, what comes out, the product with its transpose, and the polynomial of that.
        found.computing[owner] = max(found.computing[owner], 2 * count * short * (long + short))
    return found


def _peak(buckets: Sequence[Bucket], volumes: Sequence[_Volumes], updates: Sequence[int], itemsize: int) -> int:
    """Return the most bytes at once, if each bucket had the largest volumes of any rank.

    The first exchange of the next bucket begins before a bucket is computed, and the results of the one before are still on
    the way.
    """

    def most(index: int, *fields: str) -> int:
        return itemsize * sum(max(getattr(volumes[index], field)) for field in fields) if 0 <= index < len(buckets) else 0

    def leaving(index: int) -> int:
        alone = index < 0 or buckets[index].ranks == 1
        return most(index, "sent_out") + (0 if alone else most(index, "received_out"))

    peak = 0
    for index, own in enumerate(buckets):
        before, later = leaving(index - 1), most(index + 1, "sent_in", "received_in")
        begins = later + (updates[index + 1] if index + 1 < len(buckets) and buckets[index + 1].split else 0)
        at_once = [
            most(index, "sent_in", "received_in") + updates[index] if index == 0 and own.split else 0,
            before + most(index, "sent_in", "received_in") + begins,
            before + later + most(index, "received_in", "sent_out", "computing") + (0 if own.split else updates[index]),
            before + later + leaving(index),
        ]
        peak = max(peak, *at_once)
    return peak

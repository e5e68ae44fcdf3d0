"""How long a collective takes: latency and bandwidth of the links that its group crosses."""

import math

from meshwright.layout import Layout
from meshwright.plan.cost.hardware import Hardware

__all__ = ["collective_seconds"]

REACHED = 0.8
"""Share of a link's bandwidth that collectives of many megabytes reach: assumed."""


def _group(layout: Layout, axis: str) -> tuple[int, int]:
    """Return the size of a group, and the distance between two neighbours in it, both in ranks.

    Of several axes, as in ``dp_shard_cp x tp``, they are those of one axis behind the other.
    """
    if " x " in axis:
        both = [_group(layout, one) for one in axis.split(" x ")]
        return math.prod(size for size, _ in both), min(distance for _, distance in both)
    data = layout.size("tp") * layout.size("cp")
    inner = {"tp": 1, "cp": layout.size("tp"), "dp_shard_cp": layout.size("tp"), "ep": 1, "ep_shard": layout.ep}
    model = data * layout.size("dp_shard")
    distances = {**inner, "dp": data, "dp_replicate": model, "pp": model * layout.size("dp_replicate")}
    size = {"ep": layout.ep, "ep_shard": layout.ep_shard}.get(axis) or layout.size(axis)
    return size, distances[axis]


def collective_seconds(layout: Layout, hardware: Hardware, axis: str, kind: str, calls: float, size: float) -> float:
    """Return the seconds of some collectives of one kind over one axis, one after the other.

    A ring moves (n - 1) / n of the larger buffer through each rank; an all-reduce does it twice. Between nodes, the ranks of a
    node share the bandwidth of all its network cards. Latency grows with the logarithm of the group's size.

    Args:
        layout: whose groups.
        hardware: the devices and their links.
        axis: mesh axis.
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` or ``send``.
        calls: number of calls.
        size: bytes of the larger buffers of all calls together.
    """
    ranks, distance = layout.once(_group, axis)
    if ranks < 2 or not calls:
        return 0.0
    together = max(1, min(ranks, hardware.gpus_per_node // distance))  # ranks of the group in one node
    if ranks <= together:
        bandwidth, latency = hardware.link_gb_s, hardware.link_us
    else:
        cards = 1 if kind in ("all_to_all", "send") else together
        bandwidth, latency = min(hardware.link_gb_s, cards * hardware.nic_gb_s), hardware.nic_us
    times = {"all_reduce": 2.0, "send": ranks / (ranks - 1)}.get(kind, 1.0)
    moved = size * (ranks - 1) / ranks * times
    steps = 1.0 if kind == "send" else math.log2(ranks) * times
    return calls * steps * latency * 1e-6 + moved / (REACHED * bandwidth * 1e9)

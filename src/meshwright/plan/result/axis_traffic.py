"""A kind of collectives over an axis, as the plan counts it."""

from dataclasses import dataclass

__all__ = ["AxisTraffic"]


@dataclass(frozen=True)
class AxisTraffic:
    """The collectives of one kind over one axis in one optimizer step, on one rank.

    Attributes:
        axis: ``pp``, ``tp``, ``cp`` or ``ep``; ``dp`` for what an objective gathers; of an update also those of shards.
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all`` or ``send``.
        calls: number of calls.
        size: bytes of the larger buffer of each call, added up; ``None`` if the plan does not know the batch. If tokens are
            routed, the load is assumed to be balanced.
    """

    axis: str
    kind: str
    calls: int
    size: int | None

"""Shuffling that is the same on every machine, for every layout and every version of numpy.

numpy does not promise the same random streams across versions, so the order is that of a hash: splitmix64 (Steele, Lea, Flood:
Fast splittable pseudorandom number generators, OOPSLA 2014).
"""

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["stable_choice", "stable_hash", "stable_permutation"]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the output function of splitmix64; unsigned arithmetic wraps, as it must."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def stable_hash(count: int, *keys: int) -> npt.NDArray[np.uint64]:
    """Return a 64-bit hash of every index below `count`, for the given keys (seed, epoch, purpose)."""
    state = np.zeros(1, dtype=np.uint64)
    for key in keys:
        state = _mix(state + np.uint64((key * _GOLDEN + _GOLDEN) & _MASK))
    return _mix(state + (np.arange(count, dtype=np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN))


def stable_permutation(count: int, *keys: int) -> npt.NDArray[np.int64]:
    """Return a permutation of `range(count)` that depends only on the keys."""
    return np.argsort(stable_hash(count, *keys), kind="stable").astype(np.int64)


def stable_choice(share: float, together: Sequence[Hashable], *keys: int) -> npt.NDArray[np.bool_]:
    """Choose about a share of some items by the order of a hash, at least one and not all; of one alone none.

    Items that belong together are chosen together. So a share is exact where each is by itself (``range(count)``). Else it may
    be larger by what belongs to the last one that is chosen, or smaller where more would be all.

    Args:
        share: above 0, below 1.
        together: for each item, what it belongs to.
        keys: the choice depends only on them, and on ``together``.
    """
    count = len(together)
    chosen, wanted = np.zeros(count, dtype=np.bool_), min(max(1, round(share * count)), count - 1)
    order = np.argsort(stable_hash(count, *keys), kind="stable")
    if isinstance(together, range):
        chosen[order[: max(0, wanted)]] = True
        return chosen
    places: dict[Hashable, list[int]] = {}
    for place, one in enumerate(together):
        places.setdefault(one, []).append(place)
    taken = 0
    for own in dict.fromkeys(together[place] for place in order):
        if taken < wanted and taken + len(places[own]) < count:
            chosen[places[own]] = True
            taken += len(places[own])
    return chosen

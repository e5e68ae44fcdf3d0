"""Shuffling that is the same on every machine, for every layout and every version of numpy.

numpy does not promise the same random streams across versions, so the order is that of a hash: splitmix64 (Steele, Lea, Flood:
Fast splittable pseudorandom number generators, OOPSLA 2014).
"""

import numpy as np
import numpy.typing as npt

__all__ = ["stable_hash", "stable_permutation"]

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

"""Finds the best layouts: branches in the order of their bounds, until no bound is below the worst of the best few.

A branch is a layout with a size of microbatches. Of each, the fastest candidate that fits is looked for. A candidate is
priced only if its bounds are within the device's memory, below the time of the best candidate of its layout, and below that
of the last of the best layouts. So the best few are those that pricing all would give, as long as the bounds hold, and but
for two rules that are no bounds. Larger ``cp`` is left out if the best candidate without it recomputes nothing for lack of
room. As long as nothing fits, one schedule or method of ``cp`` of a branch is left out if its leanest candidate does not fit.
The configuration as it is takes part, whether the space has it or not.
"""

import time
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.plan.cost.hardware import Hardware
from meshwright.plan.given.closed_choices import ActivationCheckpointing, SyncPolicy
from meshwright.search.bounds import Bounds
from meshwright.search.candidate_price import Price, Pricer
from meshwright.search.space import Branch, Candidate, Space
from meshwright.trace.changes import KEPT_FIRST

__all__ = ["Found", "Tally", "find_best"]

MOST = 5
"""Layouts that are looked for."""

TOLD = 10
"""Candidates after which the search says how far it is."""

CLEARLY = 1.05
"""Times the memory of a device: as long as nothing fits, the leanest candidate of each way to run a branch is tried first, and
if it needs more than that, no other one is."""

NEAREST = 8
"""Candidates that are remembered in case that nothing fits: of those with the least bounds some may be refused."""

_Bounded = tuple[float, int, Candidate]
"""A candidate after its bound and its place in its branch."""


@dataclass
class Tally:
    """What became of the candidates of a space.

    Attributes:
        candidates: all of them.
        too_large: cut, because the bound of their memory is above that of the device.
        too_slow: cut, because the bound of their time is above what was found.
        refused: refused by the plan, or not traceable; with those whose slices are refused.
        priced: priced in full.
        do_not_fit: of these, those that do not fit.
        traces: traces that were made, and not found in the cache.
        seconds: how long the search took.
        codes: code of a refusal to how many candidates had it.
    """

    candidates: int = 0
    too_large: int = 0
    too_slow: int = 0
    refused: int = 0
    priced: int = 0
    do_not_fit: int = 0
    traces: int = 0
    seconds: float = 0.0
    codes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """The outcome of a search.

    Attributes:
        best: the fastest candidate of each of the best layouts that fit, the fastest first.
        front: of all that were priced and fit, those than which no other is both faster and smaller; the fastest first.
        tally: what became of all candidates.
        smallest: if nothing fits, what came nearest; otherwise ``None``.
    """

    best: tuple[Price, ...]
    front: tuple[Price, ...]
    tally: Tally
    smallest: Price | None = None


def find_best(
    space: Space,
    hardware: Hardware,
    pricer: Pricer,
    most: int = MOST,
    say: Callable[[str], None] = lambda line: None,
    own: Price | None = None,
) -> Found:
    """Return the best candidates of a space.

    Args:
        space: the layouts and choices.
        hardware: the devices.
        pricer: prices candidates.
        most: number of layouts to return.
        say: called with a line now and then.
        own: the configuration as it is, which is found too if it fits, although the space may lack some of its values.
    """
    return _Search(space, hardware, pricer, most, say).run(own)


class _Search:
    def __init__(self, space: Space, hardware: Hardware, pricer: Pricer, most: int, say: Callable[[str], None]) -> None:
        self.space, self.hardware, self.pricer, self.most, self.say = space, hardware, pricer, most, say
        self.bounds, self.tally = Bounds(space.setup, hardware, pricer.store), Tally()
        self.best: dict[object, Price] = {}
        self.priced: list[Price] = []
        self.smallest: Price | None = None
        self.nearest: list[tuple[float, Candidate]] = []
        self.too_large: dict[object, list[Candidate]] = {}
        self.made = pricer.store.made

    def run(self, own: Price | None) -> Found:
        begun = time.monotonic()
        if own is not None and own.verdict.fits:
            self._found(own)
        else:
            self.smallest = own
        branches = list(self.space.branches())
        self.tally.candidates = sum(branch.size for branch in branches)
        self.say(
            f"{self.tally.candidates:,} candidates; the first search of a model makes traces for some minutes, and keeps them"
        )
        least = min((branch.layout.size("cp") for branch in branches), default=1)
        self._look_at([branch for branch in branches if branch.layout.size("cp") == least])
        others = [branch for branch in branches if branch.layout.size("cp") > least]
        if self._nothing_to_gain(least):
            self.tally.too_slow += sum(branch.size for branch in others)
        else:
            self._look_at(others)
        self.tally.codes = dict(self.pricer.refusals)
        best = sorted(self.best.values(), key=lambda price: price.seconds)[: self.most]
        smallest = None if best else self._came_nearest()
        self.tally.seconds = time.monotonic() - begun
        self.tally.traces = self.pricer.store.made - self.made
        return Found(tuple(best), tuple(front_of(self.priced)), self.tally, smallest)

    def _look_at(self, branches: Sequence[Branch]) -> None:
        """Look into branches in the order of their bounds."""
        bounds = sorted((self.bounds.seconds(branch), number) for number, branch in enumerate(branches))
        for place, (bound, number) in enumerate(bounds):
            if bound >= self._slowest():
                self.tally.too_slow += sum(branches[number].size for _, number in bounds[place:])
                return
            self._look_into(branches[number])

    def _nothing_to_gain(self, least: int) -> bool:
        """Return whether more ranks for a sequence than the least cannot help: they send and copy more, and hold fewer
        activations.

        So they win only where the best candidate recomputes or offloads for lack of room, and need not.
        """
        without = [price for price in self.best.values() if price.candidate.layout.size("cp") == least]
        if not without:
            return False
        best = min(without, key=lambda price: price.seconds)
        options, free = best.setup.plan.options, self.space.free
        recomputes = options.activation_checkpointing is not ActivationCheckpointing.NONE and _MODE in free
        return not recomputes and not (options.cpu_offload and _OFFLOAD in free)

    def _slowest(self) -> float:
        """Return the time from which on a candidate is of no interest."""
        times = sorted(price.seconds for price in self.best.values())
        return times[self.most - 1] if len(times) >= self.most else float("inf")

    def _look_into(self, branch: Branch) -> None:
        """Find the fastest candidate of a branch that fits."""
        candidates = list(branch.candidates())
        self.tally.refused += branch.size - len(candidates)
        kept: list[_Bounded] = []
        for number, candidate in enumerate(candidates):
            if self.bounds.refused(branch, candidate):
                self.tally.refused += 1
            elif (needed := self.bounds.bytes(branch, candidate)) > self.bounds.limit:
                self.tally.too_large += 1
                self._missed(needed, candidate)
            else:
                kept.append((self.bounds.seconds(branch, candidate), number, candidate))
        kept, fitting = self._lean_first(branch, kept)
        kept.sort()
        for place, (bound, _, candidate) in enumerate(kept):
            own = self.best.get(branch.layout)
            slowest = min(self._slowest(), own.seconds if own else float("inf"))
            if bound >= slowest:
                self.tally.too_slow += len(kept) - place
                return
            if any(never_smaller(candidate, other) for other in self.too_large.get(_slicing(candidate), ())):
                self.tally.too_large += 1
            elif (
                any(never_faster(candidate, other) for other in fitting)
                or self.bounds.seconds(branch, candidate, measured=True) >= slowest
            ):
                self.tally.too_slow += 1
            elif self._try(branch, candidate)[1] is not None:
                fitting.append(candidate)

    def _lean_first(self, branch: Branch, kept: list[_Bounded]) -> tuple[list[_Bounded], list[Candidate]]:
        """As long as nothing fits, try the leanest candidate of each way to run a branch. Return the others that may fit, and
        what was tried and fits.
        """
        ways: dict[tuple[Any, ...], list[_Bounded]] = {}
        for one in kept:
            ways.setdefault(tuple(value for key, value in one[2].values if key in _WAYS), []).append(one)
        others: list[_Bounded] = []
        fitting: list[Candidate] = []
        for own in ways.values():
            if not self.best:
                leanest = min(own, key=lambda one: self._lean(branch, one[2]))
                own.remove(leanest)
                needed, price = self._try(branch, leanest[2])
                fitting += [leanest[2]] if price is not None else []
                if needed > CLEARLY * self.bounds.limit:
                    self.tally.too_large += len(own)
                    continue
            others += own
        return others, fitting

    def _lean(self, branch: Branch, candidate: Candidate) -> tuple[bool, float, int]:
        """Return by what candidates are ordered so that the leanest is first. Of an open policy little is known."""
        open_policy = dict(candidate.values).get(_SYNC, SyncPolicy.REDUCE_EACH) is None
        return open_policy, self.bounds.bytes(branch, candidate), -_lateness(candidate)

    def _try(self, branch: Branch, candidate: Candidate) -> tuple[float, Price | None]:
        """Plan a candidate, and price it if it may fit.

        Return its peak, or the bound of it if that is too much, or 0 if it is refused; and its price if it fits.
        """
        setup = self.pricer.setup_of(candidate)
        needed = 0.0 if setup is None else self.bounds.bytes_in_stages(branch, candidate, setup)
        if needed > self.bounds.limit:
            self.tally.too_large += 1
            self.too_large.setdefault(_slicing(candidate), []).append(candidate)
            self._missed(needed, candidate)
            return needed, None
        price = None if setup is None else self.pricer.price(candidate, setup)
        if price is None:
            self.tally.refused += 1
            return 0.0, None
        self.tally.priced += 1
        if self.tally.priced % TOLD == 0:
            self.say(f"{self.tally.priced} candidates priced, {self.pricer.store.made - self.made} traces made")
        if not price.verdict.fits:
            self.tally.do_not_fit += 1
            self.too_large.setdefault(_slicing(candidate), []).append(candidate)
            if self.smallest is None or price.verdict.peak_bytes < self.smallest.verdict.peak_bytes:
                self.smallest = price
            return price.verdict.peak_bytes, None
        self._found(price)
        return price.verdict.peak_bytes, price

    def _found(self, price: Price) -> None:
        """Count a candidate that fits."""
        self.priced.append(price)
        other = self.best.get(price.candidate.layout)
        if other is None or price.seconds < other.seconds:
            self.best[price.candidate.layout] = price

    def _missed(self, needed: float, candidate: Candidate) -> None:
        """Remember a candidate that was cut by a bound of its memory, if few have a lower one."""
        if not self.best and (len(self.nearest) < NEAREST or needed < self.nearest[-1][0]):
            insort(self.nearest, (needed, candidate), key=lambda one: one[0])
            del self.nearest[NEAREST:]

    def _came_nearest(self) -> Price | None:
        """Return what needs the least memory. Of those that were cut by bounds, the ones with the least are priced."""
        smallest = self.smallest
        for needed, candidate in self.nearest:
            if smallest is not None and needed >= smallest.verdict.peak_bytes:
                break
            price = self.pricer.price(candidate)
            if price is not None and (smallest is None or price.verdict.peak_bytes < smallest.verdict.peak_bytes):
                smallest = price
        return smallest


_MODE, _SYNC, _OFFLOAD = "parallel.activation_checkpointing", "parallel.sync", "parallel.cpu_offload"
_ROWS, _COMPILE = "training.microbatch_size", "parallel.compile"

_WAYS = ("parallel.pipeline.schedule", "parallel.pipeline.stages_per_rank", "parallel.context_parallel")
"""Choices that the bound of memory without a plan may rank wrongly."""

_FASTER_FIRST: dict[str, tuple[Any, ...]] = {
    _COMPILE: (True, False), _MODE: KEPT_FIRST, _SYNC: tuple(SyncPolicy), _OFFLOAD: (False, True)
}  # fmt: skip
"""Choices that trade time for memory: each value is never faster than those before it."""

_SMALLER_LAST = {**_FASTER_FIRST, _COMPILE: (False, True), _MODE: KEPT_FIRST[:2]}
"""Choices of which each holds at least what those after it hold. Of other modes of recomputation, nothing is known before."""


def _lateness(candidate: Candidate) -> int:
    """Return how far a candidate goes with the choices that trade time for memory."""
    return sum(_FASTER_FIRST[key].index(value) for key, value in candidate.values if value in _FASTER_FIRST.get(key, ()))


def never_faster(candidate: Candidate, than: Candidate) -> bool:
    """Return whether a candidate can be told never to be faster than another one of its branch, without prices."""
    for (key, value), (_, other) in zip(candidate.values, than.values, strict=True):
        order = _FASTER_FIRST.get(key, ())
        later = value in order and other in order and order.index(value) > order.index(other)
        if value != other and not later:
            return False
    return True


def _slicing(candidate: Candidate) -> tuple[int, ...]:
    """Return the sizes that two layouts must share so that the number of shards says which rank holds more."""
    layout = candidate.layout
    return (layout.size("pp"), layout.size("cp"), layout.size("tp"), layout.ep)


def never_smaller(candidate: Candidate, than: Candidate) -> bool:
    """Return whether a candidate with the same slices can be told never to hold less than another one, without prices."""
    if candidate.layout.size("dp_shard") > than.layout.size("dp_shard"):
        return False
    values, others = dict(candidate.values), dict(than.values)
    for key in values.keys() | others.keys():
        value, other = values.get(key), others.get(key)
        order: tuple[Any, ...] = _SMALLER_LAST.get(key, ())
        if key == _ROWS:
            smaller = value < other  # type: ignore[operator]
        elif value in order and other in order:
            smaller = order.index(value) > order.index(other)
        else:
            smaller = value != other
        if smaller:
            return False
    return True


def front_of(prices: list[Price]) -> list[Price]:
    """Return the prices than which no other is both faster and smaller, the fastest first."""
    found: list[Price] = []
    for price in sorted(prices, key=lambda one: (one.seconds, one.verdict.peak_bytes)):
        if not found or price.verdict.peak_bytes < found[-1].verdict.peak_bytes:
            found.append(price)
    return found

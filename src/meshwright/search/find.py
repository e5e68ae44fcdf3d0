"""Finds the best layouts: branches in the order of their bounds, until no bound is below the worst of the best few.

A branch is a layout with a size of microbatches. Of each, the fastest candidate that fits is looked for. A candidate is priced
only if its bounds are within the device's memory, below the time of the best candidate of its branch, and below that of the
last of the best layouts. So the best few are those that pricing all would give, as long as the bounds hold.
"""

import heapq
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from meshwright.plan.cost.hardware import Hardware
from meshwright.search.bounds import Bounds
from meshwright.search.candidate_price import Price, Pricer
from meshwright.search.space import Branch, Candidate, Space

__all__ = ["Found", "Tally", "find_best"]

MOST = 8
"""Layouts that are looked for; fewer are shown."""


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
    codes: Counter[str] = field(default_factory=Counter)


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
    space: Space, hardware: Hardware, pricer: Pricer, most: int = MOST, say: Callable[[str], None] = lambda line: None
) -> Found:
    """Return the best candidates of a space.

    Args:
        space: the layouts and choices.
        hardware: the devices.
        pricer: prices candidates.
        most: number of layouts to return.
        say: called with a line now and then.
    """
    return _Search(space, hardware, pricer, most, say).run()


class _Search:
    def __init__(self, space: Space, hardware: Hardware, pricer: Pricer, most: int, say: Callable[[str], None]) -> None:
        self.space, self.hardware, self.pricer, self.most, self.say = space, hardware, pricer, most, say
        self.bounds, self.tally = Bounds(space.setup, hardware, pricer.store), Tally()
        self.limit = hardware.memory_gib * 2**30
        self.best: dict[object, Price] = {}
        self.priced: list[Price] = []
        self.smallest: Price | None = None

    def run(self) -> Found:
        begun, made = time.monotonic(), self.pricer.store.made
        number = count()
        order: list[tuple[float, int, Branch]] = []
        for branch in self.space.branches():
            self.tally.candidates += branch.size
            heapq.heappush(order, (self.bounds.seconds(branch), next(number), branch))
        while order:
            bound, _, branch = heapq.heappop(order)
            if bound >= self._slowest():
                self.tally.too_slow += branch.size + sum(other.size for _, _, other in order)
                break
            self._look_into(branch)
        self.tally.seconds = time.monotonic() - begun
        self.tally.traces = self.pricer.store.made - made
        self.tally.codes = Counter(self.pricer.refusals)
        best = sorted(self.best.values(), key=lambda price: price.seconds)[: self.most]
        return Found(tuple(best), tuple(front_of(self.priced)), self.tally, None if best else self.smallest)

    def _slowest(self) -> float:
        """Return the time of the last of the best layouts."""
        times = sorted(price.seconds for price in self.best.values())
        return times[self.most - 1] if len(times) >= self.most else float("inf")

    def _look_into(self, branch: Branch) -> None:
        """Find the fastest candidate of a branch that fits."""
        candidates = list(branch.candidates())
        self.tally.refused += branch.size - len(candidates)
        kept: list[tuple[float, int, Candidate]] = []
        for number, candidate in enumerate(candidates):
            if self.bounds.refused(branch, candidate):
                self.tally.refused += 1
            elif self.bounds.bytes(branch, candidate) > self.limit:
                self.tally.too_large += 1
            else:
                kept.append((self.bounds.seconds(branch, candidate), number, candidate))
        kept.sort()
        for place, (bound, _, candidate) in enumerate(kept):
            own = self.best.get(branch.layout)
            if bound >= min(self._slowest(), own.seconds if own else float("inf")):
                self.tally.too_slow += len(kept) - place
                return
            self._price(candidate)

    def _price(self, candidate: Candidate) -> None:
        price = self.pricer.price(candidate)
        if price is None:
            self.tally.refused += 1
            return
        self.tally.priced += 1
        if not price.verdict.fits:
            self.tally.do_not_fit += 1
            if self.smallest is None or price.verdict.peak_bytes < self.smallest.verdict.peak_bytes:
                self.smallest = price
            return
        self.priced.append(price)
        own = self.best.get(candidate.layout)
        if own is None or price.seconds < own.seconds:
            self.best[candidate.layout] = price


def front_of(prices: list[Price]) -> list[Price]:
    """Return the prices than which no other is both faster and smaller, the fastest first."""
    found: list[Price] = []
    for price in sorted(prices, key=lambda one: (one.seconds, one.verdict.peak_bytes)):
        if not found or price.verdict.peak_bytes < found[-1].verdict.peak_bytes:
            found.append(price)
    return found

"""A replay of FSDP2: which seconds of the collectives over data ranks compute hides.

The microbatches of a step are replayed. There are two lines of time: what computes, and the communicator of the data ranks,
which carries out one call after another.

- Forward: the host runs ahead, so a unit's gather is called as soon as that of the unit before it. It begins when what was
  gathered two units before is in use, because its buffer is freed then. So the gather of the root, and that of the first layer,
  have nothing to hide behind.
- Backward: when a unit begins, it calls the gather of the next one, where that is gathered again. When it has ended, it waits
  for the reduction of the unit before it, whose buffer is freed, and calls its own. At the end all reductions are waited for.
  So those of the first layer and of the root have nothing to hide behind either.
- The all-reduce over replicas follows the reduction, over a communicator of its own.

Once a microbatch takes as long as the one before it, those that follow but the last are counted and not replayed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from meshwright.plan.axes.data.prefetch import layer_groups
from meshwright.plan.axes.data.unit_traffic import unit_traffic
from meshwright.plan.given.closed_choices import SyncPolicy
from meshwright.plan.result.sharding_plan import ShardingPlan, UnitRow, shard_axis

__all__ = ["HEAD", "Price", "Recording", "Turn", "exposed_share"]

HEAD = "head and loss"
"""Name of what is computed outside of the layers."""

SAME = 1e-9
"""Times that differ by no more than this share of a microbatch are the same."""

Price = Callable[[str, str, int], float]
"""Seconds of a collective, by axis, kind, and bytes."""


@dataclass(frozen=True)
class Turn:
    """Seconds in which a layer, or a unit outside of the layers, keeps the device busy in a microbatch."""

    forward: float
    backward: float


@dataclass
class Recording:
    """What a replay did, in order; filled in by it. Times are in seconds, from the begin of the first microbatch on.

    Attributes:
        spent: (what, busy, begin, end) of the line that computes: units, and what it waited for.
        calls: (kind of collective, unit, begin, end).
        phases: (microbatch, whether it is forward, begin, end).
    """

    spent: list[tuple[str, bool, float, float]] = field(default_factory=list)
    calls: list[tuple[str, str, float, float]] = field(default_factory=list)
    phases: list[tuple[int, bool, float, float]] = field(default_factory=list)


def exposed_share(
    plan: ShardingPlan, turns: Mapping[str, Turn], rest: float, price: Price, recording: Recording | None = None
) -> float:
    """Return the share of the seconds of FSDP2's collectives in an optimizer step that nothing hides; 1 if there are none.

    Args:
        plan: the plan, or its part on one stage.
        turns: the layers by name; units outside of them take no time of their own.
        rest: seconds of what is outside of the layers in a microbatch. All of it counts as the head's: a third is forward.
        price: seconds of a collective.
        recording: where what happens when is written; ``None``: nowhere.
    """
    prices = {unit.name: _Prices.of(plan, unit, price) for unit in plan.fsdp_units}
    line = _Line(prices, plan.options.all_reduce_once, recording)
    groups, microbatches = layer_groups(plan.shared), plan.options.microbatches
    order = [(unit, part) for turn in groups.turns for unit, part in _parts(turn, turns)]
    index = 0
    while index < microbatches:
        last, before = index + 1 == microbatches, line.times
        line.forward([(unit, 0.0) for unit in groups.around] + [(unit, part.forward) for unit, part in order])
        line.compute(rest / 3, HEAD)
        turned = line.now
        line.backward([(unit, part.backward) for unit, part in reversed(order)], groups.around, 2 * rest / 3, last)
        if recording is not None:
            recording.phases += [(index, True, before["now"], turned), (index, False, turned, line.now)]
        elif not last and before["now"] > 0:
            index += line.repeat(microbatches - 2 - index, before)
        index += 1
    busy = microbatches * (rest + sum(part.forward + part.backward for _, part in order))
    return (line.now - busy) / line.called if line.called else 1.0


def _parts(turn: Sequence[UnitRow], turns: Mapping[str, Turn]) -> list[tuple[UnitRow, Turn]]:
    """Share the time of a turn evenly among its units."""
    whole = turns.get(turn[0].name, Turn(0.0, 0.0))
    return [(unit, Turn(whole.forward / len(turn), whole.backward / len(turn))) for unit in turn]


@dataclass(frozen=True)
class _Prices:
    """Seconds of each collective of a unit; ``None``: it has none."""

    gather: float | None
    scatter: float | None
    replicate: float | None

    @classmethod
    def of(cls, plan: ShardingPlan, unit: UnitRow, price: Price) -> "_Prices":
        traffic, axis = unit_traffic(plan, unit), shard_axis(plan.layout, unit.kind)

        def one(axis: str, kind: str, calls: int, size: int) -> float | None:
            return price(axis, kind, size // calls) if calls else None

        return cls(
            one(axis, "all_gather", traffic.all_gathers, traffic.all_gather_bytes),
            one(axis, "reduce_scatter", traffic.reduce_scatters, traffic.reduce_scatter_bytes),
            one("dp_replicate", "all_reduce", traffic.all_reduces, traffic.all_reduce_bytes),
        )


@dataclass
class _Line:
    """The state of a replay, in seconds.

    Attributes:
        prices: of the collectives of units, by name.
        all_reduce_once: whether replicas are reduced in the last microbatch only.
        recording: where it is written what happens when.
        now: until when what computes is busy.
        called: seconds of all collectives so far.
        gathering: until when the communicator is busy.
        replicating: the same of that of the replicas.
        scattered: when the latest reduce-scatter ends.
        reduced: when all reductions end.
        freed: before which no gather begins, because its buffer is in use.
        in_use: when the latest unit of forward was first used.
        gathered: units that are gathered, or will be, and when.
        awaited: those of them that nothing has waited for yet.
    """

    prices: Mapping[str, _Prices]
    all_reduce_once: bool
    recording: Recording | None = None
    now: float = 0.0
    called: float = 0.0
    gathering: float = 0.0
    replicating: float = 0.0
    scattered: float = 0.0
    reduced: float = 0.0
    freed: float = 0.0
    in_use: float = 0.0
    gathered: dict[str, float] = field(default_factory=dict)
    awaited: dict[str, float] = field(default_factory=dict)

    @property
    def times(self) -> dict[str, float]:
        """All that is a time, between two microbatches; what is only gathered does not count."""
        state = {name: value for name, value in vars(self).items() if isinstance(value, float)}
        return {**state, **{f"gather of {name}": end for name, end in self.awaited.items()}}

    def repeat(self, times: int, before: Mapping[str, float]) -> int:
        """Let as many microbatches pass as the latest one, if they take the same; return how many passed.

        They do if each time moved on as the line that computes did, or stayed where it was.
        """
        after = self.times
        moved = {name: end - before.get(name, 0.0) for name, end in after.items()}
        passed = moved["now"]
        alike = (
            abs(moved[name]) <= SAME * passed or abs(moved[name] - passed) <= SAME * passed
            for name in moved
            if name != "called"
        )
        if before.keys() != after.keys() or not all(alike):
            return 0
        for name, by in moved.items():
            if name in vars(self):
                setattr(self, name, after[name] + times * by)
            else:
                self.awaited[name.removeprefix("gather of ")] += times * by
        return times

    def compute(self, seconds: float, what: str) -> None:
        if self.recording is not None and seconds > 0:
            self.recording.spent.append((what, True, self.now, self.now + seconds))
        self.now += seconds

    def _until(self, end: float, what: str) -> None:
        if self.recording is not None and end > self.now:
            self.recording.spent.append((what, False, self.now, end))
        self.now = max(self.now, end)

    def forward(self, order: Sequence[tuple[UnitRow, float]]) -> None:
        for unit, seconds in order:
            self._gather(unit)
            if self._wait(unit):
                self.freed, self.in_use = max(self.freed, self.in_use), self.now
            self.compute(seconds, unit.name)
            if unit.reshard_after_forward and unit.sync is not SyncPolicy.DEFER:
                self.gathered.pop(unit.name, None)

    def backward(self, order: Sequence[tuple[UnitRow, float]], around: Sequence[UnitRow], rest: float, last: bool) -> None:
        again = [(unit, seconds) for unit, seconds in order if unit.gathers_in_backward]
        following = {unit.name: after for (unit, _), (after, _) in pairwise(again)}
        for unit in around:
            self._gather(unit)
            self._freed_at_once(unit)
        if again:
            self._gather(again[0][0])
        self.compute(rest, HEAD)
        for unit, seconds in order:
            if unit.gathers_in_backward:
                self._gather(unit)
                self._freed_at_once(unit)
                if unit.name in following:
                    self._gather(following[unit.name])
            self.compute(seconds, unit.name)
            self._reduce(unit, last)
        for unit in around:
            self._reduce(unit, last)
        self._until(self.reduced, "reductions")

    def _gather(self, unit: UnitRow) -> None:
        seconds = self.prices[unit.name].gather
        if unit.name not in self.gathered and seconds is not None:
            self.gathering = self._call(self.gathering, self.freed, seconds, "all_gather", unit)
            self.gathered[unit.name] = self.awaited[unit.name] = self.gathering

    def _wait(self, unit: UnitRow) -> bool:
        """Wait for a unit; return whether it was called since it was last waited for."""
        called = self.awaited.pop(unit.name, None)
        if called is not None and called > self.now:
            self._until(called, f"gather of {unit.label}")
        return called is not None

    def _freed_at_once(self, unit: UnitRow) -> None:
        if self._wait(unit):
            self.freed = max(self.freed, self.now)

    def _reduce(self, unit: UnitRow, last: bool) -> None:
        if last or unit.sync is not SyncPolicy.DEFER:
            self.gathered.pop(unit.name, None)
        if not last and unit.sync is not SyncPolicy.REDUCE_EACH:
            return
        prices = self.prices[unit.name]
        if prices.scatter is not None:
            self._until(self.scattered, "reduction before")
            self.gathering = self.scattered = self._call(self.gathering, self.now, prices.scatter, "reduce_scatter", unit)
            self.reduced = max(self.reduced, self.scattered)
        if prices.replicate is not None and (last or not self.all_reduce_once):
            begin = self.now if prices.scatter is None else self.scattered
            self.replicating = self._call(self.replicating, begin, prices.replicate, "all_reduce", unit)
            self.reduced = max(self.reduced, self.replicating)

    def _call(self, free: float, after: float, seconds: float, kind: str, unit: UnitRow) -> float:
        self.called += seconds
        begin = max(free, after)
        if self.recording is not None:
            self.recording.calls.append((kind, unit.label, begin, begin + seconds))
        return begin + seconds

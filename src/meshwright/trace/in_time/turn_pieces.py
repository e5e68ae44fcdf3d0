"""What a microbatch on a stage is made of, from a replay of FSDP2: compute, collectives inside of it, waits for data ranks."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.plan.axes.pipeline.schedule_turns import Phase
from meshwright.trace.in_time.fsdp_replay import Recording

__all__ = ["Fill", "Piece", "Turned", "turn_pieces", "turned"]


@dataclass(frozen=True)
class Segment:
    """A part of the line that computes, in the time of the replay.

    Attributes:
        name: the unit that computes, or what is waited for.
        busy: whether it computes.
        begin: when it begins.
        end: when it ends.
        beside: seconds of it in which a collective over data ranks runs too.
        inside: seconds of it that are collectives over other axes.
    """

    name: str
    busy: bool
    begin: float
    end: float
    beside: float = 0.0
    inside: float = 0.0

    @property
    def length(self) -> float:
        """How long it takes."""
        return self.end - self.begin


@dataclass(frozen=True)
class Turned:
    """A forward or backward of a microbatch on a stage.

    Attributes:
        segments: its parts, without gaps.
        calls: (kind of collective, unit, begin, end) of what is called in it.
        slow: seconds by which a second beside a collective takes longer.
        waits: by what waits are scaled.
    """

    segments: tuple[Segment, ...]
    calls: tuple[tuple[str, str, float, float], ...]
    slow: float
    waits: float

    @property
    def busy(self) -> float:
        """Seconds in which it computes, collectives inside of it included."""
        return sum(one.length for one in self.segments if one.busy)

    @property
    def inside(self) -> float:
        """Seconds of collectives inside of it."""
        return sum(one.inside for one in self.segments)

    @property
    def added(self) -> float:
        """Seconds that data ranks add to it."""
        return sum(self.slow * one.beside if one.busy else self.waits * one.length for one in self.segments)

    def of(self, phase: Phase) -> "Turned":
        """Return what of it a phase of a schedule has: collectives of data ranks are in the half of backward for weights."""
        if phase is not Phase.INPUT:
            return self
        return replace(self, segments=tuple(one for one in self.segments if one.busy), calls=(), slow=0.0)


def turned(recording: Recording, exposed: float, inside: Mapping[str, float], *, fine: bool) -> dict[tuple[int, bool], Turned]:
    """Cut a replay into microbatches.

    Args:
        recording: what the replay did.
        exposed: seconds of its collectives that the forecast says are not hidden.
        inside: seconds of collectives inside of the turn of a unit, by its name.
        fine: whether to tell layers apart.

    Returns:
        Number of the microbatch and whether it is forward, to what it is made of, in the order of the replay.
    """
    busy = [span for span in recording.spent if span[1]]
    beside = dict(zip((span[2] for span in busy), _beside(busy, recording.calls), strict=True))
    waited, ran = sum(end - begin for _, own, begin, end in recording.spent if not own), sum(beside.values())
    left = exposed - waited
    waits = 1.0 if left >= 0 else exposed / waited
    slow = max(0.0, left) / ran if ran > 0 else 0.0
    starts = [begin for _, _, begin, _ in recording.phases]
    segments: dict[int, list[Segment]] = {place: [] for place in range(len(starts))}
    calls: dict[int, list[tuple[str, str, float, float]]] = {place: [] for place in range(len(starts))}
    for name, own, begin, end in recording.spent:
        of = inside.get(name, 0.0) if own else 0.0
        segments[bisect_right(starts, begin) - 1].append(Segment(name, own, begin, end, beside[begin] if own else 0.0, of))
    for call in recording.calls:
        calls[max(0, bisect_right(starts, call[2]) - 1)].append(call)
    found = {}
    for place, (microbatch, forward, _, end) in enumerate(recording.phases):
        own_segments = segments[place] if fine else list(_together(segments[place]))
        if left > 0 and not ran and place + 1 == len(starts):  # nothing runs beside anything
            own_segments.append(Segment("collectives", False, end, end + left))
        found[microbatch, forward] = Turned(tuple(own_segments), tuple(calls[place]), slow, waits)
    return found


def _together(segments: Sequence[Segment]) -> Iterator[Segment]:
    """Yield what computes as one segment, and what waits as one."""
    for busy in (True, False):
        own = [one for one in segments if one.busy is busy]
        if own:
            begin = segments[0].begin if busy else segments[-1].end - sum(one.length for one in own)
            end = begin + sum(one.length for one in own)
            name = "all layers" if busy else "data ranks"
            yield Segment(name, busy, begin, end, sum(one.beside for one in own), sum(one.inside for one in own))


def _beside(busy: Sequence[tuple[str, bool, float, float]], calls: Sequence[tuple[str, str, float, float]]) -> Iterator[float]:
    """Yield, of each busy span, the seconds in which at least one collective runs."""
    running: list[list[float]] = []
    for _, _, begin, end in sorted(calls, key=lambda call: call[2]):
        if running and begin <= running[-1][1]:
            running[-1][1] = max(running[-1][1], end)
        else:
            running.append([begin, end])
    first = 0
    for _, _, begin, end in busy:
        while first < len(running) and running[first][1] <= begin:
            first += 1
        total, place = 0.0, first
        while place < len(running) and running[place][0] < end:
            total += min(end, running[place][1]) - max(begin, running[place][0])
            place += 1
        yield total


@dataclass(frozen=True)
class Piece:
    """A segment as it is drawn: compute, what slows it down, collectives inside of it, or waits, one behind the other."""

    name: str
    begin: float
    compute: float = 0.0
    slowed: float = 0.0
    waits: float = 0.0
    inside: float = 0.0


@dataclass(frozen=True)
class Fill:
    """What fills a turn. Times are in seconds from its begin; a call has its own seconds last."""

    pieces: tuple[Piece, ...]
    calls: tuple[tuple[str, str, float, float, float], ...] = field(default=())


def turn_pieces(content: Turned, length: float, window: float, lean: float) -> Fill:
    """Stretch what a microbatch is made of to a turn.

    Args:
        content: what it is made of.
        length: seconds in which the turn computes, collectives inside of it included.
        window: seconds of the turn with its waits. What data ranks add is shortened to it, and what is left stays empty.
        lean: by what collectives inside of layers are scaled.
    """
    busy, added = content.busy, content.added
    if not busy:
        return Fill((Piece("", 0.0, compute=length),) if length > 0 else ())
    scale, room = length / busy, max(0.0, window - length)
    kept = min(1.0, room / added) if added > 0 else 0.0
    pieces, now = [], 0.0
    clock, drawn = [], []
    for one in content.segments:
        clock.append(one.begin)
        drawn.append(now)
        if one.busy:
            whole = scale * one.length
            inside = min(whole, lean * scale * one.inside)
            piece = Piece(one.name, now, whole - inside, kept * content.slow * one.beside, 0.0, inside)
        else:
            piece = Piece(one.name, now, waits=kept * content.waits * one.length)
        pieces.append(piece)
        now += piece.compute + piece.slowed + piece.waits + piece.inside
    clock.append(content.segments[-1].end)
    drawn.append(now)

    def at(time: float) -> float:
        place = min(max(1, bisect_right(clock, time)), len(clock) - 1)
        low, high = clock[place - 1], clock[place]
        share = min(1.0, max(0.0, (time - low) / (high - low))) if high > low else 0.0
        return drawn[place - 1] + share * (drawn[place] - drawn[place - 1])

    calls = tuple((kind, unit, at(begin), at(end), end - begin) for kind, unit, begin, end in content.calls)
    return Fill(tuple(pieces), calls)

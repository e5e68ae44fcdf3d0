"""Reports a run that makes no progress: which ranks wait, in which collective, and which ranks never entered it.

Each rank has a thread that checks whether its main thread makes progress. If it does not, the ranks exchange their states
through the store, and one of them prints the report. The report ends nothing: a collective that waits too long ends the run by
its timeout.
"""

import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from meshwright.distributed import _torch_compat
from meshwright.ranks.hang import describe
from meshwright.ranks.rank_state import Pace, RankState, look

__all__ = ["Watch"]

BEAT = 1.0
"""Seconds between two checks."""
STANDS = 2 * BEAT
"""Seconds without progress after which a rank that is asked counts as standing still, so that its recorder can be read."""
ANSWER = 6.0
"""Seconds that a rank has to answer; one that does not is stopped, dead, or on a machine that cannot be reached."""
KEPT = 100
"""Number of newest collectives that a rank sends: with a thousand ranks, all of them would be gigabytes."""
SHOWN = 24
"""Most lines of ranks in a report; ranks that are in the same place share a line."""
SILENT = "does not answer: it is stopped, or its machine cannot be reached"


class Watch:
    """Watches the thread that creates it. Use it as a context manager, in a process group of several ranks.

    Args:
        seconds: time without progress after which the report is made, once for each time that ranks stand still.
        kind: kind of the device that the main thread computes on or waits for.
        say: called with the lines of the report, on one rank only.
    """

    def __init__(self, seconds: float, kind: str, say: Callable[[list[str]], None]) -> None:
        self.seconds, self._say = seconds, say
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._store = _torch_compat.control_store("hang")
        self._store.set_timeout(timedelta(seconds=4 * ANSWER))
        self._main, self._pace = threading.get_ident(), Pace(threading.get_ident(), kind)
        self._what, self._ticks, self._round = "the start", 0, 0
        self._told = -1  # the tick at which this rank answered while standing still; -1: none
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(2 * BEAT)

    def tick(self, activity: str) -> None:
        """Record that the main thread makes progress, and what it does, such as ``step 12``."""
        self._what, self._ticks = activity, self._ticks + 1

    def verdict(self) -> str | None:
        """Return the first line of the last report, whichever rank made it, for the error that ends the run.

        ``None`` if this rank has made progress since it answered, or there is no report.
        """
        try:
            reported = self._told == self._ticks and self._store.check(["verdict"])
            return self._store.get("verdict").decode() if reported else None
        except RuntimeError:
            return None

    def _watch(self) -> None:
        still, asked, ticks, reported = 0.0, 0.0, -1, False
        while not self._ended.wait(BEAT):
            if ticks != self._ticks or self._pace.moved():
                still, ticks, reported = 0.0, self._ticks, False
            else:
                still += BEAT  # beats, not clock time: while a process is stopped, time passes and no beats are counted
            try:
                if still > self.seconds and not reported:
                    self._report()
                    reported = True
                elif self._asked():
                    # A rank that has just entered the collective answers as soon as it counts as standing still. A rank that
                    # makes progress for longer never entered it.
                    standing, asked = still >= STANDS, asked + BEAT
                    if standing or asked >= STANDS + BEAT:
                        self._answer(standing=standing)
                        reported, asked = standing, 0.0  # the report being made covers this standstill
            except RuntimeError as error:  # the store is gone, or does not answer: the other ranks cannot be asked
                if not reported:
                    self._alone(still, str(error).partition("\n")[0])
                return

    def _alone(self, still: float, reason: str) -> None:
        """Without a store: report once where this rank is, when it makes no progress."""
        ticks = self._ticks
        while still <= self.seconds:
            if self._ended.wait(BEAT):
                return
            still = 0.0 if ticks != self._ticks or self._pace.moved() else still + BEAT
            ticks = self._ticks
        first = f"no progress for {self.seconds:g} s in {self._what}, and no store to ask other ranks: {reason}"
        self._say([first, str(look(self._rank, self._main))])

    def _asked(self) -> bool:
        return self._store.check([f"{self._round}/ask"])

    def _answer(self, *, standing: bool) -> None:
        """Send the state of this rank; if it makes progress, only its stack: the recorder cannot be read while it records."""
        self._told = self._ticks if standing else -1
        state = look(self._rank, self._main, recorded=standing)
        if state.collectives is not None:
            state = replace(state, collectives=state.collectives[-KEPT:])
        state = replace(state, doing=self._what)
        self._store.set(f"{self._round}/state/{self._rank}", pickle.dumps(state).hex())
        self._round += 1

    def _report(self) -> None:
        number = self._round
        self._store.set(f"{number}/ask", "")
        self._answer(standing=True)
        if self._store.add(f"{number}/speaker", 1) != 1:
            return  # another rank came first
        keys = [f"{number}/state/{rank}" for rank in range(self._ranks)]
        end = time.monotonic() + ANSWER
        while not self._store.check(keys) and time.monotonic() < end:
            self._ended.wait(BEAT / 4)
        states = [self._read(rank, key) for rank, key in enumerate(keys)]
        verdict, *lines = describe(states)
        verdict = f"no progress for {self.seconds:g} s in {self._what}: {verdict}"
        self._store.set("verdict", verdict)
        self._say([verdict, *_together(lines)])

    def _read(self, rank: int, key: str) -> RankState:
        if not self._store.check([key]):
            return RankState(rank, silent=SILENT)
        return pickle.loads(bytes.fromhex(self._store.get(key).decode()))


def _together(lines: list[str]) -> list[str]:
    """Merge the lines of ranks that are in the same place into one line each, the rarest place first."""
    places: dict[str, list[str]] = {}
    for line in lines:
        _, rank, where = line.split(" ", 2)
        places.setdefault(where, []).append(rank)
    rarest = sorted(places.items(), key=lambda item: len(item[1]))
    shown = [f"{_named(ranks)} {where}" for where, ranks in rarest]
    return shown[:SHOWN] + ([f"... and {len(shown) - SHOWN} more places"] if len(shown) > SHOWN else [])


def _named(ranks: list[str]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"each of ranks {', '.join(ranks)}"

"""The report of a run that does not go on: which ranks wait, in which collective, and which never came.

Each rank has a thread that looks whether its main thread goes on. Where it does not, the ranks tell each other where they are,
through the store, and one of them says it. Nothing is ended: a collective that waits too long ends the run by its timeout.
"""

import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from meshwright.distributed import _torch_compat
from meshwright.ranks.hang import Pace, RankState, describe, look

__all__ = ["Watch"]

BEAT = 1.0
"""Seconds between two looks."""
STANDS = 2 * BEAT
"""Seconds without progress after which a rank that is asked counts as standing still, and its recorder can be read."""
ANSWER = 6.0
"""Seconds that a rank has to say where it is; one that does not is stopped, dead, or on a machine that is not reached."""
KEPT = 100
"""Newest collectives that a rank tells of: with a thousand ranks, all of them would be gigabytes."""
SHOWN = 24
"""Lines of ranks in a report; ranks that are in the same place share one."""
SILENT = "does not answer: it is stopped, or its machine cannot be reached"


class Watch:
    """Watches the thread that makes it. Use it as a context manager, in a process group of several ranks.

    Args:
        seconds: without progress, after which the report is made, once for each time that ranks stand still.
        kind: ``cpu`` or ``cuda``, where the main thread computes or waits.
        say: given the lines of the report, on the one rank that speaks.
    """

    def __init__(self, seconds: float, kind: str, say: Callable[[list[str]], None]) -> None:
        self.seconds, self._say = seconds, say
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._store = _torch_compat.control_store("hang")
        self._store.set_timeout(timedelta(seconds=4 * ANSWER))
        self._main, self._pace = threading.get_ident(), Pace(threading.get_ident(), kind)
        self._what, self._ticks, self._round = "the start", 0, 0
        self._told = -1  # the tick at which this rank told where it stands
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(2 * BEAT)

    def tick(self, what: str) -> None:
        """Say that the main thread goes on, and with what, such as ``step 12``."""
        self._what, self._ticks = what, self._ticks + 1

    def verdict(self) -> str | None:
        """The first line of the report that was made while this rank stood where it is now, whichever rank made it.

        For the error that ends the run. ``None`` where this rank has gone on since it told where it is.
        """
        try:
            told = self._told == self._ticks and self._store.check(["verdict"])
            return self._store.get("verdict").decode() if told else None
        except RuntimeError:
            return None

    def _watch(self) -> None:
        still, asked, ticks, reported = 0.0, 0.0, -1, False
        while not self._ended.wait(BEAT):
            if ticks != self._ticks or self._pace.moved():
                still, ticks, reported = 0.0, self._ticks, False
            else:
                still += BEAT  # beats, not time: a process that was stopped has missed some of both
            try:
                if still > self.seconds and not reported:
                    self._report()
                    reported = True
                elif self._asked():
                    # A rank that has just come to the collective says so, once it stands there; what goes on longer never came.
                    stands, asked = still >= STANDS, asked + BEAT
                    if stands or asked >= STANDS + BEAT:
                        self._answer(standing=stands)
                        reported, asked = stands, 0.0  # the report that is being made is of this stand
            except RuntimeError as error:  # of the store, which is gone, or does not answer: nobody is left to ask
                if not reported:
                    self._alone(still, str(error).partition("\n")[0])
                return

    def _alone(self, still: float, reason: str) -> None:
        """Without a store: say once where this rank is, when it does not go on."""
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
        """Say where this rank is. Of one that goes on only its stack: the recorder is not to be read while it records."""
        self._told = self._ticks if standing else -1
        state = look(self._rank, self._main, recorded=standing)
        if state.collectives is not None:
            state = replace(state, collectives=state.collectives[-KEPT:])
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
    """One line for all ranks that are in the same place, the rarest place first."""
    places: dict[str, list[str]] = {}
    for line in lines:
        _, rank, where = line.split(" ", 2)
        places.setdefault(where, []).append(rank)
    rarest = sorted(places.items(), key=lambda item: len(item[1]))
    shown = [f"{_named(ranks)} {where}" for where, ranks in rarest]
    return shown[:SHOWN] + ([f"... and {len(shown) - SHOWN} more places"] if len(shown) > SHOWN else [])


def _named(ranks: list[str]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"each of ranks {', '.join(ranks)}"

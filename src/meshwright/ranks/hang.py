"""Finds out where every rank of a hanging job is, and which rank the others wait for.

A collective hangs because ranks disagree about its kind, its size or its group, or because some rank never enters it. No rank
alone can detect this. So each rank reports its own state (:func:`look`: the entries of torch's flight recorder, and its Python
stack), and :func:`describe` compares the states, group by group and collective by collective. A report names what the backend
runs: for gloo a reduce-scatter is an all-reduce, and only NCCL records messages (send, recv).
"""

from collections.abc import Iterable, Sequence
from typing import Any

from meshwright.errors import Refusal, WorkerError
from meshwright.ranks.rank_state import _DTYPES, Collective, RankState, ranks_in_words

__all__ = ["HangError", "describe", "disagreement", "mismatch"]


_DTYPES |= {"Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8"}


class HangError(WorkerError):
    """Ranks wait for each other. The problems are the lines of :func:`describe`.

    Args:
        problems: the lines.
        states: the state of each rank.
    """

    def __init__(self, problems: Refusal | Iterable[Refusal], states: Sequence[RankState] = ()) -> None:
        super().__init__(problems)
        self.states = tuple(states)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the states too."""
        return (type(self), (self.problems, self.states))


def describe(states: Sequence[RankState]) -> list[str]:
    """Describe a hang: the disagreement in one line, then one line for each rank."""
    silent = [state.rank for state in states if state.collectives is None and state.ending is None]
    unknown = "no rank goes on, and no recorded collective tells why (gloo does not record send and recv)"
    if 0 < len(silent) < len(states):
        unknown = f"no rank goes on, and {ranks_in_words(silent)} did not answer"
    lost = [state.rank for state in states if state.silent]
    reason = f"{ranks_in_words(lost)} did not answer" if lost else disagreement(states)
    return [reason or unknown, *map(str, states)]


def disagreement(states: Sequence[RankState]) -> str | None:
    """Return what the ranks disagree about, in words; ``None`` if the recorded collectives do not show it.

    This is the first difference (:func:`mismatch`). If there is none, it is a rank that never entered a collective in which
    others wait. Of several such ranks, it is one that waits in no collective itself, because the others may wait for it.
    """
    known = {state.rank: state for state in states}
    missing = [absence for group in _by_group(states) for absence in _never_entered(group, known)]
    return mismatch(states) or (min(missing)[2] if missing else None)


def mismatch(states: Sequence[RankState]) -> str | None:
    """Return, in words, the first collective whose kind, size or dtype differs between the ranks of its group."""
    differences = [difference for group in _by_group(states) if (difference := _first_difference(group))]
    return min(differences)[1] if differences else None


def _by_group(states: Sequence[RankState]) -> list[dict[int, dict[int, Collective]]]:
    """For each group: rank (if it recorded) to number to collective. Without messages, which NCCL numbers separately."""
    known = [state.rank for state in states if state.collectives is not None]
    table: dict[tuple[str, tuple[int, ...]], dict[int, dict[int, Collective]]] = {}
    for state in states:
        for item in state.collectives or ():
            if item.kind.startswith(("send ", "recv ")):
                continue
            group = table.setdefault((item.group, item.ranks), {rank: {} for rank in item.ranks if rank in known})
            group.setdefault(state.rank, {})[item.number] = item
    return list(table.values())


def _first_difference(group: dict[int, dict[int, Collective]]) -> tuple[int, str] | None:
    for number in sorted(set().union(*group.values())):
        here = {rank: entered[number] for rank, entered in group.items() if number in entered}
        kinds: dict[tuple[Any, ...], list[int]] = {}
        for rank, item in here.items():
            kinds.setdefault(item.agreement, []).append(rank)
        if len(kinds) > 1:
            sides = [
                f"{ranks_in_words(ranks)} {here[ranks[0]].kind} {here[ranks[0]].tensors}".strip() for ranks in kinds.values()
            ]
            first = next(iter(here.values()))
            time = min(item.time for item in here.values())
            return time, f"ranks disagree about collective {number} of {first.place}: {', '.join(sides)}"
    return None


def _never_entered(group: dict[int, dict[int, Collective]], known: dict[int, RankState]) -> list[tuple[bool, int, str]]:
    """Ranks that others wait for. For each: whether it waits itself, since when others wait for it, and the words."""
    absences = []
    waiting: dict[int, list[Collective]] = {}
    for rank, entered in group.items():
        pending = [item for item in entered.values() if not item.finished]
        if known[rank].broken and entered:  # the recorder marks the collective that failed as finished
            pending.append(entered[max(entered)])
        if pending and (known[rank].ending is None or known[rank].broken):
            waiting[rank] = pending
    for absent, entered in group.items():
        missed = {rank: item for rank, items in waiting.items() for item in items if item.number > max(entered, default=0)}
        if missed:
            first = min(missed.values(), key=lambda item: item.number)
            ranks = tuple(rank for rank, item in missed.items() if item.number == first.number)
            words = (
                f"rank {absent} never entered {first}, in which {ranks_in_words(ranks)} wait{'s' if len(ranks) == 1 else ''}"
            )
            own = known[absent].waits if known[absent].ending is None else None
            absences.append((own is not None, first.time, f"{words}; it waits in {own}" if own else words))
    return absences

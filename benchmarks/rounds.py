"""Contenders in interleaved rounds; whether they computed the same; and ratios of their times."""

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median

from jobs import Contender, Result, run_job

__all__ = ["LOSS_TOLERANCE", "TIMES", "WARMUP_STEPS", "Key", "Results", "check_losses", "ratio", "run_rounds", "say", "times"]

WARMUP_STEPS = 3
TIMES = ("CPU ms", "x", "wall ms", "x")
"""Columns of :func:`times`."""
LOSS_TOLERANCE = 1e-5
"""Relative. Sums in another order move the loss of step 12 by some 1e-7."""

Key = tuple[int, str]
"""Microbatches, and the contender's name."""

Results = Mapping[Key, list[Result]]
"""By key, in the order of rounds."""


def run_rounds(
    directory: Path,
    contenders: Iterable[Contender],
    microbatches: list[int],
    rounds: int,
    steps: int,
    after: Callable[[Key, int], None] = lambda key, number: None,
) -> dict[Key, list[Result]]:
    """All jobs, interleaved; ``after`` is called after each with its key and the number of the round."""
    named = {contender.name: contender for contender in contenders}
    results: dict[Key, list[Result]] = {(count, name): [] for count in microbatches for name in named}
    for number in range(rounds):
        # Every other round backwards, so that a machine that grows slower or faster favours nobody.
        for key in list(results)[:: -1 if number % 2 else 1]:
            count, name = key
            result = run_job(named[name], directory, count, steps, WARMUP_STEPS)
            results[key].append(result)
            say(f"round {number + 1}: {name} x {count}: {result.cpu_ms:.0f} ms CPU, {result.wall_ms:.0f} ms")
            after(key, number)
    return results


def say(line: str) -> None:
    """To the terminal, beside the tables."""
    print(line, file=sys.stderr, flush=True)


def check_losses(results: Results, reference: str) -> None:
    """Refuse results of different computations.

    Raises:
        SystemExit: the first step in which a contender's loss is not that of the reference.
    """
    for (count, name), runs in results.items():
        expected_losses = results[count, reference][0].losses
        for run in runs:
            for step, (found, expected) in enumerate(zip(run.losses, expected_losses, strict=True)):
                if not abs(found - expected) <= LOSS_TOLERANCE * abs(expected):
                    raise SystemExit(
                        f"{name}, {count} microbatches: loss {found:.8f} in step {step + 1}, {reference} has {expected:.8f}: "
                        "they do not compute the same, so their times cannot be compared"
                    )


def ratio(results: Results, key: Key, what: str, against: str) -> float:
    """Median over rounds of a contender's time over another's in the same round."""
    pairs = zip(results[key], results[key[0], against], strict=True)
    return median(getattr(run, what) / getattr(other, what) for run, other in pairs)


def times(results: Results, key: Key, against: str) -> tuple[str, ...]:
    """CPU and wall time of a contender's step in milliseconds, each with its ratio to another contender's, as text."""
    return tuple(
        text
        for what in ("cpu_ms", "wall_ms")
        for text in (f"{median(getattr(run, what) for run in results[key]):.0f}", f"{ratio(results, key, what, against):.3f}")
    )

"""The metrics of a run, as `metrics.jsonl` has them."""

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.train.start.run_files import Paths

__all__ = ["RunMetrics", "Series", "read_metrics"]


@dataclass(frozen=True)
class Series:
    """The values of a metric, by step.

    Attributes:
        steps: numbers of steps, ascending.
        values: the value of each.
    """

    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class RunMetrics:
    """The metrics of a run.

    Attributes:
        name: what the run is called.
        directory: its directory.
        series: name of a metric to its values.
        unread: number of lines that cannot be read.
    """

    name: str
    directory: Path
    series: dict[str, Series]
    unread: int = 0

    def tokens_at(self, steps: Sequence[int]) -> list[float]:
        """Return how many tokens the run had trained on after some steps.

        A line of metrics has the tokens of its own step. Those of the steps before it, back to the line before, are taken to be
        as many.
        """
        known = self.series.get("tokens", Series((), ()))
        gaps = [after - before for before, after in zip((0, *known.steps), known.steps, strict=False)]
        sums = [0.0, *accumulate(gap * value for gap, value in zip(gaps, known.values, strict=True))]
        found = []
        for step in steps:
            place = bisect_right(known.steps, step)
            rest = step - known.steps[place - 1] if place else step
            each = known.values[min(place, len(known.values) - 1)] if known.values else 0.0
            found.append(sums[place] + rest * each)
        return found


def read_metrics(run: Path) -> RunMetrics:
    """Read the metrics of a run. Of a step that stands there several times, because a run resumed, the last value counts.

    Args:
        run: the run's directory, or its file of metrics.

    Raises:
        ConfigError: there is no such file, or no line in it can be read.
    """
    file = run if run.is_file() else Paths(run).metrics
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(
            "cli.metrics", f"{run}: {file.name}: {error.strerror or error}; a run with metrics.jsonl=true writes it"
        ) from error
    found: dict[str, dict[int, float]] = {}
    unread = 0
    for line in lines:
        try:
            values = json.loads(line)
            step = int(values.pop("step"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            unread += 1
            continue
        for name, value in values.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                found.setdefault(name, {})[step] = float(value)
    if not found:
        raise ConfigError("cli.metrics", f"{file}: has no line of metrics")
    series = {name: Series(*(tuple(row) for row in zip(*sorted(by.items()), strict=True))) for name, by in found.items()}
    directory = file.parent
    return RunMetrics(directory.resolve().name, directory, series, unread)

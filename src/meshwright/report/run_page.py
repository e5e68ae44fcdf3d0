"""The page about a run: its metrics, and the forecast of a step beside the measured one."""

import json
from collections.abc import Callable
from html import escape
from pathlib import Path
from statistics import median

from meshwright.files import write_whole
from meshwright.plan.show.summary import human_bytes, seconds_text
from meshwright.report.line_svg import line_chart
from meshwright.report.markup import Section, cards, table, tag
from meshwright.report.page import page
from meshwright.report.run_metrics import RunMetrics, read_metrics
from meshwright.train.forecast import paired
from meshwright.train.start.run_files import Paths

__all__ = ["run_page", "write_run_page"]

Words = Callable[[float], str]


def _plain(value: float) -> str:
    return f"{value:,.4g}"


CHARTS: tuple[tuple[str, str, tuple[str, ...], Words, str], ...] = (
    ("loss", "Loss, in nats", ("loss", "eval/loss"), _plain, "plain"),
    ("norm", "Norm of the gradient, before clipping", ("gradient_norm",), _plain, "plain"),
    ("rate", "Learning rate", ("learning_rate",), _plain, "plain"),
    ("throughput", "Tokens a second, all devices", ("tokens_per_second",), _plain, "plain"),
    ("memory", "Memory of rank 0", ("memory_bytes",), human_bytes, "bytes"),
    ("seconds", "Time of a step", ("step_seconds",), seconds_text, "seconds"),
)
"""Id, title, metrics, and how a value is written, here and by the script."""


def write_run_page(directory: Path) -> Path:
    """Write the page about a run into its directory, and return its path.

    Raises:
        ConfigError: the run has no metrics.
    """
    paths = Paths(directory)
    write_whole(paths.report, run_page(read_metrics(directory)))
    return paths.report


def run_page(run: RunMetrics) -> str:
    """Return the page about a run."""
    charts, data = "", {}
    for key, title, metrics, words, form in CHARTS:
        lines = {name: run.series[name] for name in metrics if name in run.series}
        if metrics[0] in lines:
            body, about = line_chart(f"chart-{key}", title, lines, words, form)
            charts, data[f"chart-{key}"] = charts + body, about
    sections = [
        Section("outcome", "Outcome", _outcome(run)),
        Section("charts", "In the course of training", tag("div", charts, class_="charts"), data),
        _forecast(Paths(run.directory)),
    ]
    steps = max((series.steps[-1] for series in run.series.values()), default=0)
    return page(f"Run {run.name}", f"{steps:,} optimizer steps, from {Paths(run.directory).metrics}", sections)


def _outcome(run: RunMetrics) -> str:
    def last(name: str) -> float | None:
        return run.series[name].values[-1] if name in run.series else None

    found = []
    for name, words in (("loss", "last loss"), ("eval/loss", "last held-out loss")):
        if (value := last(name)) is not None:
            found.append((words, f"{value:.4f}", f"after step {run.series[name].steps[-1]:,}", ""))
    if "tokens_per_second" in run.series:
        found.append(("tokens/s, median", _plain(median(run.series["tokens_per_second"].values)), "all devices", ""))
    if "step_seconds" in run.series:
        found.append(("step, median", seconds_text(median(run.series["step_seconds"].values)), "", ""))
    if "memory_bytes" in run.series:
        found.append(("memory of rank 0", human_bytes(max(run.series["memory_bytes"].values)), "the most", ""))
    if (mfu := last("mfu")) is not None:
        found.append(("MFU", f"{mfu:.1%}", "of the last step", ""))
    return cards(found)


def _forecast(paths: Paths) -> Section:
    """Return the part with the forecast of a step beside the measured one."""
    heading = "A step: forecast and measured"
    try:
        values = json.loads(paths.forecast.read_bytes())
        forecast, measured = dict(values["forecast"]), dict(values["measured"])
    except FileNotFoundError:
        words = "There is none: the device is not known (metrics.gpu names it), or the run ended before a step was measured."
        return Section("forecast", heading, tag("p", escape(words)))
    except (ValueError, KeyError, TypeError, OSError):
        return Section("forecast", heading, tag("p", f"{escape(paths.forecast.name)} cannot be read."))
    rows = []
    for part, (seconds, took) in paired(forecast, measured).items():
        off = f"{seconds / took - 1:+.0%}" if took else ""
        rows.append((part, seconds_text(seconds), seconds_text(took), off))
    body = table(
        ("part", "forecast", "measured", "forecast against measured"), rows, numeric=(1, 2, 3), caption="Parts of a step"
    )
    lead = (
        "One step was profiled on rank 0. What is no compute and no update is waiting: for collectives, other stages, the host."
    )
    return Section("forecast", heading, body, {}, lead)

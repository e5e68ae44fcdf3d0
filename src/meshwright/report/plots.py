"""The metrics of runs as a picture, by matplotlib."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError
from meshwright.report.run_metrics import RunMetrics

__all__ = ["FORMATS", "PANELS", "by_tokens", "draw"]

FORMATS = (".svg", ".png")

PANELS = (
    ("loss, nats", ("loss", "eval/loss"), 1.0),
    ("norm of the gradient", ("gradient_norm",), 1.0),
    ("tokens a second", ("tokens_per_second",), 1.0),
    ("memory, GiB", ("memory_bytes",), 2**-30),
)
"""What is drawn: a title, the metrics (those after the first one with dashes), and what values are multiplied by."""

COLOURS = ("#3d6d98", "#c87240", "#2d7569", "#8a6bb1", "#b5618f", "#8c8a3b", "#59656e", "#a3261d")


def by_tokens(run: RunMetrics, steps: Sequence[int]) -> list[float]:
    """Return the tokens after some steps of a run.

    Raises:
        ConfigError: the run has no metric of tokens.
    """
    if "tokens" not in run.series:
        raise ConfigError("cli.metrics", f"--by tokens: {run.name} has no metric `tokens`; leave it out")
    return run.tokens_at(steps)


def draw(runs: Sequence[RunMetrics], out: Path, *, by: str = "step", say: Callable[[str], None] = lambda line: None) -> None:
    """Write a picture of the loss, the norm, the throughput and the memory of runs.

    Args:
        runs: the runs.
        out: the file; its name ends in one of :data:`FORMATS`.
        by: ``step`` or ``tokens``.
        say: called with a line about each metric that a run does not have.

    Raises:
        ConfigError: matplotlib is not installed; none of the runs has any of the metrics.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("run.extra", "plot: needs `pip install 'meshwright[plots]'`") from error
    names = _names(runs)
    panels = [(title, metrics, scale) for title, metrics, scale in PANELS if _there(runs, metrics[0], say)]
    if not panels:
        raise ConfigError("cli.metrics", f"plot: no run has one of {', '.join(metrics[0] for _, metrics, _ in PANELS)}")
    figure = Figure(figsize=(11, 3.1 * -(-len(panels) // 2)), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (title, metrics, scale) in enumerate(panels):
        axes = figure.add_subplot(-(-len(panels) // 2), min(2, len(panels)), place + 1)
        _panel(axes, title, metrics, scale, runs, names, by)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)
    # A picture of the same metrics has the same bytes: no date, no random identifiers.
    settings: dict[str, Any] = {"metadata": {"Date": None}} if out.suffix == ".svg" else {"dpi": 130}
    with _same_identifiers():
        figure.savefig(out, **settings)


def _panel(
    axes: Any, title: str, metrics: Sequence[str], scale: float, runs: Sequence[RunMetrics], names: Sequence[str], by: str
) -> None:
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        for order, metric in enumerate(metrics):
            if metric not in run.series:
                continue
            own = run.series[metric]
            where = own.steps if by == "step" else by_tokens(run, own.steps)
            words = name if metric == metrics[0] else f"{name}, {metric}"
            style = {"linestyle": "--", "marker": "."} if order else {"linestyle": "-"}
            values = [value * scale for value in own.values]
            axes.plot(where, values, label=words, color=COLOURS[number % len(COLOURS)], linewidth=1.3, **style)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(by if by == "tokens" else "optimizer step", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(visible=True, linewidth=0.4, alpha=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _same_identifiers() -> Any:
    import matplotlib as mpl

    return mpl.rc_context({"svg.hashsalt": "meshwright", "svg.fonttype": "none"})


def _there(runs: Sequence[RunMetrics], metric: str, say: Callable[[str], None]) -> bool:
    absent = [run.name for run in runs if metric not in run.series]
    if absent:
        say(f"{metric}: not in the metrics of {', '.join(absent)}; left out")
    return len(absent) < len(runs)


def _names(runs: Sequence[RunMetrics]) -> list[str]:
    """Return the names of runs; where two are called alike, their directories."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else str(run.directory) for run, name in zip(runs, names, strict=True)]

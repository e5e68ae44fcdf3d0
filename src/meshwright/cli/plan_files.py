"""The files that `meshwright plan` writes about a forecast: a trace of the step, and a page."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.arguments import check_writable
from meshwright.errors import ConfigError

if TYPE_CHECKING:
    from meshwright.plan.cost.hardware import Hardware
    from meshwright.plan.result.differences import PlanDifference
    from meshwright.report.markup import Section
    from meshwright.search.answer import Answer
    from meshwright.trace.forecasts import Forecasts
    from meshwright.trace.speedups import Speedup
    from meshwright.train.proofs.records import Source
    from meshwright.train.start.setup import RunSetup

__all__ = ["PlanFiles", "write_search"]


@dataclass(frozen=True)
class PlanFiles:
    """What is to be written.

    Args:
        config: the configuration.
        trace_out: file of the trace.
        trace_with: a trace of a real step, which goes into the same file.
        html: file of the page.
    """

    config: Path
    trace_out: Path | None = None
    trace_with: Path | None = None
    html: Path | None = None

    def check(self, gpu: str | None, others: Sequence[str]) -> None:
        """Refuse what cannot be written, before any work.

        Args:
            gpu: the device of `--gpu`.
            others: options that ask for another output.
        """
        if self.trace_with is not None and self.trace_out is None:
            raise ConfigError("cli.exclusive", f"--trace-with={self.trace_with}: goes into the file of --trace-out; add it")
        if self.html is not None:
            if set(others) - {"--json", "--diff"}:
                raise ConfigError("cli.exclusive", f"--html and {others[0]}: give one of them")
            check_writable("--html", self.html, self.config)
        if self.trace_out is None:
            return
        if gpu is None:
            raise ConfigError("cli.exclusive", f"--trace-out={self.trace_out}: is a forecast; add --gpu")
        if set(others) - {"--json"}:
            raise ConfigError("cli.exclusive", f"--trace-out: {others[0]} makes no forecast; leave one of them out")
        check_writable("--trace-out", self.trace_out, self.config)
        if self.trace_with is not None and self.trace_with.resolve() == self.trace_out.resolve():
            raise ConfigError("cli.file", f"--trace-out={self.trace_out}: is the measured trace itself; choose another file")

    def check_search(self, sizes: Sequence[int]) -> None:
        """Refuse files that a search does not write, before it begins.

        Args:
            sizes: numbers of ranks that it is made for.
        """
        if self.trace_out is not None:
            raise ConfigError("cli.exclusive", "--trace-out: is of one plan; leave --search out, and give the overrides")
        if self.html is not None and len(sizes) > 1:
            raise ConfigError("cli.exclusive", "--html: is about one number of ranks; give one --world-size")

    @cached_property
    def measured(self) -> dict[str, Any] | None:
        """The trace of a real step."""
        from meshwright.trace.in_time.chrome_trace import measured_trace

        return None if self.trace_with is None else measured_trace(self.trace_with)

    def write(
        self,
        setup: "RunSetup",
        forecasts: "Forecasts | None",
        source: "Source",
        *,
        faster: "Sequence[Speedup]" = (),
        refused: Sequence[str] = (),
        differences: "tuple[str, Sequence[PlanDifference]] | None" = None,
        candidates: "Section | None" = None,
    ) -> list[str]:
        """Write the files, and return a line about each.

        Args:
            setup: the run.
            forecasts: what is forecast of it; ``None``: no device was given.
            source: where its configuration came from.
            faster: changes that would save time.
            refused: what `train` would refuse, a line each.
            differences: another plan's name, and what differs from it.
            candidates: the candidates of a search, as a part of the page.
        """
        if self.trace_out is None and self.html is None:
            return []
        from meshwright.report.plan_page import PlanForecast, plan_page
        from meshwright.trace.in_time.chrome_trace import beside_measured, chrome_trace
        from meshwright.trace.in_time.memory_curve import memory_curve
        from meshwright.trace.in_time.step_timeline import step_timeline
        from meshwright.train.proofs.records import standing_of

        lines, drawn = [], None
        if forecasts is not None:
            timeline = step_timeline(setup, forecasts.hardware, forecasts.traces, forecasts.time)
            memory = memory_curve(setup, forecasts.traces, timeline)
            drawn = PlanForecast(forecasts.hardware, forecasts.verdict, forecasts.time, timeline, memory, tuple(faster))
        if self.trace_out is not None and drawn is not None:
            trace = chrome_trace(drawn.timeline, drawn.memory, setup.layout, self.config.stem)
            if self.measured is not None:
                trace = beside_measured(trace, self.measured)
            self.trace_out.write_text(json.dumps(trace))
            lines.append(f"{self.trace_out}: open it in ui.perfetto.dev")
        if self.html is not None:
            title = f"Plan of {self.config.stem}"
            standing = standing_of(setup, source, lambda *_: None).line
            page = plan_page(
                setup, title, forecast=drawn, standing=standing, refused=refused, differences=differences, candidates=candidates
            )
            self.html.write_text(page, encoding="utf-8")
            lines.append(f"{self.html}: open it in a browser")
        return lines


def write_search(files: PlanFiles, answer: "Answer", overrides: Sequence[str], hardware: "Hardware", load: float) -> str:
    """Write the page about a search: its candidates, and the plan of the fastest one. Return a line about it.

    Args:
        files: what is to be written.
        answer: what the search found.
        overrides: overrides of the configuration.
        hardware: the device.
        load: tokens of the fullest rank of ``ep``, over an even share.
    """
    from meshwright.report.candidates import candidates_section
    from meshwright.trace.forecasts import Forecasts
    from meshwright.train.proofs.records import Source

    if not answer.options:
        return f"{files.html}: is not written, because {answer.lacks}"
    best, setup = answer.options[0], answer.prices[0].setup
    source = Source(str(files.config), (*overrides, *best.overrides))
    limit = best.peak_bytes + best.margin_bytes
    section = candidates_section(
        _rows(answer),
        limit_bytes=limit,
        note=f"{len(answer.options)} of the fastest layouts on {answer.world_size:,} ranks, those that need less memory, and "
        f"that of the configuration. The page shows the plan of the fastest one: {best.layout or 'no axis'}.",
    )
    return files.write(setup, Forecasts(setup, hardware, load), source, candidates=section)[-1]


def _rows(answer: "Answer") -> list[dict[str, Any]]:
    """Return the candidates of a search as rows of a page."""
    front, own = {(one.layout, one.overrides) for one in answer.front}, answer.own
    rows = []
    for option in {(one.layout, one.overrides): one for one in (*answer.options, *answer.front)}.values():
        rows.append(
            {
                "name": option.layout or "one rank",
                "overrides": " ".join(option.overrides),
                "tokens_per_second": option.tokens_per_second,
                "step_seconds": option.step_seconds,
                "peak_bytes": option.peak_bytes,
                "fits": True,
                "pareto": (option.layout, option.overrides) in front,
                "limits": option.limit,
                "proven": option.proven,
                "own": own is not None and own.is_option(option),
            }
        )
    if own is not None and answer.options and not any(row["own"] for row in rows):
        best = answer.options[0]
        tokens = best.tokens_per_second * best.step_seconds / own.step_seconds  # the batch of a step is the same
        about = {"tokens_per_second": tokens, "step_seconds": own.step_seconds, "peak_bytes": own.peak_bytes, "fits": own.fits}
        told = {"name": own.layout or "one rank", "overrides": "", "limits": own.words, "proven": ""}
        rows.append({**told, **about, "pareto": False, "own": True})
    return rows

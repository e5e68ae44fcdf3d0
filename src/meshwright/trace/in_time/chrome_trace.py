"""The forecast of a step as Chrome trace events, for ui.perfetto.dev, alone or above the trace of a real step.

The format is the JSON object format of Google's Trace Event Format (2016; sections "JSON Object Format" and "Complete Events").
Times are in microseconds. torch's profiler writes the same format.
"""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError, described
from meshwright.layout import Layout
from meshwright.trace.in_time.memory_curve import MemoryPoint
from meshwright.trace.in_time.step_timeline import Event, RankTimeline, StepTimeline

__all__ = ["beside_measured", "chrome_trace", "measured_trace"]

FIRST_PID = 1_000_000_000
"""Process of the first rank of a forecast: no process of a measured trace has such a number."""

ABOVE = -1_000
"""Where the processes of a forecast are sorted: above all others."""

STEP = "ProfilerStep#"
"""What torch's profiler calls a step, if it was told of steps."""


def chrome_trace(
    timeline: StepTimeline, memory: Mapping[int, Sequence[MemoryPoint]], layout: Layout, title: str
) -> dict[str, Any]:
    """Return a forecast as a trace: a process for each rank of `pp`, with a thread for each lane, and counters of its memory.

    Args:
        timeline: the forecast in time.
        memory: what each rank of `pp` holds, by time.
        layout: the layout, with its sizes.
        title: what the run is called.
    """
    events = [event for rank in timeline.ranks for event in _process(rank, memory.get(rank.rank, ()), layout, title)]
    return {"displayTimeUnit": "ms", "traceEvents": events, "meshwright": {"forecast_step_seconds": timeline.seconds}}


def _process(rank: RankTimeline, memory: Sequence[MemoryPoint], layout: Layout, title: str) -> Iterator[dict[str, Any]]:
    pid, size = FIRST_PID + rank.rank, layout.world_size // layout.size("pp")
    ranks = f"ranks {rank.rank * size} to {(rank.rank + 1) * size - 1}" if size > 1 else f"rank {rank.rank}"
    stage = f", pp {rank.rank}" if layout.size("pp") > 1 else ""
    yield _about(pid, 0, "process_name", name=f"forecast: {title}{stage} ({ranks} are alike)" if size > 1 else
                 f"forecast: {title}{stage} ({ranks})")  # fmt: skip
    yield _about(pid, 0, "process_sort_index", sort_index=ABOVE + rank.rank)
    threads: dict[str, int] = {}
    for lane, event in _without_overlap(rank.events):
        if lane not in threads:
            threads[lane] = len(threads)
            yield _about(pid, threads[lane], "thread_name", name=lane)
            yield _about(pid, threads[lane], "thread_sort_index", sort_index=threads[lane])
        about: dict[str, Any] = {"seconds": event.seconds}
        if event.microbatch >= 0:
            about["microbatch"] = event.microbatch
        yield {
            "ph": "X", "pid": pid, "tid": threads[lane], "cat": event.part, "name": _words(event),
            "ts": 1e6 * event.begin, "dur": 1e6 * (event.end - event.begin), "args": about,
        }  # fmt: skip
    for point in memory:
        held = {name: size / 2**30 for name, size in point.parts.items()}
        yield {"ph": "C", "pid": pid, "name": "memory, GiB", "ts": 1e6 * point.time, "args": held}


def _about(pid: int, tid: int, what: str, **values: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": values}


def _words(event: Event) -> str:
    name = f"{event.name} {event.phase}".strip()
    if event.part in ("compute", "update", "beyond", "host", "message"):
        return f"message {name}" if event.part == "message" else name
    words = {"slowed": "slowed by collectives", "waits": "waits for"}.get(event.part, event.part)
    return f"{words}: {name}"


def _without_overlap(events: Sequence[Event]) -> Iterator[tuple[str, Event]]:
    """Yield events with their lanes. One that begins before the last one of its lane ends gets a further lane: a thread of a
    trace holds what is one behind the other.
    """
    ends: dict[str, list[float]] = {}
    for event in events:
        lanes = ends.setdefault(event.lane, [])
        place = next((place for place, end in enumerate(lanes) if end <= event.begin + 1e-9), len(lanes))
        if place == len(lanes):
            lanes.append(0.0)
        lanes[place] = event.end
        yield event.lane if not place else f"{event.lane} {place + 1}", event


def measured_trace(file: Path) -> dict[str, Any]:
    """Read the trace of a real step, as torch's profiler writes it; its name may end in ``.gz``.

    Raises:
        ConfigError: there is none, or it has no events with times.
    """
    try:
        content = file.read_bytes()
        values = json.loads(gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content)
    except OSError as error:
        raise ConfigError("cli.trace", f"--trace-with={file}: {error.strerror or error}") from error
    except (ValueError, EOFError, RecursionError) as error:
        raise ConfigError("cli.trace", f"--trace-with={file}: is no JSON ({described(error)})") from error
    events = values.get("traceEvents") if isinstance(values, dict) else values
    if not isinstance(events, list) or not any(_timed(event) for event in events):
        raise ConfigError("cli.trace", f"--trace-with={file}: has no events of a trace (traceEvents, with ph, ts and dur)")
    return {**(values if isinstance(values, dict) else {}), "traceEvents": events}


def _timed(event: Any) -> bool:
    numbers = isinstance(event, dict) and all(isinstance(event.get(key), int | float) for key in ("ts", "dur"))
    return numbers and event.get("ph") == "X"


def beside_measured(forecast: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return both traces as one, the forecast above. Both steps begin at time 0.

    A measured step begins with its annotation, if torch's profiler was told of steps; otherwise with the first thing that took
    time.

    Args:
        forecast: of :func:`chrome_trace`.
        measured: of :func:`measured_trace`.
    """
    timed = [event for event in measured["traceEvents"] if _timed(event) and event.get("cat") != "Trace"]
    timed = timed or [event for event in measured["traceEvents"] if _timed(event)]
    steps = [event for event in timed if str(event.get("name", "")).startswith(STEP)]
    begin = min(event["ts"] for event in steps or timed)
    moved = []
    for event in measured["traceEvents"]:
        if not isinstance(event, dict):
            continue
        if isinstance(event.get("ts"), int | float):
            event = {**event, "ts": event["ts"] - begin}
        if event.get("ph") == "M" and event.get("name") == "process_name" and isinstance(event.get("args"), dict):
            event = {**event, "args": {**event["args"], "name": f"measured: {event['args'].get('name', '')}"}}
        moved.append(event)
    kept = {key: value for key, value in measured.items() if key not in ("traceEvents", "baseTimeNanoseconds")}
    return {**kept, **forecast, "traceEvents": [*forecast["traceEvents"], *moved]}

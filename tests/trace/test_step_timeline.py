"""The forecast in time ends when the forecast says, its parts add up to those of the forecast, and a trace holds it."""

import gzip
import json
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.errors import ConfigError
from meshwright.plan.axes.data.unit_traffic import unit_traffic
from meshwright.plan.axes.pipeline.stage_plan import stages_of_rank
from meshwright.plan.axes.pipeline.stage_rows import rows_on_stages
from meshwright.plan.cost.hardware import Hardware, load_hardware
from meshwright.plan.cost.links import collective_seconds
from meshwright.plan.result.sharding_plan import shard_axis
from meshwright.trace.few_layers import Traces
from meshwright.trace.held.memory import MemoryForecast, forecast_memory
from meshwright.trace.in_time.chrome_trace import ABOVE, FIRST_PID, beside_measured, chrome_trace, measured_trace
from meshwright.trace.in_time.memory_curve import MemoryPoint, memory_curve
from meshwright.trace.in_time.step_timeline import StepTimeline, step_timeline
from meshwright.trace.time import COMPUTE, TimeForecast, forecast_time
from meshwright.train.start.setup import RunSetup
from tests.harness import run_ranks
from tests.trace.test_memory import setup_of

QUICKSTART = str(Path(__file__).parents[2] / "examples" / "quickstart.yaml")
# Links so slow that a tiny model waits for them, and a host so fast that it is never waited for.
SLOW = replace(load_hardware("h100"), link_gb_s=0.05, nic_gb_s=0.01, launch_us=0.01, bf16_tflops=0.5, fp32_tflops=0.5)
# So slow devices that links hardly count.
BUSY = replace(load_hardware("h100"), bf16_tflops=1e-4, fp32_tflops=1e-4, launch_us=0.01)

Drawn = tuple[TimeForecast, StepTimeline, dict[int, list[MemoryPoint]], MemoryForecast]


def drawn(setup: RunSetup, *devices: Hardware) -> list[Drawn]:
    """The forecast for each device, from the same traces."""

    def on_rank(_: int) -> list[Drawn]:
        traces, found = Traces(setup), []
        for hardware in devices:
            forecast = forecast_time(setup, hardware, traces)
            timeline = step_timeline(setup, hardware, traces, forecast)
            found.append((forecast, timeline, memory_curve(setup, traces, timeline), forecast_memory(setup, traces)))
        return found

    (found,) = run_ranks(on_rank, 1, group=False)
    return found


def called(setup: RunSetup, rank: int, hardware: Hardware) -> float:
    """Seconds of the collectives over data ranks of a rank of pp, one after the other, before anything hides them."""
    total, layout = 0.0, setup.layout
    for stage in (rows_on_stages(setup.plan, [index]) for index in stages_of_rank(setup.plan, rank)):
        for unit in stage.fsdp_units:
            axis, of = shard_axis(layout, unit.kind), unit_traffic(stage, unit)
            total += collective_seconds(layout, hardware, axis, "all_gather", of.all_gathers, of.all_gather_bytes)
            total += collective_seconds(layout, hardware, axis, "reduce_scatter", of.reduce_scatters, of.reduce_scatter_bytes)
            total += collective_seconds(layout, hardware, "dp_replicate", "all_reduce", of.all_reduces, of.all_reduce_bytes)
    return total


RUNS: dict[str, dict[str, Any]] = {
    "shard": {"world": 4, "layers": 6},
    "replicas, each microbatch": {
        "world": 4, "layers": 6, "layout": {"dp_replicate": 2}, "parallel": {"sync": "reduce_each"}
    },
    "tp and cp": {"world": 8, "layers": 6, "layout": {"tp": 2, "cp": 2}},
    "experts": {"world": 4, "family": "qwen3_moe", "layers": 6, "layout": {"ep": 2}},
    "tp, cp and stages": {"world": 8, "layers": 6, "layout": {"pp": 2, "tp": 2, "cp": 2}},
    "stages, interleaved": {
        "world": 4, "layers": 6, "layout": {"pp": 2},
        "parallel": {"pipeline": {"schedule": "interleaved_1f1b", "stages_per_rank": 2}},
    },
    "halves of backward": {"world": 4, "layers": 6, "layout": {"pp": 2}, "parallel": {"pipeline": {"schedule": "zbv"}}},
    "offloaded": {"world": 2, "layers": 6, "parallel": {"cpu_offload": True}},
}  # fmt: skip


RARER = [run for run in RUNS if run not in ("shard", "tp, cp and stages")]


@cache
def of_run(run: str) -> tuple[RunSetup, list[Drawn]]:
    setup = setup_of(**{**RUNS[run]})
    return setup, drawn(setup, SLOW, BUSY)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "run", ["shard", "tp, cp and stages", *(pytest.param(run, marks=pytest.mark.thorough) for run in RARER)]
)
@pytest.mark.parametrize("place", [0, 1], ids=["slow links", "slow devices"])
def test_parts_add_up_to_the_forecast(run: str, place: int) -> None:
    setup, found = of_run(run)
    hardware, (forecast, timeline, memory, peak) = (SLOW, BUSY)[place], found[place]
    parts, slowest = forecast.parts, timeline.ranks[timeline.slowest]
    assert timeline.seconds == forecast.step_seconds
    assert max(event.end for event in slowest.events) == pytest.approx(forecast.step_seconds)
    # What computes and what each axis of a layer waits for: by itself, as no other thing hides it.
    assert slowest.total("compute", lane="compute") == pytest.approx(sum(parts[name] for name in COMPUTE))
    for axis in ("tp", "cp", "ep"):
        assert slowest.total(axis, lane=axis) == pytest.approx(parts.get(axis, 0.0))
    # Collectives over data ranks before anything hides them, and what of them is left after that.
    assert slowest.total("all_gather", "reduce_scatter", "all_reduce") == pytest.approx(
        called(setup, timeline.slowest, hardware)
    )
    assert slowest.total("waits", "slowed") == pytest.approx(parts["data ranks"])
    assert slowest.total("host") == pytest.approx(parts.get("host", 0.0))
    assert slowest.total("update") == pytest.approx(parts["update"])
    # The lane that computes, the axes inside of layers, and gaps in which a pipeline waits, make the step.
    inside = slowest.total("compute", "slowed", "waits", "tp", "cp", "ep", "update", "host", "beyond")
    assert timeline.seconds - inside == pytest.approx(parts.get("bubble", 0.0) + parts.get("pp", 0.0), abs=1e-9)
    if hardware is SLOW:
        assert slowest.total("waits") > 0
    for rank in timeline.ranks:
        lanes = defaultdict(list)
        for event in rank.events:
            assert 0 <= event.begin <= event.end <= timeline.seconds * (1 + 1e-9)
            lanes[event.lane].append(event)
        for lane in ("compute", "fsdp", "replicas", "tp", "cp", "ep"):
            assert all(one.end <= other.begin + 1e-9 for one, other in zip(lanes[lane], lanes[lane][1:], strict=False)), lane
    assert max(point.total for points in memory.values() for point in points) == (
        peak.peak - (sum(peak.parts[name] for name in ("parameters", "gradients", "optimizer")) if run == "offloaded" else 0)
    )


def test_each_layer_of_each_microbatch_is_drawn_once_forward_and_once_backward() -> None:
    setup, ((_, timeline, _, _), _) = of_run("shard")
    for name in setup.plan.layers:
        for phase in ("forward", "backward"):
            own = [
                event for event in timeline.ranks[0].events if (event.name, event.phase, event.part) == (name, phase, "compute")
            ]
            assert [event.microbatch for event in own] == list(range(setup.plan.options.microbatches))


def test_a_message_arrives_before_the_turn_that_waits_for_it() -> None:
    _, ((_, timeline, _, _), _) = of_run("tp, cp and stages")
    messages = [event for event in timeline.ranks[1].events if event.part == "message"]
    turns = [span for span in timeline.ranks[1].spans if str(span.phase) == "F"]
    assert [event.microbatch for event in messages] == [span.microbatch for span in turns]
    for event, span in zip(messages, turns, strict=True):
        assert event.end == pytest.approx(span.begin)
        sent = next(one for one in timeline.ranks[0].spans if one.microbatch == span.microbatch and str(one.phase) == "F")
        assert sent.end <= event.begin + 1e-9


def test_a_step_of_many_microbatches_has_a_piece_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = setup_of(4, layers=6)
    monkeypatch.setattr("meshwright.trace.in_time.step_timeline.MOST_PIECES", 10)
    ((forecast, timeline, _, _),) = drawn(setup, SLOW)
    own = [event for event in timeline.ranks[0].events if event.part == "compute"]
    assert [event.name for event in own] == ["all layers"] * 2 * setup.plan.options.microbatches
    assert timeline.ranks[0].total("waits", "slowed") == pytest.approx(forecast.parts["data ranks"])


def trace_of(run: str) -> tuple[TimeForecast, dict[str, Any]]:
    setup, ((forecast, timeline, memory, _), _) = of_run(run)
    return forecast, json.loads(json.dumps(chrome_trace(timeline, memory, setup.layout, "run"), allow_nan=False))


def test_the_trace_is_that_of_the_format() -> None:
    forecast, trace = trace_of("tp, cp and stages")
    assert trace["displayTimeUnit"] == "ms"
    names = {}
    for event in trace["traceEvents"]:
        assert event["ph"] in "XMC"
        assert isinstance(event["pid"], int)
        if event["ph"] == "M" and event["name"] in ("process_name", "thread_name"):
            names[event["pid"], event["tid"] if event["name"] == "thread_name" else None] = event["args"]["name"]
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) and value >= 0 for value in event["args"].values())
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"]) in names
    assert names[FIRST_PID, None] == "forecast: run, pp 0 (ranks 0 to 3 are alike)"
    assert {lane for (pid, tid), lane in names.items() if tid is not None} >= {"compute", "fsdp", "tp", "cp", "pp"}
    ends = [event["ts"] + event["dur"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert max(ends) == pytest.approx(1e6 * forecast.step_seconds)


def test_a_measured_step_stands_below_the_forecast(tmp_path: Path) -> None:
    with torch.profiler.profile() as profiler:
        torch.ones(64, 64) @ torch.ones(64, 64)
    file = tmp_path / "profile.json"
    profiler.export_chrome_trace(str(file))
    (tmp_path / "profile.json.gz").write_bytes(gzip.compress(file.read_bytes()))
    measured = measured_trace(file)
    assert measured_trace(tmp_path / "profile.json.gz") == measured
    _, forecast = trace_of("shard")
    both = beside_measured(forecast, measured)["traceEvents"]
    real = [event for event in both if str(event.get("pid")) != str(FIRST_PID)]
    assert len(both) == len(real) + len(forecast["traceEvents"]) == len(measured["traceEvents"]) + len(forecast["traceEvents"])
    timed = [event for event in real if event.get("ph") == "X" and event.get("cat") != "Trace"]
    assert min(event["ts"] for event in timed) == 0
    assert any(event["name"] == "aten::matmul" for event in timed)
    orders = {event["pid"]: event["args"]["sort_index"] for event in both if event["name"] == "process_sort_index"}
    assert orders[FIRST_PID] == ABOVE < min(order for pid, order in orders.items() if pid != FIRST_PID)
    assert {event["args"]["name"].split(":")[0] for event in both if event["name"] == "process_name"} == {
        "forecast",
        "measured",
    }


def test_a_measured_step_begins_where_the_profiler_says() -> None:
    timed = [{"ph": "X", "ts": 10, "dur": 5, "name": "warm-up"}, {"ph": "X", "ts": 40, "dur": 9, "name": "ProfilerStep#3"}]
    merged = beside_measured({"traceEvents": []}, {"traceEvents": timed})["traceEvents"]
    assert [event["ts"] for event in merged] == [-30, 0]


@pytest.mark.parametrize("content", ["{", "[]", '{"traceEvents": [{"ph": "X", "name": "no times"}]}', "\x1f\x8b"])
def test_what_is_no_trace_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "trace.json"
    file.write_bytes(content.encode("latin1"))
    with pytest.raises(ConfigError, match=r"--trace-with=.*trace\.json") as raised:
        measured_trace(file)
    assert raised.value.codes == ("cli.trace",)
    with pytest.raises(ConfigError, match="No such file"):
        measured_trace(tmp_path / "absent.json")


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", QUICKSTART, *arguments])
    assert isinstance(result.exception, ConfigError), result.output
    return str(result.exception)


def test_what_no_trace_can_be_written_for_is_refused(tmp_path: Path) -> None:
    out = f"--trace-out={tmp_path / 'step.json'}"
    assert "is a forecast; add --gpu" in refused(out)
    assert "goes into the file of --trace-out" in refused(f"--trace-with={tmp_path / 'x.json'}", "--gpu", "h100")
    assert "is a directory" in refused(f"--trace-out={tmp_path}", "--gpu", "h100")
    assert "No such file" in refused(out, f"--trace-with={tmp_path / 'x.json'}", "--gpu", "h100")
    assert "is the measured trace itself" in refused(out, f"--trace-with={tmp_path / 'step.json'}", "--gpu", "h100")


def test_the_command_writes_it(tmp_path: Path) -> None:
    def on_rank(_: int) -> str:
        return (
            CliRunner()
            .invoke(app, ["plan", QUICKSTART, "--gpu", "h100", f"--trace-out={tmp_path / 'step.json'}", "--json"])
            .output
        )

    (output,) = run_ranks(on_rank, 1, group=False)
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    ends = [event["ts"] + event["dur"] for event in events if event["ph"] == "X"]
    assert max(ends) == pytest.approx(1e6 * json.loads(output)["time"]["step_seconds"])

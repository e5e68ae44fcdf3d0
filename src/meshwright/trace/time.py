"""How long an optimizer step takes, from the work of a trace, the traffic of the plan, and the speed of devices and links.

Compute is a roofline: matrix products and attention at the share of the peak that they reach, all other operators at the
bandwidth of the memory, and no operator before the host has started it. What compute hides of FSDP's collectives is in
:mod:`meshwright.trace.in_time.fsdp_replay`, of a ring's and of a pipeline's messages in :mod:`meshwright.trace.overlap`; of the
other collectives over tp, cp and ep it hides none. A pipeline waits as its replay says. A range is given, which is narrower for
devices that were calibrated.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from meshwright.layout import Layout
from meshwright.plan.axes.data.unit_traffic import unit_bytes, unit_traffic, unshards
from meshwright.plan.axes.pipeline.stage_plan import parts_of_rank, stages_of_rank
from meshwright.plan.axes.pipeline.stage_rows import rows_on_stages
from meshwright.plan.cost.activation_traffic import activation_traffic, repeated_share
from meshwright.plan.cost.alike_ranks import alike_rank
from meshwright.plan.cost.hardware import Hardware
from meshwright.plan.cost.links import collective_seconds
from meshwright.plan.cost.price import totals
from meshwright.plan.result.sharding_plan import ShardingPlan, shard_axis
from meshwright.plan.update.states import orthogonalised, update_traffic
from meshwright.trace.few_layers import Traces
from meshwright.trace.in_time.fsdp_replay import Price, Recording, Turn, exposed_share
from meshwright.trace.layer_work import LayerWork, Rates, layers_on
from meshwright.trace.overlap import Speeds, exposed_of_ring, waits_of_pipeline
from meshwright.train.forecast import operations_of_step
from meshwright.train.start.setup import RunSetup
from meshwright.train.start.teacher_setup import BYTES

__all__ = [
    "COMPUTE",
    "HOST_MEMORY",
    "TEACHER",
    "StageTurns",
    "TimeForecast",
    "forecast_time",
    "price_of",
    "seconds_of_stages",
    "stage_turns",
]

COMPUTE = ("products", "attention", "elementwise", "launches")
"""The parts of a step that are the compute of its microbatches."""

TEACHER = "teacher"
"""The part of a step that is the pass of a teacher."""

HOST_MEMORY = 25e9
"""Bytes a second of the host's memory that the update of one rank reaches, with `cpu_offload`: assumed."""

RANGES = {False: (0.75, 1.4), True: (0.85, 1.2)}
"""The range of a step's time as shares of the forecast: on devices that are not calibrated, and on those that are."""


@dataclass(frozen=True)
class TimeForecast:
    """How long a step takes.

    Attributes:
        step_seconds: an optimizer step.
        low: the least that is likely, in seconds.
        high: the most that is likely, in seconds.
        tokens_per_second_per_device: tokens of a step over its time and all devices.
        model_tflops_per_device: operations of the model, without recomputation, a second and device, in 10^12.
        mfu: the same as a share of the device's peak in the dtype of compute.
        parts: seconds of the slowest rank: ``products``, ``attention``, ``elementwise``, ``launches`` (waits for the host to
            start operators), ``update``, ``host`` (copies of `cpu_offload`), ``bubble``, ``teacher`` (all of it together),
            ``beyond`` (what a calibration measured beside all that), and the communication that is not hidden, by axis.
        layers: the compute among them (``products``, ``attention``, ``elementwise``) by kind of layer: number and first name of
            the layers of a kind on that rank, and ``the rest``, to seconds.
        teacher: the same parts of the pass of a teacher alone; empty: there is none.
        rank: the slowest rank of ``pp``.
    """

    step_seconds: float
    low: float
    high: float
    tokens_per_second_per_device: float
    model_tflops_per_device: float
    mfu: float
    parts: Mapping[str, float]
    layers: Mapping[str, float] = field(default_factory=dict)
    teacher: Mapping[str, float] = field(default_factory=dict)
    rank: int = 0

    @property
    def all_together(self) -> Mapping[str, float]:
        """The parts of a step with those of its teacher, as a profile of the step has them."""
        own = {name: seconds for name, seconds in self.parts.items() if name != TEACHER}
        return {name: own.get(name, 0.0) + self.teacher.get(name, 0.0) for name in {**own, **self.teacher}}

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast as plain values, for JSON."""
        return asdict(self)


def forecast_time(setup: RunSetup, hardware: Hardware, traces: Traces | None = None) -> TimeForecast:
    """Forecast the time of a step. No process group may exist.

    Args:
        setup: the run.
        hardware: its devices.
        traces: the trace of the run, if it was made already.
    """
    plan, traces = setup.plan, traces or Traces(setup)
    whole = LayerWork.of(traces)
    rates = Rates.of(setup, hardware)
    peak, bandwidth, reached, spent = rates.peak, rates.bandwidth, rates.reached, rates.spent
    microbatches, layout = plan.options.microbatches, plan.layout

    ranks = range(layout.size("pp"))
    works = {rank: spent(whole.on_rank(plan, rank)) for rank in dict.fromkeys(alike_rank(plan, rank) for rank in ranks)}
    rank = max(works, key=lambda one: sum(works[one].values()))
    parts = {name: microbatches * seconds for name, seconds in works[rank].items()}
    price = price_of(plan.layout, hardware)
    for item in activation_traffic(plan):
        if item.size is not None and item.kind != "send":
            seconds = collective_seconds(layout, hardware, item.axis, item.kind, item.calls, item.size)
            load = traces.load if item.kind == "all_to_all" and item.axis == "ep" else 1.0
            parts[item.axis] = parts.get(item.axis, 0.0) + (1 + repeated_share(plan, item.axis)) * load * seconds
    own = rows_on_stages(plan, stages_of_rank(plan, rank))
    speeds = Speeds(peak * reached, hardware.fp32_tflops * reached * 1e12, bandwidth)
    if ring := exposed_of_ring(own, setup.config.data.sequence_length, speeds, price):
        parts["cp"] = parts.get("cp", 0.0) + ring
    waits = sum(parts.get(axis, 0.0) for axis in ("tp", "cp", "ep")) / microbatches / max(1, len(own.layers))
    if plan.stages:
        parts["bubble"], parts["pp"] = waits_of_pipeline(plan, rank, seconds_of_stages(plan, whole, rates, waits), price)
    parts["data ranks"] = 0.0
    for one in stages_of_rank(plan, rank):
        parts["data ranks"] += stage_turns(plan, one, whole, rates, waits).exposed(hardware)
    shards = totals(plan)  # of the rank that stores the most: the others wait for it
    updated = 2 * shards.parameter_bytes + shards.gradient_bytes + 2 * shards.optimizer_bytes
    parts["update"] = updated / (HOST_MEMORY if plan.options.cpu_offload else bandwidth)
    for item in update_traffic(own):
        parts["update"] += collective_seconds(layout, hardware, item.axis, item.kind, item.calls, item.size or 0)
    for dtype, muon in orthogonalised(own).items():
        rate = hardware.bf16_tflops if dtype == "bfloat16" else hardware.fp32_tflops
        parts["update"] += 2 * muon.work / (reached * rate * 1e12)
    if plan.options.cpu_offload:  # shards go to the device for each gather, gradients to the host
        copies = max(unshards(plan, unit) for unit in plan.fsdp_units)
        parts["host"] = (copies * shards.parameter_bytes + shards.gradient_bytes) / (hardware.host_gb_s * 1e9)
    teacher = _teacher(setup, hardware)
    if teacher:
        parts[TEACHER] = sum(teacher.values())
    parts["beyond"] = hardware.beyond * sum(parts.values())
    step = sum(parts.values())
    training = setup.config.training
    tokens = training.global_batch_size * setup.config.data.sequence_length
    traced = whole.whole_model() * microbatches * layout.world_size / layout.size("pp")
    operations = operations_of_step(setup) or traced
    tflops = operations / layout.world_size / step / 1e12
    speed = tokens / step / layout.world_size
    low, high = (share * step for share in RANGES[hardware.calibrated])
    layers = {
        label: microbatches * sum(seconds for name, seconds in spent(work).items() if name != "launches")
        for label, work in whole.by_kind(plan, rank).items()
    }
    return TimeForecast(step, low, high, speed, tflops, 1e12 * tflops / peak, parts, layers, teacher, rank)


def _teacher(setup: RunSetup, hardware: Hardware) -> dict[str, float]:
    """Return the parts of the pass of a teacher before each step: a forward of all its microbatches.

    A collective of activations has one like it in backward, so half of those of a step are of the forward; of a ring a third,
    which sends keys and values forward, and them with their gradients backward. Gathers hide behind all of the compute. Stages
    wait for the first microbatch to come, and for the last one to go.
    """
    if setup.teacher is None:
        return {}
    plan, microbatches = setup.teacher.plan, setup.plan.options.microbatches
    rates, traces = Rates.of(setup.teacher, hardware), Traces(setup.teacher)
    whole, price = LayerWork.of(traces), price_of(plan.layout, hardware)
    stages = range(plan.layout.size("pp"))
    alike = dict.fromkeys(alike_rank(plan, rank) for rank in stages)
    works = {rank: rates.spent(whole.forward_on_rank(plan, rank)) for rank in alike}
    rank = max(works, key=lambda one: sum(works[one].values()))
    parts = {name: microbatches * seconds for name, seconds in works[rank].items()}
    compute, share = sum(parts.values()), microbatches / plan.options.microbatches
    for item in activation_traffic(plan):
        if item.size is not None and (item.kind != "send" or item.axis == "pp"):
            seconds = collective_seconds(plan.layout, hardware, item.axis, item.kind, item.calls, item.size)
            load = traces.load if item.kind == "all_to_all" and item.axis == "ep" else 1.0
            parts[item.axis] = parts.get(item.axis, 0.0) + share * load * seconds / 2
    own = rows_on_stages(plan, stages_of_rank(plan, rank))
    speeds = Speeds(rates.peak * rates.reached, hardware.fp32_tflops * rates.reached * 1e12, rates.bandwidth)
    if ring := exposed_of_ring(own, setup.config.data.sequence_length, speeds, price):
        parts["cp"] = parts.get("cp", 0.0) + share * ring / 3
    if plan.stages:
        parts["bubble"] = (len(stages) - 1) * compute / microbatches
        words = BYTES * setup.config.teacher.top_k * (setup.plan.options.tokens or 0) if setup.config.teacher else 0
        parts["pp"] = parts.get("pp", 0.0) + microbatches * price("pp", "all_reduce", words)
    gathers = 0.0
    for unit in own.fsdp_units:
        calls = sum(part.forwards * part.places for part in own.parts(unit)) if not unit.part_of else 0
        calls *= microbatches if unit.reshard_after_forward else 1
        size = unit_bytes(own, unit)[0]
        gathers += collective_seconds(
            plan.layout, hardware, shard_axis(plan.layout, unit.kind), "all_gather", calls, calls * size
        )
    parts["data ranks"] = gathers - hardware.overlap * min(gathers, compute)
    return parts


@dataclass(frozen=True)
class StageTurns:
    """What FSDP2 is replayed with on a stage.

    Attributes:
        plan: the part of the plan on the stage.
        turns: seconds of its layers in a microbatch, by name.
        rest: the same of what is outside of them.
        waits: seconds of each turn of a layer, forward or backward, that are collectives inside of it.
    """

    plan: ShardingPlan
    turns: Mapping[str, Turn]
    rest: float
    waits: float

    def exposed(self, hardware: Hardware, recording: Recording | None = None) -> float:
        """Return the seconds of a step in which collectives over data ranks are not hidden."""
        price = price_of(self.plan.layout, hardware)
        hidden = 1 - exposed_share(self.plan, self.turns, self.rest, price, recording)
        return (1 - hardware.overlap * hidden) * _seconds_of_units(self.plan, price)


def stage_turns(plan: ShardingPlan, stage: int, whole: LayerWork, rates: Rates, waits: float) -> StageTurns:
    """Return the turns of a stage.

    Args:
        plan: the whole plan.
        stage: index of the stage; 0 without a pipeline.
        whole: the work of layers.
        rates: how fast it is done.
        waits: seconds of collectives inside of a layer in a microbatch, half of them forward.
    """
    part = rows_on_stages(plan, [stage])
    both, ahead = (
        {kind: sum(rates.spent(work).values()) for kind, work in works.items()} for works in (whole.layers, whole.forward)
    )
    turns = {kind: Turn(ahead[kind] + waits / 2, both[kind] - ahead[kind] + waits / 2) for kind in both}
    of_layers = {name: turns[whole.kinds[name]] for name in part.layers}
    return StageTurns(part, of_layers, sum(rates.spent(whole.outside_layers(plan, [stage])).values()), waits / 2)


def seconds_of_stages(plan: ShardingPlan, whole: LayerWork, rates: Rates, waits: float) -> list[float]:
    """Return for each stage of a pipeline how long all turns of a microbatch take; see :func:`stage_turns`."""
    found, works = [0.0] * len(plan.stages), dict[tuple[int, ...], float]()
    for rank in range(plan.layout.size("pp")):
        alike = parts_of_rank(plan, alike_rank(plan, rank))
        for stages, first in zip(parts_of_rank(plan, rank), alike, strict=True):
            if first not in works:
                works[first] = sum(rates.spent(whole.on_stages(plan, first)).values()) + waits * len(layers_on(plan, first))
            total = works[first]
            # Of several passes, those between the first and the last have no backward.
            parts = [plan.stages[stage].cost * (3 if stage in (stages[0], stages[-1]) else 1) for stage in stages]
            for stage, part in zip(stages, parts, strict=True):
                found[stage] = total * part / sum(parts)
    return found


def price_of(layout: Layout, hardware: Hardware) -> Price:
    """Return what says the seconds of one collective of a layout, by axis, kind and bytes. Most units ask the same."""
    return cache(lambda axis, kind, size: collective_seconds(layout, hardware, axis, kind, 1, size))


def _seconds_of_units(stage: ShardingPlan, price: Price) -> float:
    """Return the seconds of all collectives over data ranks in a step."""
    seconds = 0.0
    for unit in stage.fsdp_units:
        axis, traffic = shard_axis(stage.layout, unit.kind), unit_traffic(stage, unit)
        calls = (
            (axis, "all_gather", traffic.all_gathers, traffic.all_gather_bytes),
            (axis, "reduce_scatter", traffic.reduce_scatters, traffic.reduce_scatter_bytes),
            ("dp_replicate", "all_reduce", traffic.all_reduces, traffic.all_reduce_bytes),
        )
        seconds += sum(number * price(where, kind, size // number) for where, kind, number, size in calls if number)
    return seconds

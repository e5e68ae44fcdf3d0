"""How long an optimizer step takes, from the work of a trace, the traffic of the plan, and the speed of devices and links.

Compute is a roofline: matrix products and attention at the share of the peak that they reach, all other operators at the
bandwidth of the memory, and no operator before the host has started it. What compute hides of FSDP's collectives, of a ring's
and of a pipeline's messages is in :mod:`meshwright.trace.overlap`; of the other collectives over tp, cp and ep it hides none. A
pipeline waits as its replay says. A range is given, which is narrower for devices that were calibrated.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from meshwright.layout import Layout
from meshwright.plan.axes.data.unit_traffic import unit_traffic
from meshwright.plan.axes.pipeline.stage_plan import on_stages, stages_of_rank
from meshwright.plan.cost.activation_traffic import activation_traffic
from meshwright.plan.cost.hardware import Hardware
from meshwright.plan.cost.links import collective_seconds
from meshwright.plan.cost.price import totals_of_rank
from meshwright.plan.result.sharding_plan import ShardingPlan, shard_axis
from meshwright.plan.update.states import orthogonalised, update_traffic
from meshwright.trace.memory import Traces
from meshwright.trace.overlap import Speeds, Turn, exposed_of_ring, exposed_share, waits_of_pipeline
from meshwright.trace.step import FORWARD, LOSS, UPDATE, StepTrace
from meshwright.trace.work import Work
from meshwright.train.forecast import operations_of_step
from meshwright.train.start.setup import RunSetup

__all__ = ["TimeForecast", "forecast_time"]

OPERATIONS = (Work.PRODUCTS, Work.PRODUCTS_FP32, Work.ATTENTION)

MEMORY_REACHED = 0.85
"""Share of the memory's bandwidth that elementwise operators reach: assumed."""

SHAPES = 0.85
"""Share of the best shape's speed that the products of a model reach, beside the kernels of collectives: fitted on row 1 of
benchmarks/predict.py. A calibrated device has the speed of a run's own shapes."""

FUSED = 0.5
"""What the compiler leaves of the bytes that operators beside products move, and of the operators: assumed."""

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
            start operators), ``update``, ``host`` (copies of `cpu_offload`), ``bubble``, ``beyond`` (what a
            calibration measured beside all that), and the communication that is not hidden, by axis.
        layers: the compute among them (``products``, ``attention``, ``elementwise``) by kind of layer: number and first name of
            the layers of a kind on that rank, and ``the rest``, to seconds.
    """

    step_seconds: float
    low: float
    high: float
    tokens_per_second_per_device: float
    model_tflops_per_device: float
    mfu: float
    parts: Mapping[str, float]
    layers: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast as plain values, for JSON."""
        return asdict(self)


def forecast_time(setup: RunSetup, hardware: Hardware, traces: Traces | None = None) -> TimeForecast:
    """Forecast the time of a step. No process group may exist.

    Args:
        setup: the run.
        hardware: its devices.
        traces: traces of the run, if some were made already.
    """
    plan, traces = setup.plan, traces or Traces(setup)
    whole = _Work.of(traces)
    peak = hardware.peak(plan.options.param_dtype or setup.config.model.dtype) * 1e12
    bandwidth, fused = hardware.hbm_tb_s * MEMORY_REACHED * 1e12, FUSED if plan.options.compile else 1.0
    reached = hardware.achievable * (1.0 if hardware.calibrated else SHAPES)
    microbatches, layout = plan.options.microbatches, plan.layout

    def spent(work: Counter[Work]) -> dict[str, float]:
        products = work[Work.PRODUCTS] / hardware.bf16_tflops + work[Work.PRODUCTS_FP32] / hardware.fp32_tflops
        found = {
            "products": products / (reached * 1e12),
            "attention": work[Work.ATTENTION] / (peak * hardware.attention),
            "elementwise": fused * work[Work.MOVED] / bandwidth,
        }
        found["launches"] = max(0.0, fused * work[Work.STARTED] * hardware.launch_us * 1e-6 - sum(found.values()))
        return found

    ranks = range(layout.size("pp"))
    works = [spent(whole.on_rank(plan, rank)) for rank in ranks]
    rank = max(ranks, key=lambda one: sum(works[one].values()))
    parts = {name: microbatches * seconds for name, seconds in works[rank].items()}
    price = partial(_price, plan.layout, hardware)
    for item in activation_traffic(plan):
        if item.size is not None and item.kind != "send":
            seconds = collective_seconds(layout, hardware, item.axis, item.kind, item.calls, item.size)
            load = traces.load if item.kind == "all_to_all" and item.axis == "ep" else 1.0
            parts[item.axis] = parts.get(item.axis, 0.0) + load * seconds
    own = on_stages(plan, stages_of_rank(plan, rank))
    speeds = Speeds(peak * reached, hardware.fp32_tflops * reached * 1e12, bandwidth)
    if ring := exposed_of_ring(own, setup.config.data.sequence_length, speeds, price):
        parts["cp"] = parts.get("cp", 0.0) + ring
    waits = sum(parts.get(axis, 0.0) for axis in ("tp", "cp", "ep")) / microbatches / max(1, len(own.layers))
    if plan.stages:
        parts["bubble"], parts["pp"] = waits_of_pipeline(plan, rank, sum(parts.values()), price)
    parts["data ranks"] = 0.0
    for one in stages_of_rank(plan, rank):
        stage = on_stages(plan, [one])
        kinds = {name: kind for name, kind in whole.kinds.items() if name in stage.layers}
        both = {name: sum(spent(whole.layers[kind]).values()) for name, kind in kinds.items()}
        ahead = {name: sum(spent(whole.forward[kind]).values()) for name, kind in kinds.items()}
        turns = {name: Turn(ahead[name] + waits / 2, both[name] - ahead[name] + waits / 2) for name in kinds}
        rest = sum(spent(whole.outside_layers(plan, [one])).values())
        hidden = 1 - exposed_share(stage, turns, rest, price)
        parts["data ranks"] += (1 - hardware.overlap * hidden) * _seconds_of_units(stage, hardware)
    shards = totals_of_rank(plan, rank)
    updated = 2 * shards.parameter_bytes + shards.gradient_bytes + 2 * shards.optimizer_bytes
    parts["update"] = updated / (HOST_MEMORY if plan.options.cpu_offload else bandwidth)
    for item in update_traffic(own):
        parts["update"] += collective_seconds(layout, hardware, item.axis, item.kind, item.calls, item.size or 0)
    for dtype, muon in orthogonalised(own).items():
        rate = hardware.bf16_tflops if dtype == "bfloat16" else hardware.fp32_tflops
        parts["update"] += 2 * muon.work / (reached * rate * 1e12)
    if plan.options.cpu_offload:  # shards go to the device for each gather, gradients to the host
        gathers = max(unit_traffic(plan, unit).all_gathers for unit in plan.fsdp_units)
        parts["host"] = (gathers * shards.parameter_bytes + shards.gradient_bytes) / (hardware.host_gb_s * 1e9)
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
    return TimeForecast(step, low, high, speed, tflops, 1e12 * tflops / peak, parts, layers)


def _price(layout: Layout, hardware: Hardware, axis: str, kind: str, size: int) -> float:
    return collective_seconds(layout, hardware, axis, kind, 1, size)


def _seconds_of_units(stage: ShardingPlan, hardware: Hardware) -> float:
    """Return the seconds of all collectives over data ranks in a step."""
    total = 0.0
    for unit in stage.fsdp_units:
        axis, traffic = shard_axis(stage.layout, unit.kind), unit_traffic(stage, unit)
        calls = (
            (axis, "all_gather", traffic.all_gathers, traffic.all_gather_bytes),
            (axis, "reduce_scatter", traffic.reduce_scatters, traffic.reduce_scatter_bytes),
            ("dp_replicate", "all_reduce", traffic.all_reduces, traffic.all_reduce_bytes),
        )
        total += sum(collective_seconds(stage.layout, hardware, *call) for call in calls)
    return total


@dataclass(frozen=True)
class _Work:
    """The work of a microbatch on a rank.

    Attributes:
        layers: kind of a layer to the work of one, forward and backward.
        forward: the same, of forward alone.
        rest: the work outside of layers.
        loss: what of it is that of the output head and the loss.
        kinds: the kind of each layer.
        known: kinds whose work was told apart; that of the others is between the rest and the layers.
    """

    layers: Mapping[int, Counter[Work]]
    forward: Mapping[int, Counter[Work]]
    rest: Counter[Work]
    loss: Counter[Work]
    kinds: Mapping[str, int]
    known: frozenset[int]

    @classmethod
    def of(cls, traces: Traces) -> "_Work":
        """Read the work from traces: a layer's is by how much that of one more layer is larger."""
        kinds, first = traces.kinds, traces.first
        layers, forward = {}, {}
        whole = _microbatch_work(traces.of(first)[0])
        names = dict(zip(traces.setup.plan.layers, kinds, strict=True))
        if first == len(kinds):  # all of them were traced, and count alike
            each, own = ({kind: value / first for kind, value in work.items()} for work in (_sum(whole), whole[FORWARD]))
            loss_work = {kind: value / first for kind, value in whole[LOSS].items()}
            alike = Counter({kind: each.get(kind, 0) - loss_work.get(kind, 0) for kind in Work})
            forward = {kind: Counter(own) for kind in kinds}
            return cls(dict.fromkeys(kinds, alike), forward, whole[LOSS], whole[LOSS], names, frozenset(kinds))
        for kind in set(kinds):
            # A kind that only the first layers have counts as that of the next one.
            place = kinds.index(kind, first) if kind in kinds[first:] else min(first, len(kinds) - 1)
            more, fewer = (_microbatch_work(traces.of(number)[0]) for number in (place + 1, place))
            forward[kind] = _difference(more[FORWARD], fewer[FORWARD])
            layers[kind] = _difference(_sum(more), _sum(fewer))
        rest = _sum(whole)
        for kind in kinds[:first]:
            rest = _difference(rest, layers[kind])
        return cls(layers, forward, rest, whole[LOSS], names, frozenset(kinds[first:]))

    def on_rank(self, plan: ShardingPlan, rank: int) -> Counter[Work]:
        """Return the work of a rank of `pp`."""
        total = Counter(dict.fromkeys(Work, 0))
        for name in self._layers_of(plan, rank):
            total.update(self.layers[self.kinds[name]])
        total.update(self.outside_layers(plan, stages_of_rank(plan, rank)))
        return total

    def outside_layers(self, plan: ShardingPlan, stages: Sequence[int]) -> Counter[Work]:
        """Return the work of a microbatch outside of layers on some stages: with a pipeline, that of the head and the loss."""
        if not plan.stages:
            return self.rest
        return self.loss if len(plan.stages) - 1 in stages else Counter()

    def by_kind(self, plan: ShardingPlan, rank: int) -> dict[str, Counter[Work]]:
        """Return the work of a rank of `pp` by kind of layer, and the rest."""
        names = self._layers_of(plan, rank)
        alike: dict[int, list[str]] = {}
        for name in names:
            if self.kinds[name] in self.known:
                alike.setdefault(self.kinds[name], []).append(name)
        found = {
            f"{len(same_layers)} x {same_layers[0]}": Counter(
                {one: value * len(same_layers) for one, value in self.layers[kind].items()}
            )
            for kind, same_layers in alike.items()
        }
        return {**found, "the rest": _difference(self.on_rank(plan, rank), _sum(found))}

    def _layers_of(self, plan: ShardingPlan, rank: int) -> list[str]:
        if not plan.stages:
            return list(plan.layers)
        return [name for stage in stages_of_rank(plan, rank) for name in plan.stages[stage].layers]

    def whole_model(self) -> float:
        """Return the operations of the model for a rank's microbatch: forward, and twice as many backward."""
        forward = sum(self.forward[kind][one] for kind in self.kinds.values() for one in OPERATIONS)
        return 3 * forward + self.loss[Work.PRODUCTS] + self.loss[Work.PRODUCTS_FP32]


def _microbatch_work(trace: StepTrace) -> dict[str, Counter[Work]]:
    """Return the work of one microbatch, by moment, without the update."""
    return {
        name: Counter({kind: value / trace.microbatches for kind, value in work.items()})
        for name, work in trace.work.items()
        if name != UPDATE
    }


def _sum(work: Mapping[str, Counter[Work]]) -> Counter[Work]:
    total: Counter[Work] = Counter()
    for one in work.values():
        total.update(one)
    return total


def _difference(more: Counter[Work], fewer: Counter[Work]) -> Counter[Work]:
    return Counter({kind: more[kind] - fewer[kind] for kind in Work})

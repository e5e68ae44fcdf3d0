"""The work of a rank by layers, from a trace of a few, and the seconds that it takes on a device."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.plan.axes.pipeline.stage_plan import stages_of_rank
from meshwright.plan.cost.hardware import Hardware
from meshwright.plan.given.closed_choices import ActivationCheckpointing
from meshwright.plan.given.names import nearest
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.trace.few_layers import Traces
from meshwright.trace.live import TOGETHER
from meshwright.trace.step import FORWARD, LOSS, UPDATE
from meshwright.trace.work import Work, total
from meshwright.train.start.setup import RunSetup

__all__ = ["MEMORY_REACHED", "SHAPES", "LayerWork", "Rates", "layers_on"]

OPERATIONS = (Work.PRODUCTS, Work.PRODUCTS_FP32, Work.ATTENTION)

MEMORY_REACHED = 0.85
"""Share of the memory's bandwidth that elementwise operators reach: assumed."""

SHAPES = 0.85
"""Share of the best shape's speed that the products of a model reach, beside the kernels of collectives: fitted on row 1 of
benchmarks/predict.py. A calibrated device has the speed of a run's own shapes."""

FUSED = 0.5
"""What the compiler leaves of the bytes that operators beside products move, and of the operators: assumed."""

PER_OPERATOR, PER_UNIT, PER_UNIT_AND_STEP = 2.4, 160, 190
"""What the host does in a step, in starts of an operator (``launch_us``): for an operator, with the Python of its module; for
an FSDP unit and microbatch; and for a unit and step (clipping, optimizer). Fitted on steps on an H200 that were bound by the
host, and on their parts on a CPU (docs/measurements.md, "On a GPU")."""
WATCHED = 4.3
"""What the dispatch modes of selective recomputation add for an operator, in the same unit. Compiled layers have none."""


@dataclass(frozen=True)
class Rates:
    """How fast a device works in a run.

    Attributes:
        hardware: the device.
        peak: operations a second in the dtype of compute, at most.
        reached: share of the peak that matrix products reach.
        bandwidth: bytes a second that elementwise operators reach.
        fused: what the compiler leaves of these bytes and of the operators.
        per_operator: microseconds of the host for an operator.
        per_unit: microseconds of the host for an FSDP unit, in each microbatch.
    """

    hardware: Hardware
    peak: float
    reached: float
    bandwidth: float
    fused: float
    per_operator: float
    per_unit: float

    @classmethod
    def of(cls, setup: RunSetup, hardware: Hardware) -> "Rates":
        """Return those of a run on devices of a kind."""
        options = setup.plan.options
        watched = WATCHED * any(unit.activation_checkpointing is ActivationCheckpointing.SELECTIVE for unit in setup.plan.units)
        per_operator = 1.0 if options.compile else PER_OPERATOR + watched
        return cls(
            hardware,
            hardware.peak(options.param_dtype or setup.config.model.dtype) * 1e12,
            hardware.achievable * (1.0 if hardware.calibrated else SHAPES),
            hardware.hbm_tb_s * MEMORY_REACHED * 1e12,
            FUSED if options.compile else 1.0,
            per_operator * hardware.launch_us,
            (PER_UNIT + PER_UNIT_AND_STEP / options.microbatches) * hardware.launch_us,
        )

    def spent(self, work: Counter[Work]) -> dict[str, float]:
        """Return the seconds of some work: ``products``, ``attention``, ``elementwise`` and ``launches``."""
        hardware = self.hardware
        products = work[Work.PRODUCTS] / hardware.bf16_tflops + work[Work.PRODUCTS_FP32] / hardware.fp32_tflops
        # Thin products take as long as their bytes.
        thin = work[Work.THIN_MOVED] / self.bandwidth - work[Work.THIN] / (self.reached * hardware.bf16_tflops * 1e12)
        found = {
            "products": products / (self.reached * 1e12) + max(0.0, thin),
            "attention": work[Work.ATTENTION] / (self.peak * hardware.attention),
            "elementwise": self.fused * work[Work.MOVED] / self.bandwidth,
        }
        host = self.fused * self.per_operator * work[Work.STARTED] + self.per_unit * work[Work.UNITS]
        found["launches"] = max(0.0, 1e-6 * host - sum(found.values()))
        return found


@dataclass(frozen=True)
class LayerWork:
    """The work of a microbatch on a rank.

    Attributes:
        layers: kind of a layer to the work of one, forward and backward.
        forward: the same, of forward alone.
        rest: the work outside of layers.
        loss: what of it is that of the output head and the loss.
        kinds: the kind of each layer.
    """

    layers: Mapping[int, Counter[Work]]
    forward: Mapping[int, Counter[Work]]
    rest: Counter[Work]
    loss: Counter[Work]
    kinds: Mapping[str, int]

    @classmethod
    def of(cls, traces: Traces) -> "LayerWork":
        """Read the work from the trace: a layer's is that of the traced layer which stands for it."""
        plan, kinds, step = traces.setup.plan, traces.kinds, traces.trace.step
        works, work = step.works, step.work
        names = dict(zip(plan.layers, kinds, strict=True))
        units = Counter("" if unit.together else nearest(f"{unit.name}.", names) for unit in plan.fsdp_units)
        together = total(done.get(TOGETHER, {}) for moment, done in works.items() if moment != UPDATE)
        layers, forward = {}, {}
        for kind in set(kinds):
            example = traces.examples.get(kind, "")
            forward[kind] = total([works[FORWARD].get(example, {})])
            share = {one: int(traces.shares[kind] * value) for one, value in together.items()}
            layers[kind] = total((forward[kind], works.get(example, {}).get(example, {}), share))
        rest = total(done for moment, done in work.items() if moment != UPDATE)
        for kind in kinds[: traces.first]:
            rest = _difference(rest, layers[kind])
        times = 1 / step.microbatches
        layers, forward = ({kind: _times(done, times) for kind, done in found.items()} for found in (layers, forward))
        for name, kind in names.items():
            layers[kind][Work.UNITS] = units[name]
        rest = Counter({**_times(rest, times), Work.UNITS: units[""]})
        return cls(layers, forward, rest, _times(work[LOSS], times), names)

    def on_rank(self, plan: ShardingPlan, rank: int) -> Counter[Work]:
        """Return the work of a rank of `pp`."""
        return self.on_stages(plan, stages_of_rank(plan, rank))

    def on_stages(self, plan: ShardingPlan, stages: Sequence[int]) -> Counter[Work]:
        """Return the work of some stages of a rank."""
        of_layers = self._of_layers(self.layers, layers_on(plan, stages))
        return total((dict.fromkeys(Work, 0), of_layers, self.outside_layers(plan, stages)))

    def forward_on_rank(self, plan: ShardingPlan, rank: int) -> Counter[Work]:
        """Return the work of a rank of `pp` in a forward alone, of which that of the head is a third of its work in a step."""
        stages = stages_of_rank(plan, rank)
        of_layers = self._of_layers(self.forward, layers_on(plan, stages))
        of_head = _times(self.loss, 1 / 3) if not plan.stages or len(plan.stages) - 1 in stages else {}
        return total((dict.fromkeys(Work, 0), of_layers, of_head))

    def _of_layers(self, of_kinds: Mapping[int, Counter[Work]], names: Iterable[str]) -> Counter[Work]:
        """Return the work of some layers together, if this is that of one of each kind."""
        return total(_times(of_kinds[kind], number) for kind, number in Counter(self.kinds[name] for name in names).items())

    def outside_layers(self, plan: ShardingPlan, stages: Sequence[int]) -> Counter[Work]:
        """Return the work of a microbatch outside of layers on some stages: with a pipeline, that of the head and the loss."""
        if not plan.stages:
            return self.rest
        return self.loss if len(plan.stages) - 1 in stages else Counter()

    def by_kind(self, plan: ShardingPlan, rank: int) -> dict[str, Counter[Work]]:
        """Return the work of a rank of `pp` by kind of layer, and the rest."""
        stages = stages_of_rank(plan, rank)
        alike: dict[int, list[str]] = {}
        for name in layers_on(plan, stages):
            alike.setdefault(self.kinds[name], []).append(name)
        found = {f"{len(names)} x {names[0]}": _times(self.layers[kind], len(names)) for kind, names in alike.items()}
        return {**found, "the rest": self.outside_layers(plan, stages)}

    def whole_model(self) -> float:
        """Return the operations of the model for a rank's microbatch: forward, and twice as many backward."""
        forward = self._of_layers(self.forward, self.kinds)
        return 3 * sum(forward[one] for one in OPERATIONS) + self.loss[Work.PRODUCTS] + self.loss[Work.PRODUCTS_FP32]


def layers_on(plan: ShardingPlan, stages: Sequence[int]) -> list[str]:
    """Return the layers of some stages of a rank. Those of several passes share their layers, with the work of all passes."""
    if not plan.stages:
        return list(plan.layers)
    return list(dict.fromkeys(name for stage in stages for name in plan.stages[stage].layers))


def _times(work: Mapping[Work, float], times: float) -> Counter[Work]:
    return Counter({kind: times * value for kind, value in work.items()})


def _difference(more: Counter[Work], fewer: Counter[Work]) -> Counter[Work]:
    return Counter({kind: more[kind] - fewer[kind] for kind in Work})

"""What the fullest rank of a run holds at the worst moment, and of what: closed forms of the plan, and traces of some layers.

A step has few moments in which a rank may hold the most: the forward, the loss, the backward of the last two layers and of the
first two, and the update. In each of them, what a rank holds grows by the same bytes with each further layer of a kind. So
traces of a few layers give the bytes of all of them. Shards (of parameters, gradients, and the optimizer's state) depend on the
number of ranks, and come from the plan.

With a pipeline, a rank holds the activations of several microbatches. Their number comes from the replay of the schedule
(:mod:`meshwright.plan.axes.pipeline.replay`), and the rest from the plan.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from meshwright.plan.axes.pipeline.replay import replay_of_plan
from meshwright.plan.axes.pipeline.stage_plan import stages_of_rank
from meshwright.plan.axes.pipeline.stage_rows import rows_on_stages
from meshwright.plan.cost.price import Totals, totals, totals_of_rank
from meshwright.plan.given.closed_choices import SyncPolicy
from meshwright.plan.given.names import nearest
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.plan.update.states import orthogonalised
from meshwright.trace.fewer import kinds_of_layers, layers_of_config
from meshwright.trace.kept_traces import SmallTrace, TraceStore
from meshwright.trace.live import Kind
from meshwright.trace.step import LOSS, UPDATE
from meshwright.train.start.setup import RunSetup

__all__ = ["MemoryForecast", "Traces", "forecast_memory", "kept_activations", "memory_moments"]

LEAST = 4
"""Layers of the smallest trace: the first two and the last two, whose backward differs from that of the others."""

_LAST = (3, 2)
"""Last layers that a trace must have of the same kinds as the run, if it can: in the backward of the last but one, the layer
before it is gathered. Otherwise the last two, whose backward are moments of their own."""

_LATE = frozenset(("backward of layer 0", "backward of layer 1", UPDATE))
"""Moments in which nothing of the last layers is held anymore but their gradients."""


@dataclass(frozen=True)
class MemoryForecast:
    """What the fullest rank holds at the worst moment. All sizes are in bytes.

    Attributes:
        moment: the worst moment.
        parts: what it holds then: ``parameters``, ``optimizer``, ``gradients`` (shards), ``gathered`` (whole parameters),
            ``unsharded_gradients``, ``activations``, ``logits``, ``communication``, ``buffers`` and ``update`` (what an
            optimizer holds in its step beside its state).
        traced: numbers of layers of the models that were traced.
        rank: the rank of ``pp``.
        of_microbatch: with stages, what of the activations is that of one microbatch, as if it went through all stages of
            the rank.
    """

    moment: str
    parts: Mapping[str, int]
    traced: tuple[int, ...]
    rank: int = 0
    of_microbatch: int = 0

    @property
    def peak(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


@dataclass
class Traces:
    """Traces of the first layers of a run, each made once.

    Args:
        setup: the run.
        device: whether kernels keep what they keep on a device, and not what they keep on a CPU.
        load: tokens that the experts of the fullest rank of ``ep`` get, over an even share.
        store: where traces come from; ``None``: one of its own.
    """

    setup: RunSetup
    device: bool = True
    load: float = 1.0
    store: TraceStore | None = None
    made: dict[int, SmallTrace] = field(default_factory=dict)

    @cached_property
    def kinds(self) -> list[int]:
        """The kind of each layer of the run."""
        return kinds_of_layers(self.setup.plan)

    @property
    def first(self) -> int:
        """The number of layers of the smallest trace: at least one of each kind, and the last ones as the run has them."""
        kinds, whole = self.kinds, len(self.kinds)
        if layers_of_config(self.setup) != whole:  # several stacks: no number of layers cuts all of them alike
            return whole
        least = max(LEAST, 1 + max(kinds.index(kind) for kind in set(kinds)))
        alike = (size for last in _LAST for size in range(least, whole - 1) if kinds[size - last : size] == kinds[-last:])
        return next(alike, whole)

    def place_of(self, kind: int) -> int:
        """Return a number of layers, traced or to be traced, after which a layer of a kind comes in the run.

        A kind that only the first layers have counts as that of a later one.
        """
        kinds, first = self.kinds, self.first
        places = [place for place in (first - 1, first, *range(LEAST, len(kinds))) if place >= LEAST and kinds[place] == kind]
        # After one of its own kind, the last layer stays the same, and with it what is gathered for it.
        alike = [place for place in places if kinds[place - 1] == kind]
        return next(iter(alike or places), min(first, len(kinds) - 1))

    def of(self, layers: int) -> SmallTrace:
        """Return the trace of the first layers."""
        if layers not in self.made:
            if self.store is None:
                self.store = TraceStore(self.setup)
            self.made[layers] = self.store.get(self.setup, layers, device=self.device, load=self.load)
        return self.made[layers]

    def moments(self, layers: int) -> dict[str, Counter[Kind]]:
        """Return the moments under names that do not depend on the number of layers."""
        trace = self.of(layers)
        few = min(2, len(trace.layers))
        names = {trace.layers[place]: f"backward of layer {place}" for place in range(few)}
        whole = len(self.setup.plan.layers)
        names |= {trace.layers[-place]: f"backward of layer {whole - place}" for place in range(few, 0, -1)}
        return {names.get(name, name): Counter(dict(held)) for name, held in trace.step.moments.items()}


def forecast_memory(setup: RunSetup, traces: Traces | None = None) -> MemoryForecast:
    """Forecast the memory of a run: its worst moment (:func:`memory_moments`)."""
    return max(memory_moments(setup, traces), key=lambda found: found.peak)


def memory_moments(setup: RunSetup, traces: Traces | None = None) -> list[MemoryForecast]:
    """Forecast what is held in each moment of a step: ``forward``, ``loss``, ``backward of layer N`` (the first and the last
    two, or all) and ``update``; with stages, of each rank of `pp` two, with most microbatches alive, and ``update``.

    No process group may exist; nothing of the run's model is used up.

    Args:
        setup: the run.
        traces: traces of the run, if some were made already.

    Raises:
        MeshwrightError: the smaller runs that are traced are refused, or what the model computes depends on values.
    """
    traces = traces or Traces(setup)
    kinds, first = traces.kinds, traces.first
    moments, slopes = traces.moments(first), _slopes(traces, kinds, first)
    if setup.plan.stages:
        return _stage_memory(setup, traces, first, kinds, slopes)
    trace, more, shards = traces.of(first), Counter(kinds[first:]), totals(setup.plan)
    found = []
    for name, held in moments.items():
        grown = Counter(held)
        for kind, times in more.items():
            for part, slope in slopes[kind].get(name, Counter()).items():
                grown[part] += times * slope
        parts = _parts(grown, shards, trace) | {"update": _held_in_update(setup.plan) if name == UPDATE else 0}
        found.append(MemoryForecast(name, parts, tuple(sorted(traces.made))))
    return found


def _slopes(traces: Traces, kinds: list[int], first: int) -> dict[int, dict[str, Counter[Kind]]]:
    """Return, for each kind of layer after the first ones, by how many bytes one more grows each moment.

    What works in the last layers, or is gathered for them, would be that of another kind. So until their backward is over, one
    more layer grows each moment by what it keeps when the loss is computed.
    """
    slopes = {}
    for kind in set(kinds[first:]):
        place = traces.place_of(kind)
        fewer, more = traces.moments(place), traces.moments(place + 1)
        kept = _minus(more[LOSS], fewer[LOSS])
        if not _stays_gathered(traces.setup.plan, kinds, kind):
            kept[Kind.GATHERED] = 0  # the last layer is gathered, whatever its kind
        slopes[kind] = {name: _minus(more[name], fewer[name]) if name in _LATE else kept for name in more.keys() & fewer.keys()}
    return slopes


def _stays_gathered(plan: ShardingPlan, kinds: list[int], kind: int) -> bool:
    """Return whether something of each layer of a kind stays gathered after its forward; the last layer always does."""
    layers = {name for name, own in zip(plan.layers[:-1], kinds, strict=False) if own == kind}
    own = (unit for unit in plan.units if unit.name in layers or nearest(unit.name, layers))
    return any(unit.sync is SyncPolicy.DEFER or not unit.reshard_after_forward for unit in own)


def _minus(more: Counter[Kind], fewer: Counter[Kind]) -> Counter[Kind]:
    return Counter({part: more[part] - fewer[part] for part in more.keys() | fewer.keys()})


def _parts(held: Counter[Kind], shards: Totals, trace: SmallTrace) -> dict[str, int]:
    """Return the parts of a moment, with the shards of the whole run in place of those of a trace."""
    reduced = held[Kind.REDUCED] / max(1, trace.gradient_bytes)
    buffers = trace.step.state - trace.parameter_bytes - trace.optimizer_bytes
    return {
        "parameters": shards.parameter_bytes,
        "optimizer": shards.optimizer_bytes,
        "gradients": round(min(1.0, reduced) * shards.gradient_bytes),
        "gathered": held[Kind.GATHERED],
        "unsharded_gradients": held[Kind.UNREDUCED],
        "activations": held[Kind.ACTIVATIONS],
        "logits": held[Kind.LOGITS],
        "communication": held[Kind.COMMUNICATION],
        "buffers": max(0, buffers),
    }


def _held_in_update(plan: ShardingPlan) -> int:
    """Return what Muon holds in a step. Traces have AdamW, which holds nothing."""
    return sum(muon.held for muon in orthogonalised(plan).values())


@dataclass(frozen=True)
class _Kept:
    """The activations of a microbatch, in bytes.

    Attributes:
        by_kind: what a layer keeps until its backward, by its kind.
        traced: what all layers of the smallest trace keep.
        works: what a rank holds beside these while a layer is in backward, at the most.
    """

    by_kind: Mapping[int, int]
    traced: int
    works: int


def _kept(traces: Traces, slopes: dict[int, dict[str, Counter[Kind]]]) -> _Kept:
    kinds, first = traces.kinds, traces.first
    moments, own = traces.moments(first), {kind: max(0, slope[LOSS][Kind.ACTIVATIONS]) for kind, slope in slopes.items()}
    own = own or dict.fromkeys(kinds[:first], moments[LOSS][Kind.ACTIVATIONS] // first)
    own = {kind: own.get(kind, max(own.values())) for kind in kinds}
    traced = sum(own[kind] for kind in kinds[:first])
    backward = (held[Kind.ACTIVATIONS] for name, held in moments.items() if name not in (LOSS, UPDATE, "forward"))
    return _Kept(own, traced, max(0, max(backward, default=0) - traced))


def kept_activations(traces: Traces) -> int:
    """Return the bytes of activations of a microbatch that all layers keep until their backward."""
    kept = _kept(traces, _slopes(traces, traces.kinds, traces.first))
    return sum(kept.by_kind[kind] for kind in traces.kinds)


def _stage_memory(
    setup: RunSetup, traces: Traces, first: int, kinds: list[int], slopes: dict[int, dict[str, Counter[Kind]]]
) -> list[MemoryForecast]:
    """Return the moments of each rank of `pp`."""
    plan, trace, moments = setup.plan, traces.of(first), traces.moments(first)
    alive, kept = replay_of_plan(plan).alive, _kept(traces, slopes)
    kept_by = dict(zip(plan.layers, (kept.by_kind[kind] for kind in kinds), strict=True))
    buffers = max(0, trace.step.state - trace.parameter_bytes - trace.optimizer_bytes)
    found = []
    for rank in range(plan.layout.size("pp")):
        stages, shards = stages_of_rank(plan, rank), totals_of_rank(plan, rank)
        own = [sum(kept_by[name] for name in rows_on_stages(plan, [stage]).layers) for stage in stages]
        last = len(plan.stages) - 1 in stages
        loss_bytes = moments[LOSS]
        works = max(kept.works, loss_bytes[Kind.ACTIVATIONS] - kept.traced if last else 0)
        parts = {
            "parameters": shards.parameter_bytes,
            "optimizer": shards.optimizer_bytes,
            "gradients": shards.gradient_bytes,
            "gathered": shards.gathered_peak_bytes,
            "unsharded_gradients": shards.unsharded_gradient_peak_bytes,
            "activations": round(alive[rank] * sum(own)) + works,
            "logits": loss_bytes[Kind.LOGITS] if last else 0,
            "communication": shards.receive_buffer_bytes + max(held[Kind.COMMUNICATION] for held in moments.values()),
            "buffers": buffers,
        }
        update = {**dict.fromkeys(parts, 0), "update": _held_in_update(rows_on_stages(plan, stages))}
        update |= {name: parts[name] for name in ("parameters", "optimizer", "gradients", "buffers")}
        for moment, own_parts in (("with most microbatches alive", parts), (UPDATE, update)):
            found.append(MemoryForecast(moment, own_parts, tuple(sorted(traces.made)), rank, sum(own)))
    return found

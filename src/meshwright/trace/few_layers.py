"""Traces of the first layers of a run, and how what a rank holds grows with each further layer of a kind."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from meshwright.once import Once
from meshwright.plan.given.closed_choices import SyncPolicy
from meshwright.plan.given.names import nearest
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.trace.fewer import kinds_of_layers, layers_of_config
from meshwright.trace.kept_traces import SmallTrace, TraceStore
from meshwright.trace.live import Kind
from meshwright.trace.step import BEFORE_LOSS, FORWARD, LOSS, UPDATE
from meshwright.train.start.setup import RunSetup

__all__ = ["KeptLayers", "Traces", "kept_activations", "kept_layers", "slopes_of"]

LEAST = 4
"""Layers of the smallest trace: the first two and the last two, whose backward differs from that of the others."""

_LAST = (3, 2)
"""Last layers that a trace must have of the same kinds as the run, if it can: in the backward of the last but one, the layer
before it is gathered. Otherwise the last two, whose backward are moments of their own."""

_LATE = frozenset(("backward of layer 0", "backward of layer 1", UPDATE))
"""Moments in which nothing of the last layers is held anymore but their gradients."""


@dataclass
class Traces(Once):
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

    @cached_property
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

        A kind that only the first layers have counts as that of the layer after them.
        """
        kinds, first = self.kinds, self.first
        places = [place for place in (first - 1, first, *range(LEAST, len(kinds))) if place >= LEAST and kinds[place] == kind]
        # After one of its own kind, the last layer stays the same, and with it what is gathered for it.
        alike = [place for place in places if kinds[place - 1] == kind]
        return next(iter(alike or places), None) or self.place_of(kinds[first])

    @cached_property
    def places(self) -> dict[int, int]:
        """For each kind of layer after the first ones, the number of layers of the trace that one more is added to."""
        return {kind: self.place_of(kind) for kind in set(self.kinds[self.first :])}

    def of(self, layers: int) -> SmallTrace:
        """Return the trace of the first layers."""
        if layers not in self.made:
            if self.store is None:
                self.store = TraceStore(self.setup)
            self.made[layers] = self.store.get(self.setup, layers, device=self.device, load=self.load)
        return self.made[layers]

    def moments(self, layers: int) -> dict[str, Counter[Kind]]:
        """Return the moments under names that do not depend on the number of layers."""
        return self.once(_moments, layers)


def _moments(traces: Traces, layers: int) -> dict[str, Counter[Kind]]:
    trace = traces.of(layers)
    few = min(2, len(trace.layers))
    names = {trace.layers[place]: f"backward of layer {place}" for place in range(few)}
    whole = len(traces.setup.plan.layers)
    names |= {trace.layers[-place]: f"backward of layer {whole - place}" for place in range(few, 0, -1)}
    return {names.get(name, name): Counter(dict(held)) for name, held in trace.step.moments.items()}


def slopes_of(traces: Traces) -> dict[int, dict[str, Counter[Kind]]]:
    """Return, for each kind of layer after the first ones, by how many bytes one more grows each moment.

    What works in the last layers, or is gathered for them, would be that of another kind. So until their backward is over, one
    more layer grows each moment by what it keeps when the loss is computed.
    """
    slopes, kinds = {}, traces.kinds
    for kind, place in traces.places.items():
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


@dataclass(frozen=True)
class KeptLayers:
    """The activations of a microbatch, in bytes.

    Attributes:
        by_kind: what a layer keeps until its backward, by its kind.
        outputs: the outputs of its parameters, by its kind.
        traced: what all layers of the smallest trace keep.
        works: what a rank holds beside these while a layer is in backward, at the most.
    """

    by_kind: Mapping[int, int]
    outputs: Mapping[int, int]
    traced: int
    works: int


def kept_layers(traces: Traces) -> KeptLayers:
    """Return what layers keep of a microbatch."""
    return traces.once(_kept_layers)


def _kept_layers(traces: Traces) -> KeptLayers:
    kinds, first, slopes = traces.kinds, traces.first, slopes_of(traces)
    moments = traces.moments(first)
    run = {kind for name, kind in zip(traces.setup.plan.layers, kinds, strict=True) if traces.setup.plan.unit(name).forwards}
    own = _grown(traces, Kind.ACTIVATIONS)
    if not slopes:  # what is held around layers is shared by all of them, too
        own = _shared(own, moments[LOSS][Kind.ACTIVATIONS], [kind for kind in kinds[:first] if kind in run])
    own |= {kind: slope[LOSS][Kind.ACTIVATIONS] for kind, slope in slopes.items()}
    own = {kind: max(0, own.get(kind, max(own.values(), default=0))) if kind in run else 0 for kind in kinds}
    outputs = {kind: _outputs(traces, place + 1) - _outputs(traces, place) for kind, place in traces.places.items()}
    outputs = _grown(traces, Kind.OUTPUTS) | outputs
    outputs = {kind: outputs.get(kind, max(outputs.values(), default=0)) if kind in run else 0 for kind in kinds}
    traced = sum(own[kind] for kind in kinds[:first])
    backward = (held[Kind.ACTIVATIONS] for name, held in moments.items() if name not in (LOSS, UPDATE, FORWARD))
    return KeptLayers(own, outputs, traced, max(0, max(backward, default=0) - traced))


def _grown(traces: Traces, part: Kind) -> dict[int, int]:
    """Return by how much a part grows with the forward of a layer of the smallest trace, by its kind: the mean of those.

    The first and the last layer count only where no other one is of their kind: what enters them has other holders, too.
    """
    trace, found = traces.of(traces.first), dict[int, list[int]]()
    placed = list(zip(trace.layers, traces.kinds, strict=False))
    for name, kind in (*placed[1:-1], placed[0], placed[-1]):
        if name in trace.step.noted and not (name in (trace.layers[0], trace.layers[-1]) and kind in found):
            found.setdefault(kind, []).append(trace.step.noted[name].get(part, 0))
    return {kind: sum(sizes) // len(sizes) for kind, sizes in found.items()}


def _shared(sizes: Mapping[int, int], whole: int, kinds: Sequence[int]) -> dict[int, int]:
    """Return a share of a whole for each kind, as large among those of all layers as its size is.

    A kind without a size, of which no layer ran in the trace, is as large as the largest.
    """
    known = {kind: max(0, sizes.get(kind, max(sizes.values(), default=0))) for kind in kinds}
    total = sum(known[kind] for kind in kinds)
    return {kind: size * whole // total if total else whole // len(kinds) for kind, size in known.items()}


def _outputs(traces: Traces, layers: int) -> int:
    return traces.of(layers).step.noted[BEFORE_LOSS].get(Kind.OUTPUTS, 0)


def kept_activations(traces: Traces) -> dict[str, int]:
    """Return the bytes of activations of a microbatch that each layer keeps until its backward."""
    kept = kept_layers(traces)
    return {name: kept.by_kind[kind] for name, kind in zip(traces.setup.plan.layers, traces.kinds, strict=True)}

"""A trace of the first layers of a run, and how what a rank holds grows with each further layer of a kind."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from meshwright.once import Once
from meshwright.plan.given.closed_choices import SyncPolicy
from meshwright.plan.given.names import last_of_each_container, nearest
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.trace.fewer import kinds_of_layers, layers_of_config
from meshwright.trace.held.compiled import as_compiled
from meshwright.trace.kept_traces import SmallTrace, TraceStore
from meshwright.trace.live import TOGETHER, Kind
from meshwright.trace.step import BEFORE_LOSS, FORWARD, LOSS, UPDATE
from meshwright.train.start.setup import RunSetup

__all__ = ["KeptLayers", "Traces", "kept_activations", "kept_layers", "slopes_of"]

EARLY = 3
"""The first layers whose backward, or what is left of it in the backward of the second one, may differ from that of others: the
first two, and the one whose gradients are on their way then."""

_LAST = (3, 2)
"""Last layers that the trace must have of the same kinds as the run, if it can: in the backward of the last but one, the layer
before it is gathered. Otherwise the last two, whose backward are moments of their own."""

_LATE = ("backward of layer 0", "backward of layer 1", UPDATE)
"""Moments in which nothing of the last layers is held anymore but their gradients."""


@dataclass
class Traces(Once):
    """The trace of the first layers of a run, which is made once.

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

    @cached_property
    def kinds(self) -> list[int]:
        """The kind of each layer of the run."""
        return kinds_of_layers(self.setup.plan)

    @cached_property
    def first(self) -> int:
        """The number of layers of the trace.

        It has at least one of each kind, the last ones as the run has them, and between the first and the last one a layer of
        each kind that more come of.
        """
        kinds, whole = self.kinds, len(self.kinds)
        if layers_of_config(self.setup) != whole:  # several stacks: no number of layers cuts all of them alike
            return whole
        enough = (size for last in _LAST for size in range(EARLY + 2, whole - 1) if kinds[size - last : size] == kinds[-last:])
        return next(
            (size for size in enough if {*kinds[size:]} <= {*kinds[EARLY : size - 1]} and {*kinds} == {*kinds[:size]}), whole
        )

    @cached_property
    def trace(self) -> SmallTrace:
        """The trace. Compiled layers keep less in it."""
        found, kinds = self._uncompiled, self.kinds[: self.first]
        spared = {name: self.spared[kind] for name, kind in zip(found.layers, kinds, strict=True) if kind in self.spared}
        return replace(found, step=as_compiled(found.step, found.layers, spared)) if spared else found

    @cached_property
    def spared(self) -> dict[int, int]:
        """For each kind of layer that is compiled, how many bytes of a microbatch it keeps less than if it were not.

        Over `cp` it is not known: there, attention is in no graph.
        """
        if not self.setup.plan.options.compile or self.setup.layout.size("cp") > 1:
            return {}
        names = {*self.examples.values()}
        found = self._store.spared(self.setup, self.first, names, device=self.device, load=self.load)
        return {kind: found[name] for kind, name in self.examples.items() if name in found}

    @cached_property
    def _uncompiled(self) -> SmallTrace:
        return self._store.get(self.setup, self.first, device=self.device, load=self.load)

    @cached_property
    def _store(self) -> TraceStore:
        if self.store is None:
            self.store = TraceStore(self.setup)
        return self.store

    @cached_property
    def moments(self) -> dict[str, Counter[Kind]]:
        """The moments under names that do not depend on the number of layers."""
        return {name: Counter(dict(self.trace.step.moments[own])) for name, own in self._names.items()}

    @cached_property
    def _names(self) -> dict[str, str]:
        """The names of moments in the run to those in the trace."""
        layers, whole = self.trace.layers, len(self.kinds)
        few = min(2, len(layers))
        names = {layers[place]: f"backward of layer {place}" for place in range(few)}
        names |= {layers[-place]: f"backward of layer {whole - place}" for place in range(few, 0, -1)}
        return {names.get(name, name): name for name in self.trace.step.moments}

    @cached_property
    def examples(self) -> dict[int, str]:
        """For each kind of layer that runs, the traced layer that stands for it.

        For a kind of which none ran, as where a model leaves layers out at random, it is the one that keeps most.
        """
        plan, trace = self.setup.plan, self._uncompiled
        step, ends = trace.step, last_of_each_container(trace.layers)
        running = {kind for name, kind in zip(plan.layers, self.kinds, strict=True) if plan.unit(name).forwards}
        placed = [(place, name) for place, name in enumerate(trace.layers) if name in step.works[FORWARD]]

        def fit(place: int, name: str) -> tuple[bool, bool, bool, int]:
            # What comes after the last layer of a stack is counted for that layer, too.
            between = name not in ends
            return place >= EARLY and between, place > 0 and between, self.kinds[place - 1] == self.kinds[place], place

        def kept(one: tuple[int, str]) -> int:
            return step.of_layers[BEFORE_LOSS].get(one[1], {}).get(Kind.ACTIVATIONS, 0)

        found = {}
        for kind in running if placed else ():
            own = [one for one in placed if self.kinds[one[0]] == kind]
            found[kind] = (max(own, key=lambda one: fit(*one)) if own else max(placed, key=kept))[1]
        return found

    def of_layer(self, moment: str, kind: int) -> Counter[Kind]:
        """Return what is held in a moment of what came to be in a layer of a kind, in its forward or in its backward, with the
        layer's share of what units of many layers hold.

        Args:
            moment: a name of :attr:`moments` or of what is noted of the trace.
            kind: the kind of the layer.
        """
        found = self.trace.step.of_layers.get(self._names.get(moment, moment), {})
        own = Counter(dict(found.get(self.examples.get(kind, ""), {})))
        own.update({part: int(size * self.shares[kind]) for part, size in found.get(TOGETHER, {}).items()})
        return own

    @cached_property
    def shares(self) -> dict[int, Fraction]:
        """For each kind, what share a layer has of the parameters that units of many layers hold in the trace."""
        plan, kinds = self.setup.plan, dict(zip(self.setup.plan.layers, self.kinds, strict=True))
        together = {unit.name for unit in plan.units if unit.together}
        sizes = dict.fromkeys(("", *plan.layers), 0)  # the first: adapters outside of layers
        for row in plan.parameters:
            if row.unit in together:
                sizes[nearest(row.name, sizes)] += row.gathered_bytes
        whole = sum(sizes[layer] for layer in ("", *plan.layers[: self.first]))
        return {kinds[layer]: Fraction(sizes[layer], whole or 1) for layer in plan.layers}


def slopes_of(traces: Traces) -> dict[int, dict[str, Counter[Kind]]]:
    """Return, for each kind of layer after the first ones, by how many bytes one more grows each moment.

    Until the backward of the last layers is over, it grows each moment by what it keeps when the loss is computed.
    """
    slopes, kinds = {}, traces.kinds
    for kind in {*kinds[traces.first :]}:
        kept = traces.of_layer(LOSS, kind)
        if not _stays_gathered(traces.setup.plan, kinds, kind):
            kept[Kind.GATHERED] = 0  # what it may have gathered ahead for the last layer, which stays gathered
        slopes[kind] = {name: traces.of_layer(name, kind) if name in _LATE else kept for name in traces.moments}
    return slopes


def _stays_gathered(plan: ShardingPlan, kinds: list[int], kind: int) -> bool:
    """Return whether something of each layer of a kind stays gathered after its forward; the last layer always does."""
    layers = {name for name, own in zip(plan.layers[:-1], kinds, strict=False) if own == kind}
    own = (unit for unit in plan.units if unit.name in layers or nearest(unit.name, layers))
    return any(unit.sync is SyncPolicy.DEFER or not unit.reshard_after_forward for unit in own)


@dataclass(frozen=True)
class KeptLayers:
    """The activations of a microbatch, in bytes.

    Attributes:
        by_kind: what a layer keeps until its backward, by its kind.
        outputs: the outputs of its parameters, by its kind.
        around: what is kept beside layers.
        works: what a rank holds beside what layers keep while a layer is in backward, at the most.
    """

    by_kind: Mapping[int, int]
    outputs: Mapping[int, int]
    around: int
    works: int


def kept_layers(traces: Traces) -> KeptLayers:
    """Return what layers keep of a microbatch."""
    return traces.once(_kept_layers)


def _kept_layers(traces: Traces) -> KeptLayers:
    noted = {kind: traces.of_layer(BEFORE_LOSS, kind) for kind in {*traces.kinds}}
    own, outputs = ({kind: held[part] for kind, held in noted.items()} for part in (Kind.ACTIVATIONS, Kind.OUTPUTS))
    step = traces.trace.step
    traced = sum(held.get(Kind.ACTIVATIONS, 0) for held in step.of_layers[BEFORE_LOSS].values())
    around = step.noted[BEFORE_LOSS].get(Kind.ACTIVATIONS, 0) - traced
    backward = (held[Kind.ACTIVATIONS] for name, held in traces.moments.items() if name not in (LOSS, UPDATE, FORWARD))
    return KeptLayers(own, outputs, around, max(0, max(backward, default=0) - traced))


def kept_activations(traces: Traces) -> dict[str, int]:
    """Return the bytes of activations of a microbatch that each layer keeps until its backward."""
    kept = kept_layers(traces)
    return {name: kept.by_kind[kind] for name, kind in zip(traces.setup.plan.layers, traces.kinds, strict=True)}

"""Numbers that many candidates of a search share: what a sequence adds on a rank, and what slices of matrices cost.

The work and the activations of a row are by how much a trace of two rows has more than that of one row. So what does not grow
with rows, such as copies of gathered parameters, is not in them.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.layout import Layout, divisors
from meshwright.plan.axes.data.prefetch import layer_groups
from meshwright.plan.axes.data.unit_traffic import unit_bytes, unit_traffic
from meshwright.plan.axes.pipeline.stage_plan import stages_of_rank
from meshwright.plan.cost.activation_traffic import activation_traffic, repeated_share
from meshwright.plan.given.closed_choices import ActivationCheckpointing, ContextMethod, PipelineSchedule, SyncPolicy
from meshwright.plan.given.inspection import inspect_model
from meshwright.plan.given.names import within
from meshwright.plan.result.sharding_plan import EXPERTS, ShardingPlan, shard_axis
from meshwright.plan.update.states import state_bytes
from meshwright.search.space import Branch, Candidate
from meshwright.trace.few_layers import Traces, kept_activations, kept_layers
from meshwright.trace.fewer import world_of
from meshwright.trace.kept_traces import TraceStore
from meshwright.trace.layer_work import LayerWork, layers_on
from meshwright.trace.work import Work
from meshwright.train.start.setup import RunSetup, change_setup

__all__ = ["MODE", "SCHEDULE", "STAGES", "Numbers", "Slices"]

Choices = tuple[tuple[str, Any], ...]
"""Keys of a configuration, each with a value."""

Calls = tuple[str, str, float, float]
"""Axis and kind of collectives, their number, and their bytes."""


@dataclass(frozen=True)
class Slices:
    """What a plan of one stage says of all layouts with the same slices.

    Attributes:
        traffic: collectives of activations in a microbatch of one sequence, if nothing is recomputed.
        state: bytes of the shards of parameters and moments of what is no expert, as if nothing sharded it, and of experts.
        gradients: the same of the shards of gradients.
        updated: the same of what an update reads and writes.
        copied: the same of what is copied between host and device, with ``cpu_offload``.
        gathered: bytes of all parameters in the dtype of compute, as they are gathered.
        reduced: bytes of all gradients before they are reduced.
        layer: gathered bytes of the layer that has the fewest.
        unit_gradients: bytes of unreduced gradients of a unit: of the layer whose largest unit has the fewest.
        units: the collectives over data ranks, by the kind of units and whether they are in layers.
    """

    traffic: tuple[Calls, ...]
    state: tuple[float, float]
    gradients: tuple[float, float]
    updated: tuple[float, float]
    copied: tuple[float, float]
    gathered: int
    reduced: int
    layer: int
    unit_gradients: int
    units: Mapping[tuple[str, bool], "Units"]


@dataclass
class Units:
    """The collectives over data ranks of some units.

    Attributes:
        again: number and bytes of the gathers of a microbatch, if nothing stays gathered.
        once: the same, if each unit is gathered once.
        reductions: number and bytes of the reductions, if each unit is reduced once.
    """

    again: tuple[int, int] = (0, 0)
    once: tuple[int, int] = (0, 0)
    reductions: tuple[int, int] = (0, 0)


class Numbers:
    """Finds the numbers of a run, each once.

    Args:
        setup: the run.
        store: traces.
    """

    def __init__(self, setup: RunSetup, store: TraceStore) -> None:
        self.setup, self.store = setup, store
        self._slices: dict[tuple[Any, ...], Slices | None] = {}
        self._work: dict[ActivationCheckpointing, Counter[Work]] = {}
        self._sliced_work: dict[tuple[Any, ...], Counter[Work]] = {}
        self._works: dict[ActivationCheckpointing, int] = {}
        self._kept: dict[tuple[int, Choices], tuple[dict[str, int], int]] = {}
        self._spared: dict[tuple[int, Choices], dict[str, int]] = {}
        self._traffic: dict[tuple[Layout, Choices], tuple[tuple[Calls, ...], float]] = {}

    def slices(self, branch: Branch, candidate: Candidate) -> Slices | None:
        """Return what all layouts with the same slices share; ``None``: they are refused."""
        values, layout = dict(candidate.values), branch.layout
        chosen = _chosen(values, *_SLICING, "optimizer.kind")
        key = (layout.size("tp"), layout.size("cp"), layout.ep, layout.ep_shard > 1, layout.size("dp_shard_cp") > 1, chosen)
        if key not in self._slices:
            self._slices[key] = self._find(layout, chosen)
        return self._slices[key]

    def traffic(self, branch: Branch, candidate: Candidate) -> tuple[tuple[Calls, ...], float]:
        """Return the collectives of activations in a microbatch of one sequence, and the evenness of stages.

        The collectives are those of the rank of `pp` that a price takes. Which one that is depends on how layers are cut and
        parameters sharded, but not on replicas. The evenness is the mean number of layers of a rank over the largest.
        """
        values, pp = dict(candidate.values), branch.layout.size("pp")
        mode = values.get(MODE, self.setup.config.parallel.activation_checkpointing)
        chosen = ((MODE, mode), *_chosen(values, *_SLICING, SCHEDULE, STAGES))
        layout = replace(branch.layout, dp_replicate=1)
        key = (layout, chosen)
        if key not in self._traffic:
            whole = layout.resolve(branch.layout.world_size // branch.layout.size("dp_replicate"))
            try:  # with as many microbatches as every schedule takes
                plan = self._run(whole, chosen, microbatches=1 if pp == 1 else 2 * pp).plan
            except MeshwrightError:
                return (), 1.0
            found = (item for item in activation_traffic(plan) if item.size and item.kind != "send")
            times = {axis: (1 + repeated_share(plan, axis)) / plan.options.microbatches for axis in ("tp", "cp", "ep", "dp")}
            calls = tuple(
                (item.axis, item.kind, item.calls * times[item.axis], (item.size or 0) * times[item.axis]) for item in found
            )
            most = max(len(layers_on(plan, stages_of_rank(plan, rank))) for rank in range(pp))
            self._traffic[key] = calls, len(plan.layers) / pp / max(1, most)
        return self._traffic[key]

    def _find(self, layout: Layout, chosen: Choices) -> Slices | None:
        ranks = layout.world_size // (layout.size("pp") * layout.size("dp_replicate"))
        small = world_of(replace(layout, pp=1, dp_replicate=1).resolve(ranks))
        try:
            run = self._run(small, chosen)
        except MeshwrightError:
            return None
        plan = run.plan
        axis = {unit.name: unit.kind for unit in plan.units}
        state, gradients, updated, copied = (Counter[bool]() for _ in range(4))
        for row in plan.parameters:
            kind = axis[row.unit]
            of_experts, shards = kind == EXPERTS, plan.layout.size(shard_axis(plan.layout, kind))
            moments, gradient = state_bytes(plan, row), row.trainable * row.bytes_per_rank
            state[of_experts] += shards * (row.bytes_per_rank + moments)
            gradients[of_experts] += shards * gradient
            updated[of_experts] += shards * (2 * row.bytes_per_rank + gradient + 2 * moments)
            copied[of_experts] += shards * (row.bytes_per_rank + gradient)
        layers = [
            [unit for unit in turn if not unit.part_of]
            for turn in layer_groups(plan.shared).turns
            if turn[0].name in plan.layers
        ]
        return Slices(
            traffic=tuple(
                (item.axis, item.kind, float(item.calls), float(item.size))
                for item in activation_traffic(plan)
                if item.size and item.kind != "send"
            ),
            state=(state[False], state[True]),
            gradients=(gradients[False], gradients[True]),
            updated=(updated[False], updated[True]),
            copied=(copied[False], copied[True]),
            gathered=sum(row.gathered_bytes for row in plan.parameters),
            reduced=sum(row.reduced_bytes for row in plan.parameters),
            layer=min((sum(unit_bytes(plan, unit)[0] for unit in turn) for turn in layers), default=0),
            unit_gradients=min((max(unit_bytes(plan, unit)[1] for unit in turn) for turn in layers), default=0),
            units=_units_of(plan),
        )

    def _run(self, layout: Layout, chosen: Choices, rows: int = 1, microbatches: int = 1) -> RunSetup:
        """Return a run of one or some microbatches of some sequences."""
        config = Candidate(layout, (*_PLAIN, ("training.microbatch_size", rows), *chosen)).config(self.setup.config)
        training = config.training.model_copy(update={"global_batch_size": rows * layout.size("dp") * microbatches})
        changed = config.model_copy(update={"training": training})
        return change_setup(self.setup, changed, layout.world_size, program=False)

    def work(self, mode: ActivationCheckpointing) -> Counter[Work]:
        """Return the work that a sequence adds on a single rank, under a mode of recomputation."""
        if mode not in self._work:
            self._work[mode] = self._added(Layout(dp_shard=1).resolve(1), ((MODE, mode),))
        return self._work[mode]

    @cached_property
    def passes(self) -> int:
        """How often a microbatch goes through all ranks of a pipeline."""
        facts = self.setup.facts or inspect_model(self.setup.spec, self.setup.model)
        stages = facts.traces.stages(self.setup.plan.layers)
        return 1 if stages is None else stages.passes

    @cached_property
    def head(self) -> float:
        """The products of the output head and the loss, in those of the layer that has the fewest."""
        run = self._run(Layout(dp_shard=1).resolve(1), ((MODE, ActivationCheckpointing.NONE),))
        whole, kinds = LayerWork.of(Traces(run, store=self.store)), (Work.PRODUCTS, Work.PRODUCTS_FP32)
        of_layers = (sum(work[kind] for kind in kinds) for work in whole.layers.values())
        least = min((products for products in of_layers if products), default=1)  # a layer that does not run has none
        return sum(whole.loss[kind] for kind in kinds) / least

    def attention_of_parts(self, ranks: int) -> float:
        """Return the least that all ranks of `cp` compute of the attention that one rank computes.

        They leave out pieces that a mask of documents hides. It is measured on two ranks; on c ranks it is as 1 + 1 / c.
        """
        return min(1.0, self._attention_of_two * (1 + 1 / ranks) / (1 + 1 / 2))

    @cached_property
    def _attention_of_two(self) -> float:
        alone, both = Layout(dp_shard=1).resolve(1), Layout(dp_shard=1, cp=2).resolve(2)
        none, method = (MODE, ActivationCheckpointing.NONE), ("parallel.context_parallel", ContextMethod.GATHER)
        try:
            runs = [self._run(alone, (none,)), self._run(both, (none, method))]
        except MeshwrightError:  # the model has no such parts: nothing is known of other methods, and nothing counted
            return 0.0
        one, two = (LayerWork.of(Traces(run, store=self.store)).on_rank(run.plan, 0)[Work.ATTENTION] for run in runs)
        return 2 * two / one if one else 0.0

    def sliced_work(self, branch: Branch, values: Mapping[str, Any]) -> Counter[Work]:
        """Return the work that a whole sequence adds on a rank with slices of matrices, if nothing is recomputed.

        Ranks of `ep` each get as many rows as they send. So their number does not matter, and one is traced.
        """
        layout, chosen = branch.layout, _chosen(values, "parallel.sequence_parallel")
        shared = divisors(gcd(layout.ep, layout.size("dp_shard") * layout.size("tp")))
        sizes = (layout.size("tp"), min(shared[1:], default=1), chosen)
        if sizes not in self._sliced_work:
            ranks = layout.size("dp_shard") * layout.size("tp")
            whole = replace(layout, pp=1, dp_replicate=1, cp=1, ep=sizes[1]).resolve(ranks)
            self._sliced_work[sizes] = self._added(world_of(whole), chosen)
        return self._sliced_work[sizes]

    def kept(self, branch: Branch, values: Mapping[str, Any], mode: ActivationCheckpointing) -> tuple[dict[str, int], int]:
        """Return the bytes of activations that a sequence adds to what each layer keeps until its backward, and to what is kept
        beside layers.

        Nothing but `cp` cuts it here, which is measured on two ranks: their attention keeps other tensors than that of one.
        What compiled layers keep less is that of ranks with such slices.
        """
        ranks, tp = min(2, branch.layout.size("cp")), branch.layout.size("tp")
        chosen = ((MODE, mode), *(_chosen(values, "parallel.context_parallel") if ranks > 1 else ()))
        if (ranks, chosen) not in self._kept:
            runs = (self._run(Layout(dp_shard=1, cp=ranks).resolve(ranks), chosen, rows) for rows in (1, 2))
            fewer, more = (Traces(run, store=self.store) for run in runs)
            one, two = kept_activations(fewer), kept_activations(more)
            layers = {name: ranks * max(0, two[name] - one[name]) for name in two}
            self._kept[ranks, chosen] = layers, ranks * max(0, kept_layers(more).around - kept_layers(fewer).around)
        layers, around = self._kept[ranks, chosen]
        if ranks > 1 or mode is not ActivationCheckpointing.NONE or not values.get(COMPILE, self.setup.config.parallel.compile):
            return layers, around
        spared = self._spared_of(tp, _chosen(values, "parallel.sequence_parallel") if tp > 1 else ())
        return {name: max(0, size - tp * spared.get(name, 0)) for name, size in layers.items()}, around

    def _spared_of(self, tp: int, chosen: Choices) -> dict[str, int]:
        """Return how many bytes of a sequence each layer keeps less that is compiled; none if such slices are refused."""
        if (tp, chosen) not in self._spared:
            own = ((MODE, ActivationCheckpointing.NONE), (COMPILE, True), *chosen)
            try:
                traces = Traces(self._run(Layout(dp_shard=1, tp=tp).resolve(tp), own), store=self.store)
                spared = {
                    name: traces.spared.get(kind, 0) for name, kind in zip(self.setup.plan.layers, traces.kinds, strict=True)
                }
            except MeshwrightError:
                spared = {}
            self._spared[tp, chosen] = spared
        return self._spared[tp, chosen]

    def works(self, mode: ActivationCheckpointing) -> int:
        """Return the bytes of activations that a sequence adds to what a layer in backward holds beside what layers keep."""
        if mode not in self._works:
            runs = (self._run(Layout(dp_shard=1).resolve(1), ((MODE, mode),), rows) for rows in (1, 2))
            fewer, more = (kept_layers(Traces(run, store=self.store)).works for run in runs)
            self._works[mode] = max(0, more - fewer)
        return self._works[mode]

    def _added(self, layout: Layout, chosen: Choices) -> Counter[Work]:
        """Return by how much a microbatch of two sequences is more work than that of one."""
        runs = (self._run(layout, chosen, rows) for rows in (1, 2))
        fewer, more = (LayerWork.of(Traces(run, store=self.store)).on_rank(run.plan, 0) for run in runs)
        return Counter({kind: more[kind] - fewer[kind] for kind in Work})


def _chosen(values: Mapping[str, Any], *names: str) -> Choices:
    return tuple((name, values[name]) for name in names if name in values)


def _units_of(plan: ShardingPlan) -> dict[tuple[str, bool], Units]:
    """Return the collectives over data ranks of the units of each kind, in layers and outside of them."""
    alone, found = replace(plan, options=replace(plan.options, microbatches=1)), dict[tuple[str, bool], Units]()
    for unit in plan.fsdp_units:
        units = found.setdefault((unit.kind, within(unit.name, plan.layers)), Units())
        each = unit_traffic(alone, replace(unit, sync=SyncPolicy.REDUCE_EACH))
        gathered, reduced = unit_bytes(plan, unit)
        units.again = units.again[0] + each.all_gathers, units.again[1] + each.all_gather_bytes
        if each.all_gathers:
            units.once = units.once[0] + 1, units.once[1] + gathered
        if reduced and any(part.forwards for part in plan.parts(unit)):
            units.reductions = units.reductions[0] + 1, units.reductions[1] + reduced
    return found


MODE, COMPILE = "parallel.activation_checkpointing", "parallel.compile"
SCHEDULE, STAGES = "parallel.pipeline.schedule", "parallel.pipeline.stages_per_rank"
_SLICING = ("parallel.sequence_parallel", "parallel.context_parallel")

_PLAIN: tuple[tuple[str, Any], ...] = (
    ("parallel.activation_checkpointing", ActivationCheckpointing.NONE),
    ("parallel.pipeline.schedule", PipelineSchedule.ONE_F_ONE_B),
    ("parallel.pipeline.stages_per_rank", None),
    ("parallel.sync", None),
    ("parallel.cpu_offload", False),
    (COMPILE, False),
)
"""Choices of the runs that bounds are made of; nothing in a bound depends on them."""

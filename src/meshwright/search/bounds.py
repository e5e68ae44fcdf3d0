"""What a candidate needs at the least, from numbers that many candidates share: time, and memory. No plan of it is made.

Time: a rank's share of the work of the model, as if it were cut without loss, the wait of a pipeline whose stages are even, and
the collectives of activations. Collectives over data ranks, launches and updates count nothing, and recomputation counts the
forward that it repeats. Memory: a rank's share of the state; and where nothing is recomputed, of the activations.

The work of a row of tokens is by how much a trace of two rows on one rank has more than that of one row. So what does not grow
with rows, such as copies of gathered parameters, is not in it.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.layout import Layout
from meshwright.plan.cost.activation_traffic import activation_traffic
from meshwright.plan.cost.hardware import Hardware
from meshwright.plan.cost.links import collective_seconds
from meshwright.plan.given.closed_choices import ActivationCheckpointing, PipelineSchedule
from meshwright.plan.result.axis_traffic import AxisTraffic
from meshwright.plan.result.sharding_plan import EXPERTS, shard_axis
from meshwright.plan.update.states import state_bytes
from meshwright.search.space import Branch, Candidate
from meshwright.trace.fewer import world_of
from meshwright.trace.kept_traces import TraceStore
from meshwright.trace.layer_work import LayerWork, Rates
from meshwright.trace.memory import Traces, forecast_memory
from meshwright.trace.verdict import ALLOCATOR
from meshwright.trace.work import Work
from meshwright.train.start.setup import RunSetup, change_setup

__all__ = ["Bounds"]

ROUNDED = 0.98
"""Padding makes shards of a small world a little larger than their share of those of a large one."""

REPEATED = {ActivationCheckpointing.FULL: 0.9, ActivationCheckpointing.SUBMODULE: 0.8}
"""Least share of the layers' forward that recomputation repeats: torch stops before the last product."""

_WAITS = {PipelineSchedule.ONE_F_ONE_B: 1.0, PipelineSchedule.GPIPE: 1.0}


@dataclass(frozen=True)
class _Row:
    """What a sequence adds on one rank: work, that of forward alone, and bytes of activations if nothing is recomputed."""

    work: Counter[Work]
    forward: Counter[Work]
    kept: int


@dataclass(frozen=True)
class _Slices:
    """What a plan of one stage says of all layouts with the same slices.

    Attributes:
        traffic: collectives of activations in a microbatch of one sequence.
        dense: bytes of the state (shards of parameters, gradients, moments) of what is no expert, as if nothing sharded it.
        experts: the same of experts.
    """

    traffic: tuple[AxisTraffic, ...]
    dense: float
    experts: float


class Bounds:
    """Lower bounds of the candidates of a space.

    Args:
        setup: the run.
        hardware: the devices.
        store: traces.
    """

    def __init__(self, setup: RunSetup, hardware: Hardware, store: TraceStore) -> None:
        self.setup, self.hardware, self.store = setup, hardware, store
        self._slices: dict[tuple[Any, ...], _Slices | None] = {}
        self._rows: _Row | None = None
        self._rates = {
            compiled: replace(Rates.of(setup, hardware), fused=Rates.of(_compiled(setup, compiled), hardware).fused)
            for compiled in (False, True)
        }

    def seconds(self, branch: Branch, candidate: Candidate | None = None) -> float:
        """Return the least seconds of a step of a candidate; without one, of any of a branch, collectives apart."""
        row, layout = self._row, branch.layout
        rows = branch.rows * branch.microbatches / (layout.size("tp") * layout.size("cp") * layout.size("pp"))
        values = {} if candidate is None else dict(candidate.values)
        base = self.setup.config.parallel
        compiles = values.get("parallel.compile", base.compile if candidate else True)
        mode = values.get("parallel.activation_checkpointing", base.activation_checkpointing)
        spent = self._rates[compiles].spent
        compute = sum(spent(row.work).values())
        if candidate is not None or "parallel.activation_checkpointing" not in branch.choices:
            compute += REPEATED.get(mode, 0.0) * sum(spent(row.forward).values())
        least = rows * compute
        schedule = values.get("parallel.pipeline.schedule", base.pipeline.schedule if candidate else None)
        pp = layout.size("pp")
        if pp > 1 and schedule is not None:
            waits = _WAITS.get(schedule, 0.0)
            if schedule is PipelineSchedule.INTERLEAVED:
                waits = 1 / (values.get("parallel.pipeline.stages_per_rank", base.pipeline.stages_per_rank) or 2)
            least *= 1 + waits * (pp - 1) / branch.microbatches
        if candidate is None or (slices := self.slices(branch, candidate)) is None:
            return least
        share = self._least_share(pp, values)
        for item in slices.traffic:
            calls, size = (share * branch.microbatches * number for number in (item.calls, branch.rows * (item.size or 0)))
            least += collective_seconds(layout, self.hardware, item.axis, item.kind, calls, size)
        return least

    def _least_share(self, pp: int, values: Mapping[str, Any]) -> float:
        """Return the least share of the layers that a rank of `pp` has."""
        pipeline, layers = self.setup.config.parallel.pipeline, len(self.setup.plan.layers)
        if pp == 1:
            return 1.0
        each = values.get("parallel.pipeline.stages_per_rank", pipeline.stages_per_rank)
        each = each or (1 if values.get("parallel.pipeline.schedule", pipeline.schedule).single else 2)
        return layers // (pp * each) * each / layers if layers else 0.0

    def bytes(self, branch: Branch, candidate: Candidate) -> float:
        """Return the least bytes of the fullest rank of a candidate, with what the device reserves."""
        values, layout = dict(candidate.values), branch.layout
        slices = self.slices(branch, candidate)
        base = self.setup.config.parallel
        held = self.hardware.reserved_gib * 2**30
        if slices is not None and not values.get("parallel.cpu_offload", base.cpu_offload):
            shards, of_experts = layout.size("dp_shard_cp"), layout.size(shard_axis(layout, EXPERTS))
            held += ROUNDED * (slices.dense / shards + slices.experts / of_experts) / layout.size("pp")
        mode = values.get("parallel.activation_checkpointing", base.activation_checkpointing)
        if mode is ActivationCheckpointing.NONE:
            alive = min(1.0, branch.microbatches / layout.size("pp"))
            kept = self._row.kept * branch.rows / (layout.size("tp") * layout.size("cp"))
            held += (1 + ALLOCATOR) * ROUNDED * alive * kept
        return held

    def refused(self, branch: Branch, candidate: Candidate) -> bool:
        """Return whether the slices of a candidate are refused, whatever else it chooses."""
        return self.slices(branch, candidate) is None

    def slices(self, branch: Branch, candidate: Candidate) -> _Slices | None:
        """Return what all layouts with the same slices share; ``None``: they are refused."""
        values, layout = dict(candidate.values), branch.layout
        names = ("parallel.sequence_parallel", "parallel.context_parallel", "optimizer.kind")
        chosen = tuple((name, values[name]) for name in names if name in values)
        key = (layout.size("tp"), layout.size("cp"), layout.ep, layout.ep_shard > 1, chosen)
        if key not in self._slices:
            self._slices[key] = self._find(layout, chosen)
        return self._slices[key]

    def _find(self, layout: Layout, chosen: tuple[tuple[str, Any], ...]) -> _Slices | None:
        ranks = layout.world_size // (layout.size("pp") * layout.size("dp_replicate"))
        small = world_of(replace(layout, pp=1, dp_replicate=1).resolve(ranks))
        try:
            run = self._run(small, chosen)
        except MeshwrightError:
            return None
        plan = run.plan
        axis = {unit.name: unit.kind for unit in plan.units}
        state = {True: 0.0, False: 0.0}
        for row in plan.parameters:
            kind = axis[row.unit]
            held = (1 + row.trainable) * row.bytes_per_rank + state_bytes(plan, row)
            state[kind == EXPERTS] += held * plan.layout.size(shard_axis(plan.layout, kind))
        traffic = tuple(item for item in activation_traffic(plan) if item.size and item.kind != "send")
        return _Slices(traffic, state[False], state[True])

    def _run(self, layout: Layout, chosen: tuple[tuple[str, Any], ...], rows: int = 1) -> RunSetup:
        """Return a run of one microbatch of some sequences."""
        config = Candidate(layout, (*_PLAIN, ("training.microbatch_size", rows), *chosen)).config(self.setup.config)
        training = config.training.model_copy(update={"global_batch_size": rows * layout.size("dp")})
        return change_setup(self.setup, config.model_copy(update={"training": training}), layout.world_size)

    @property
    def _row(self) -> _Row:
        if self._rows is None:
            one, two = (self._measured(rows) for rows in (1, 2))
            work, forward = (
                Counter({kind: more[kind] - fewer[kind] for kind in Work}) for more, fewer in zip(two[:2], one[:2], strict=True)
            )
            self._rows = _Row(work, forward, max(0, two[2] - one[2]))
        return self._rows

    def _measured(self, rows: int) -> tuple[Counter[Work], Counter[Work], int]:
        run = self._run(Layout(dp_shard=1).resolve(1), (), rows)
        traces = Traces(run, store=self.store)
        whole = LayerWork.of(traces)
        layers: Counter[Work] = Counter()
        for kind in whole.kinds.values():
            layers.update(whole.forward[kind])
        return whole.on_rank(run.plan, 0), layers, forecast_memory(run, traces).parts["activations"]


_PLAIN: tuple[tuple[str, Any], ...] = (
    ("parallel.activation_checkpointing", ActivationCheckpointing.NONE),
    ("parallel.pipeline.schedule", PipelineSchedule.ONE_F_ONE_B),
    ("parallel.pipeline.stages_per_rank", None),
    ("parallel.sync", None),
    ("parallel.cpu_offload", False),
)
"""Choices of the runs that bounds are made of; nothing in a bound depends on them."""


def _compiled(setup: RunSetup, compiled: bool) -> RunSetup:
    return replace(setup, plan=replace(setup.plan, options=replace(setup.plan.options, compile=compiled)))

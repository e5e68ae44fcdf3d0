"""What a candidate needs at the least, from numbers that many candidates share: time, and memory. No plan of it is made.

Time: the work of a rank's rows of tokens, the wait of a pipeline whose stages are even, the collectives of activations, the
update of a rank's share of the state, and the copies of one pass if that is on the host. Launches and the collectives over data
ranks count nothing. Memory: a rank's share of the state, and of the activations.

The work and the activations of a row are by how much a trace of two rows has more than that of one row. So what does not grow
with rows, such as copies of gathered parameters, is not in them. They are measured for each mode of recomputation on one rank,
and are then cut without loss; and once for all layouts with the same slices of matrices, which shows what these do not cut. A
rank that has a part of each sequence has at least that share of the work.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.layout import Layout
from meshwright.plan.cost.activation_traffic import activation_traffic
from meshwright.plan.cost.hardware import Hardware
from meshwright.plan.cost.links import collective_seconds
from meshwright.plan.given.closed_choices import ActivationCheckpointing, PipelineSchedule, SyncPolicy
from meshwright.plan.result.axis_traffic import AxisTraffic
from meshwright.plan.result.sharding_plan import EXPERTS, shard_axis
from meshwright.plan.update.states import state_bytes
from meshwright.search.space import Branch, Candidate
from meshwright.trace.fewer import world_of
from meshwright.trace.kept_traces import TraceStore
from meshwright.trace.layer_work import LayerWork, Rates
from meshwright.trace.memory import Traces, forecast_memory
from meshwright.trace.time import HOST_MEMORY
from meshwright.trace.verdict import ALLOCATOR
from meshwright.trace.work import Work
from meshwright.train.start.setup import RunSetup, change_setup

__all__ = ["Bounds"]

ROUNDED = 0.98
"""Padding makes shards of a small world a little larger than their share of those of a large one."""

_WAITS = {PipelineSchedule.ONE_F_ONE_B: 1.0, PipelineSchedule.GPIPE: 1.0}


@dataclass(frozen=True)
class _Row:
    """What a sequence adds on a rank: work, and bytes of activations."""

    work: Counter[Work]
    kept: int

    def more_than(self, other: "_Row") -> Counter[Work]:
        """Return by how much its work is more."""
        return Counter({kind: max(0, self.work[kind] - other.work[kind]) for kind in Work})


@dataclass(frozen=True)
class _Slices:
    """What a plan of one stage says of all layouts with the same slices.

    Attributes:
        traffic: collectives of activations in a microbatch of one sequence.
        dense: bytes of the state (shards of parameters, gradients, moments) of what is no expert, as if nothing sharded it.
        experts: the same of experts.
        updated: bytes that an update reads and writes of what is no expert, as if nothing sharded it, and of experts.
        copied: the same of what is copied between host and device, with ``cpu_offload``.
        gathered: bytes of all parameters in the dtype of compute, as they are gathered.
        reduced: bytes of all gradients before they are reduced.
    """

    traffic: tuple[AxisTraffic, ...]
    dense: float
    experts: float
    updated: tuple[float, float]
    copied: tuple[float, float]
    gathered: int
    reduced: int


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
        self._sliced: dict[tuple[Any, ...], _Row] = {}
        self._rows: dict[ActivationCheckpointing, _Row] = {}
        self._rates = {
            compiled: replace(Rates.of(setup, hardware), fused=Rates.of(_compiled(setup, compiled), hardware).fused)
            for compiled in (False, True)
        }

    def seconds(self, branch: Branch, candidate: Candidate | None = None, *, measured: bool = False) -> float:
        """Return the least seconds of a step of a candidate; without one, of any of a branch.

        Args:
            branch: the layout, and the size of microbatches.
            candidate: one of its candidates.
            measured: whether the work of such slices is measured, which takes some traces; otherwise it is that of one rank,
                cut without loss.
        """
        layout, values = branch.layout, {} if candidate is None else dict(candidate.values)
        parallel, pp = self.setup.config.parallel, branch.layout.size("pp")
        cut = layout.size("tp") * layout.size("cp")
        spent = self._rates[values.get("parallel.compile", parallel.compile or candidate is None)].spent
        modes = [values[_MODE]] if _MODE in values else branch.choices.get(_MODE, [parallel.activation_checkpointing])
        slices = None if candidate is None else self.slices(branch, candidate)
        none = self._row(ActivationCheckpointing.NONE)
        if measured and slices is not None:
            sliced = self._sliced_row(branch, values).work
            more = min(sum(spent(self._row(mode).more_than(none)).values()) for mode in modes)
            row = sum(spent(sliced).values()) / layout.size("cp") + more / cut
        else:
            row = min(sum(spent(self._row(mode).work).values()) for mode in modes) / cut
        least = branch.rows * branch.microbatches * row / pp
        schedule = values.get("parallel.pipeline.schedule", parallel.pipeline.schedule if candidate else None)
        if pp > 1 and schedule is not None:
            waits = _WAITS.get(schedule, 0.0)
            if schedule is PipelineSchedule.INTERLEAVED:
                waits = 1 / (values.get("parallel.pipeline.stages_per_rank", parallel.pipeline.stages_per_rank) or 2)
            least *= 1 + waits * (pp - 1) / branch.microbatches
        if slices is None:
            return least
        share = self._least_share(pp, values)
        for item in slices.traffic:
            calls, size = (share * branch.microbatches * number for number in (item.calls, branch.rows * (item.size or 0)))
            least += collective_seconds(layout, self.hardware, item.axis, item.kind, calls, size)
        offload = values.get("parallel.cpu_offload", parallel.cpu_offload)
        least += self._of_rank(layout, slices.updated) / (HOST_MEMORY if offload else self._rates[False].bandwidth)
        if offload:
            least += self._of_rank(layout, slices.copied) / (self.hardware.host_gb_s * 1e9)
        return (1 + self.hardware.beyond) * least

    def _of_rank(self, layout: Layout, whole: tuple[float, float]) -> float:
        """Return the least that the fullest rank has of some bytes: of what is no expert, and of experts."""
        dense, experts = whole
        shards, of_experts = layout.size("dp_shard_cp"), layout.size(shard_axis(layout, EXPERTS))
        return ROUNDED * (dense / shards + experts / of_experts) / layout.size("pp")

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
        slices, parallel = self.slices(branch, candidate), self.setup.config.parallel
        held = self.hardware.reserved_gib * 2**30
        if slices is not None and not values.get("parallel.cpu_offload", parallel.cpu_offload):
            held += self._of_rank(layout, (slices.dense, slices.experts))
        if slices is not None and branch.microbatches > 1 and (sync := values.get("parallel.sync", parallel.sync)) is not None:
            held += ROUNDED * slices.gathered / layout.size("pp") if sync is SyncPolicy.DEFER else 0.0
            held += ROUNDED * slices.reduced / layout.size("pp") if sync is not SyncPolicy.REDUCE_EACH else 0.0
        row = self._row(values.get(_MODE, parallel.activation_checkpointing))
        alive = min(1.0, branch.microbatches / layout.size("pp"))
        kept = row.kept * branch.rows / (layout.size("tp") * layout.size("cp"))
        return held + (1 + ALLOCATOR) * ROUNDED * alive * kept

    def refused(self, branch: Branch, candidate: Candidate) -> bool:
        """Return whether the slices of a candidate are refused, whatever else it chooses."""
        return self.slices(branch, candidate) is None

    def slices(self, branch: Branch, candidate: Candidate) -> _Slices | None:
        """Return what all layouts with the same slices share; ``None``: they are refused."""
        values, layout = dict(candidate.values), branch.layout
        chosen = tuple((name, values[name]) for name in (*_SLICING, "optimizer.kind") if name in values)
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
        state, updated, copied = Counter[bool](), Counter[bool](), Counter[bool]()
        for row in plan.parameters:
            kind = axis[row.unit]
            of_experts, shards = kind == EXPERTS, plan.layout.size(shard_axis(plan.layout, kind))
            held, moments = (1 + row.trainable) * row.bytes_per_rank, state_bytes(plan, row)
            state[of_experts] += shards * (held + moments)
            updated[of_experts] += shards * (held + row.bytes_per_rank + 2 * moments)
            copied[of_experts] += shards * held
        traffic = tuple(item for item in activation_traffic(plan) if item.size and item.kind != "send")
        sizes = (sum(row.gathered_bytes for row in plan.parameters), sum(row.reduced_bytes for row in plan.parameters))
        sums = (updated[False], updated[True]), (copied[False], copied[True])
        return _Slices(traffic, state[False], state[True], *sums, *sizes)

    def _run(self, layout: Layout, chosen: tuple[tuple[str, Any], ...], rows: int = 1) -> RunSetup:
        """Return a run of one microbatch of some sequences."""
        config = Candidate(layout, (*_PLAIN, ("training.microbatch_size", rows), *chosen)).config(self.setup.config)
        training = config.training.model_copy(update={"global_batch_size": rows * layout.size("dp")})
        return change_setup(self.setup, config.model_copy(update={"training": training}), layout.world_size)

    def _row(self, mode: ActivationCheckpointing) -> _Row:
        """Return what a sequence adds on a single rank, under a mode of recomputation."""
        if mode not in self._rows:
            runs = (self._run(Layout(dp_shard=1).resolve(1), ((_MODE, mode),), rows) for rows in (1, 2))
            self._rows[mode] = self._added(*runs)
        return self._rows[mode]

    def _sliced_row(self, branch: Branch, values: Mapping[str, Any]) -> _Row:
        """Return what a whole sequence adds on a rank with slices of matrices, if nothing is recomputed."""
        layout, chosen = branch.layout, tuple((key, values[key]) for key in ("parallel.sequence_parallel",) if key in values)
        sizes = (layout.size("tp"), gcd(layout.ep, layout.size("dp_shard") * layout.size("tp")), chosen)
        if sizes not in self._sliced:
            whole = replace(layout, pp=1, dp_replicate=1, cp=1, ep=sizes[1]).resolve(
                layout.size("dp_shard") * layout.size("tp")
            )
            runs = [self._run(world_of(whole), chosen, rows) for rows in (1, 2)]
            self._sliced[sizes] = self._added(*runs)
        return self._sliced[sizes]

    def _added(self, one: RunSetup, two: RunSetup) -> _Row:
        """Return by how much a run of two rows works and holds more than a run of one."""
        found = []
        for run in (one, two):
            traces = Traces(run, store=self.store)
            held = forecast_memory(run, traces).parts["activations"]
            found.append((LayerWork.of(traces).on_rank(run.plan, 0), held))
        (fewer, less), (more, held) = found
        return _Row(Counter({kind: more[kind] - fewer[kind] for kind in Work}), max(0, held - less))


_MODE = "parallel.activation_checkpointing"
_SLICING = ("parallel.sequence_parallel", "parallel.context_parallel")

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

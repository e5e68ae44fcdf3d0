"""What a candidate needs at the least, time and memory, from numbers that many share. All bounds but one need no plan.

Time: the work of a rank's rows of tokens, the wait of a pipeline whose stages are even, the collectives of activations, what
of the collectives over data ranks is longer than all that can hide it, the update of a rank's share of the state, and copies
of one pass if that is on the host. Launches count nothing. Memory: a rank's share of the state, the activations of as many
microbatches as a schedule has alive, and of one layer in backward.

One more bound is of a candidate that is planned and has stages: what its ranks hold if layers keep only what is known without
a trace of their slices. Traces take seconds, a plan milliseconds.

The work and the activations of a row are by how much a trace of two rows has more than that of one row. So what does not grow
with rows, such as copies of gathered parameters, is not in them. They are measured for each mode of recomputation on one rank,
and are then cut without loss; and once for all layouts with the same slices of matrices, which shows what these do not cut. A
rank that has a part of each sequence has at least that share of the work, but leaves out attention that a mask of documents
hides.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from meshwright.layout import Layout
from meshwright.plan.axes.pipeline.replay import even_replay
from meshwright.plan.cost.hardware import Hardware
from meshwright.plan.cost.links import collective_seconds
from meshwright.plan.given.closed_choices import ActivationCheckpointing, PipelineSchedule, SyncPolicy
from meshwright.plan.given.names import within
from meshwright.plan.result.sharding_plan import EXPERTS, shard_axis
from meshwright.search.shared_numbers import MODE, SCHEDULE, STAGES, Numbers, Slices
from meshwright.search.space import Branch, Candidate
from meshwright.trace.held.stage_memory import TracedSizes
from meshwright.trace.kept_traces import TraceStore
from meshwright.trace.layer_work import Rates
from meshwright.trace.time import HOST_MEMORY
from meshwright.trace.verdict import ALLOCATOR, least_fit
from meshwright.trace.work import Work
from meshwright.train.start.setup import RunSetup

__all__ = ["Bounds"]

ROUNDED = 0.98
"""Padding makes shards of a small world a little larger than their share of those of a large one."""

LONG = 2
"""Microbatches for each rank of `pp` from which on no more are alive at once, and a split backward may fill all waits."""


class Bounds:
    """Lower bounds of the candidates of a space.

    Args:
        setup: the run.
        hardware: the devices.
        store: traces.
    """

    def __init__(self, setup: RunSetup, hardware: Hardware, store: TraceStore) -> None:
        self.setup, self.hardware, self.numbers = setup, hardware, Numbers(setup, store)
        self.limit = hardware.memory_gib * 2**30
        self._trained = all(
            any(row.trainable for row in setup.plan.parameters if within(row.name, [layer])) for layer in setup.plan.layers
        )
        self._rates = {
            compiled: replace(
                Rates.of(setup, hardware),
                fused=Rates.of(_compiled(setup, compiled), hardware).fused,
                per_operator=0.0,
                per_unit=0.0,
            )
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
        rates = self._rates[values.get("parallel.compile", parallel.compile or candidate is None)]

        def spent(work: Counter[Work]) -> float:
            if layout.size("cp") > 1:
                work = Counter(
                    {**work, Work.ATTENTION: int(self.numbers.attention_of_parts(layout.size("cp")) * work[Work.ATTENTION])}
                )
            return sum(rates.spent(work).values())

        modes = [values[MODE]] if MODE in values else branch.choices.get(MODE, [parallel.activation_checkpointing])
        slices = None if candidate is None else self.numbers.slices(branch, candidate)
        if measured and slices is not None:
            once = self.numbers.work(ActivationCheckpointing.NONE)
            again = min(spent(_more(self.numbers.work(mode), once)) for mode in modes)
            row = spent(self.numbers.sliced_work(branch, values)) / layout.size("cp") + again / cut
        else:
            row = min(spent(self.numbers.work(mode)) for mode in modes) / cut
        work, exchanged, even = branch.rows * branch.microbatches * row / pp, 0.0, 1.0
        if slices is not None:
            share = self._least_share(pp, values)
            traffic, part = slices.traffic, share
            if measured and candidate is not None:
                (traffic, even), part = self.numbers.traffic(branch, candidate), 1.0
            for axis, kind, calls, size in traffic:
                times = part * branch.microbatches
                exchanged += collective_seconds(layout, self.hardware, axis, kind, times * calls, times * branch.rows * size)
        computed = work + exchanged
        least = computed
        if pp > 1 and self._trained:
            # A run lasts as long as one of even stages at the least, and as the turns of the rank with the most work.
            least = max(computed, (work + even * exchanged) / (1 - ROUNDED * self._idle(branch, values)))
        if slices is None:
            return least
        called = self._units_seconds(branch, slices, values, share)
        least += called - self.hardware.overlap * min(called, computed)
        offload = values.get("parallel.cpu_offload", parallel.cpu_offload)
        least += self._of_rank(layout, slices.updated) / (HOST_MEMORY if offload else self._rates[False].bandwidth)
        if offload:
            least += self._of_rank(layout, slices.copied) / (self.hardware.host_gb_s * 1e9)
        return (1 + self.hardware.beyond) * least

    def _schedule(self, values: Mapping[str, Any]) -> tuple[PipelineSchedule, int]:
        """Return the schedule of a candidate, and the number of stages on a rank."""
        pipeline = self.setup.config.parallel.pipeline
        schedule, each = values.get(SCHEDULE, pipeline.schedule), values.get(STAGES, pipeline.stages_per_rank)
        return schedule, each or (1 if schedule.single else max(2, self.numbers.passes))

    def _run_of(self, branch: Branch, values: Mapping[str, Any]) -> tuple[PipelineSchedule, int, int] | None:
        """Return schedule, stages of a rank, and microbatches of a run of a candidate; ``None``: there is no such run."""
        schedule, each = self._schedule(values)
        microbatches = branch.microbatches // self.setup.config.parallel.pipeline.runs_per_step
        own = each > 1 if schedule is PipelineSchedule.INTERLEAVED else each == (1 if schedule.single else 2)
        runs = own and microbatches and schedule.takes(branch.layout.size("pp"), microbatches)
        return (schedule, each, microbatches) if runs else None

    def _idle(self, branch: Branch, values: Mapping[str, Any]) -> float:
        """Return the least share of a run in which the ranks of a pipeline wait, if their stages are even.

        Of uneven stages a run takes longer, for all their work together.
        """
        pp, parallel, found = branch.layout.size("pp"), self.setup.config.parallel, [1.0]
        full = values.get(MODE, parallel.activation_checkpointing) is ActivationCheckpointing.FULL
        open_choices = ((None,) if key in values else branch.choices.get(key, (None,)) for key in (SCHEDULE, STAGES))
        for chosen in product(*open_choices):
            open_values = {key: one for key, one in zip((SCHEDULE, STAGES), chosen, strict=True) if one is not None}
            if (run := self._run_of(branch, {**open_values, **values})) is None:
                continue
            schedule, each, microbatches = run
            waits = 0.0 if schedule.splits else (pp - 1) / microbatches / each
            if microbatches < pp or (schedule.splits and microbatches <= LONG * pp):
                found.append(min(even_replay(schedule, pp, each, microbatches, float(full)).idle))
            else:
                found.append(waits / (1 + waits))
        return min(found) if len(found) > 1 else 0.0

    def _units_seconds(self, branch: Branch, slices: Slices, values: Mapping[str, Any], share: float) -> float:
        """Return the least seconds of the collectives over data ranks in a step; of stages, those of layers alone."""
        layout, sync = branch.layout, values.get("parallel.sync", self.setup.config.parallel.sync)
        pp, several = layout.size("pp"), branch.microbatches if sync is SyncPolicy.REDUCE_EACH else 1
        total = 0.0
        for (of_units, in_layers), units in slices.units.items():
            if pp > 1 and not in_layers:
                continue
            axis, part = shard_axis(layout, of_units), share if in_layers else 1.0
            gathers = units.once if sync in (None, SyncPolicy.DEFER) else [branch.microbatches * one for one in units.again]
            calls, size = (part * number for number in units.reductions)
            for one, kind, number, moved in (
                (axis, "all_gather", part * gathers[0], part * gathers[1]),
                (axis, "reduce_scatter", several * calls, several * size),
                ("dp_replicate", "all_reduce", calls, size / layout.size(axis)),
            ):
                total += collective_seconds(layout, self.hardware, one, kind, number, moved)
        return ROUNDED * total

    def _of_rank(self, layout: Layout, whole: tuple[float, float]) -> float:
        """Return the least that the fullest rank has of some bytes: of what is no expert, and of experts."""
        dense, experts = whole
        shards, of_experts = layout.size("dp_shard_cp"), layout.size(shard_axis(layout, EXPERTS))
        return ROUNDED * (dense / shards + experts / of_experts) / layout.size("pp")

    def _least_share(self, pp: int, values: Mapping[str, Any]) -> float:
        """Return the least share of the layers that the rank with the most work of `pp` has."""
        layers, head = len(self.setup.plan.layers), self.numbers.head
        least = max(self._schedule(values)[1], (layers + head) / pp - head)
        return 1.0 if pp == 1 or not layers else min(1.0, least / layers)

    def bytes(self, branch: Branch, candidate: Candidate) -> float:
        """Return the least bytes of the fullest rank of a candidate, with what the device reserves."""
        values, layout, pp = dict(candidate.values), branch.layout, branch.layout.size("pp")
        slices, parallel, several = self.numbers.slices(branch, candidate), self.setup.config.parallel, branch.microbatches > 1
        offload = values.get("parallel.cpu_offload", parallel.cpu_offload)
        state = gradients = unsharded = waiting = first = 0.0
        sync = values.get("parallel.sync", parallel.sync)
        stages = 1 if pp == 1 else self._schedule(values)[1]
        if slices is not None:
            if not offload:
                state, gradients = self._of_rank(layout, slices.state), self._of_rank(layout, slices.gradients)
            if several and sync is not None:
                unsharded += slices.gathered / pp if sync is SyncPolicy.DEFER else 0.0
                waiting += self._waiting(branch, values) * slices.reduced if sync is not SyncPolicy.REDUCE_EACH else 0.0
            unsharded += (
                stages * slices.layer if sync is not SyncPolicy.DEFER and (pp > 1 or layout.size("dp_shard_cp") > 1) else 0
            )
            first = float(slices.unit_gradients) if pp > 1 else 0.0
        mode = values.get(MODE, parallel.activation_checkpointing)
        kept, all_kept = (
            sum(self.numbers.kept(branch, values, one)[0].values()) for one in (mode, ActivationCheckpointing.NONE)
        )
        # A layer in backward has all of its own; of submodules recomputed one by one, the larger is half of it or more. On one
        # rank it is measured too, and may be less.
        again = max(0, all_kept - kept) / max(1, len(self.setup.plan.layers))
        again *= 0.5 if mode is ActivationCheckpointing.SUBMODULE else 1.0
        again = min(again, self.numbers.works(mode))
        once, waited = (1.0, 1.0) if pp == 1 else self._alive(branch, values)
        activations = max(
            branch.rows * (alive * kept + again) / (layout.size("tp") * layout.size("cp")) + more
            for alive, more in ((once, first), (waited, waiting))
        )
        early = (1 + ALLOCATOR) * ROUNDED * (activations + unsharded)
        if several and sync is SyncPolicy.REDUCE_EACH and waited == once:
            early += gradients
        return self.hardware.reserved_gib * 2**30 + state + max(early, gradients)

    def _waiting(self, branch: Branch, values: Mapping[str, Any]) -> float:
        """Return the least share of all gradients that wait on some rank of `pp` at once.

        In a short run of several stages a rank, those of one stage may be reduced before those of another begin.
        """
        pp, runs = branch.layout.size("pp"), self.setup.config.parallel.pipeline.runs_per_step
        together = pp == 1 or runs > 1 or branch.microbatches >= LONG * pp
        return 1 / pp if together else 1 / pp / self._schedule(values)[1]

    def bytes_in_stages(self, branch: Branch, candidate: Candidate, run: RunSetup) -> float:
        """Return the least bytes of the fullest rank of a candidate that is planned, and 0 if it has no stages.

        A plan says which layers each rank has, and what it receives and sends.
        """
        if not run.plan.stages:
            return 0.0
        values, layout = dict(candidate.values), branch.layout
        mode = values.get(MODE, self.setup.config.parallel.activation_checkpointing)
        part = ROUNDED * branch.rows / (layout.size("tp") * layout.size("cp"))
        kept, around = self.numbers.kept(branch, values, mode)
        sizes = TracedSizes.at_least({name: int(part * size) for name, size in kept.items()}, int(part * around))
        least = 0.0
        short, microbatches = LONG * layout.size("pp"), run.plan.options.microbatches // run.plan.options.runs_per_step
        for most in (short, None) if microbatches > short else (None,):  # a short run is looked at faster
            if least <= self.limit:
                least = least_fit(run, self.hardware, sizes, most).peak_bytes
        return least

    def _alive(self, branch: Branch, values: Mapping[str, Any]) -> tuple[float, float]:
        """Return the least that some rank of `pp` has alive, however the model is cut: at the most, and while gradients wait.

        The unit is a microbatch of the whole model.

        A rank with a share s of the layers and a microbatches alive has a s. The shares add up to 1. So the largest is least
        where all are equal: there it is 1 over the sum of all 1 / a. In a short run, and in gpipe, the most are alive when no
        gradients are there yet. After one backward it is one less.
        """
        if (run := self._run_of(branch, values)) is None:
            return 0.0, 0.0
        schedule, each, microbatches = run
        pp = branch.layout.size("pp")
        if self.numbers.passes > 1:  # they keep different amounts, and those between the first and the last nothing
            return 1 / pp, 0.0
        alive = even_replay(schedule, pp, each, min(microbatches, LONG * pp)).alive
        most = 1 / sum(1 / one for one in alive)
        if schedule is not PipelineSchedule.GPIPE and microbatches >= LONG * pp:
            return most, most
        return most, 0.0 if min(alive) <= 1 else 1 / sum(1 / (one - 1) for one in alive)

    def refused(self, branch: Branch, candidate: Candidate) -> bool:
        """Return whether the slices of a candidate are refused, whatever else it chooses."""
        return self.numbers.slices(branch, candidate) is None


def _compiled(setup: RunSetup, compiled: bool) -> RunSetup:
    return replace(setup, plan=replace(setup.plan, options=replace(setup.plan.options, compile=compiled)))


def _more(work: Counter[Work], than: Counter[Work]) -> Counter[Work]:
    return Counter({kind: max(0, work[kind] - than[kind]) for kind in Work})

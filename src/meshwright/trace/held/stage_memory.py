"""What a rank of a pipeline holds at each of its turns.

Activations are those of the microbatches in flight. What a layer keeps of one, what surrounds the layers, and what the loss
keeps, is from a trace of a few layers without a pipeline. State, gathered parameters and gradients are from the plan: unsharded
gradients wait from the first backward of a stage to its last one, and only then become shards, unless they are reduced each
time.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import mul
from typing import NamedTuple

from meshwright.plan.axes.data.unit_traffic import gradient_peak, gradients_between
from meshwright.plan.axes.pipeline.held_turns import HeldTurn, turns_of_rank
from meshwright.plan.axes.pipeline.replay import receive_buffer_bytes
from meshwright.plan.axes.pipeline.schedule_turns import Phase
from meshwright.plan.axes.pipeline.stage_plan import (
    crossing_bytes,
    first_trained,
    parts_of_rank,
    passes_of,
    stages_of_rank,
    stages_with,
)
from meshwright.plan.axes.pipeline.stage_rows import rows_on_stages
from meshwright.plan.cost.alike_ranks import alike_rank
from meshwright.plan.cost.price import totals_of_rank
from meshwright.plan.given.closed_choices import PipelineSchedule
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.plan.update.states import orthogonalised
from meshwright.trace.few_layers import Traces, kept_layers
from meshwright.trace.live import Kind
from meshwright.trace.step import AFTER_LOSS, BEFORE_LOSS, FORWARD, LOSS, UPDATE

__all__ = ["StageMemory", "TracedSizes", "held_in_update"]

Parts = Mapping[str, int]
"""Bytes by what they are for, as in :class:`~meshwright.trace.held.memory.MemoryForecast`."""


def held_in_update(plan: ShardingPlan) -> int:
    """Return what Muon holds in a step. Traces have AdamW, which holds nothing."""
    return sum(muon.held for muon in orthogonalised(plan).values())


def _more(held: Mapping[Kind, int], than: Mapping[Kind, int]) -> dict[Kind, int]:
    kinds = (Kind.ACTIVATIONS, Kind.LOGITS, Kind.OUTPUTS)
    return {kind: max(0, held.get(kind, 0) - than.get(kind, 0)) for kind in kinds}


def _dot(numbers: Sequence[int], sizes: Sequence[int]) -> int:
    return sum(map(mul, numbers, sizes))


@dataclass(frozen=True)
class TracedSizes:
    """What a trace says of a microbatch, in bytes.

    Attributes:
        layers: name of each layer to what it keeps until its backward, and the outputs of its parameters.
        around: what the stages of a microbatch each keep beside their layers, in the first and the last pass together.
        works: what a rank holds beside all these while a layer is in backward, at the most.
        buffers: buffers of the model and of a step.
        moments: the moments of a step of a few layers.
        noted: what that step held before the loss and after it.
    """

    layers: Mapping[str, tuple[int, int]]
    around: int
    works: int
    buffers: int
    moments: Mapping[str, Mapping[Kind, int]]
    noted: Mapping[str, Mapping[Kind, int]]

    @classmethod
    def of(cls, traces: Traces) -> "TracedSizes":
        """Take them from a trace."""
        return traces.once(_traced_sizes)

    @classmethod
    def at_least(cls, layers: Mapping[str, int], around: int) -> "TracedSizes":
        """Return the least, if all that is known is what each layer keeps, and each stage beside its layers."""
        nothing: Counter[Kind] = Counter()
        moments, noted = dict.fromkeys((FORWARD, LOSS), nothing), dict.fromkeys((BEFORE_LOSS, AFTER_LOSS), nothing)
        return cls({name: (size, 0) for name, size in layers.items()}, around, 0, 0, moments, noted)

    @cached_property
    def communication(self) -> tuple[int, int]:
        """What collectives hold at the most in a turn without a reduction, and in one with it."""
        moments = {name: held[Kind.COMMUNICATION] for name, held in self.moments.items()}
        return max(moments[FORWARD], moments[LOSS]), max(moments.values())

    @cached_property
    def forward_works(self) -> int:
        """What a layer in forward holds beside what layers keep."""
        return max(0, self.moments[FORWARD][Kind.ACTIVATIONS] - self.noted[BEFORE_LOSS].get(Kind.ACTIVATIONS, 0))

    @cached_property
    def of_head(self) -> dict[Kind, int]:
        """What a microbatch keeps for the backward of what comes after the layers."""
        return _more(self.noted[AFTER_LOSS], self.noted[BEFORE_LOSS])

    @cached_property
    def loss_works(self) -> dict[Kind, int]:
        """What the loss, or its backward, holds beside that."""
        return _more(self.moments[LOSS], self.noted[AFTER_LOSS])


def _traced_sizes(traces: Traces) -> TracedSizes:
    plan, kept, trace = traces.setup.plan, kept_layers(traces), traces.trace
    noted = trace.step.noted
    return TracedSizes(
        {name: (kept.by_kind[kind], kept.outputs[kind]) for name, kind in zip(plan.layers, traces.kinds, strict=True)},
        kept.around,
        max(0, kept.works - kept.around),
        trace.buffer_bytes(plan.options.microbatches),
        traces.moments,
        noted,
    )


def _layers_of_stages(plan: ShardingPlan, sizes: Mapping[str, tuple[int, int]]) -> list[tuple[int, int]]:
    """Return for each stage the bytes that its layers keep of a microbatch, and those of the outputs of their parameters."""
    of_stages = {name for row in plan.stages for name in row.layers}
    around = {name: stages_with(plan, name) for name in plan.layers if name not in of_stages}
    found = []
    for row in plan.stages:
        own = [sizes[name] for name in (*row.layers, *(name for name, stages in around.items() if row.index in stages))]
        found.append((sum(size for size, _ in own), sum(size for _, size in own)))
    return found


def _shorter(plan: ShardingPlan, most: int) -> ShardingPlan:
    """Return a plan whose runs have so many microbatches at the most."""
    options = plan.options
    microbatches = min(options.microbatches, most * options.runs_per_step)
    return replace(plan, options=replace(options, microbatches=microbatches))


class StageMemory:
    """What a rank of `pp` holds.

    Args:
        plan: the plan of the run.
        sizes: what a trace says of a microbatch.
        of_stages: what the layers of each stage keep of it, and the outputs of their parameters.
        rank: which rank of `pp`.
    """

    @classmethod
    def of_ranks(cls, plan: ShardingPlan, sizes: TracedSizes) -> "list[StageMemory]":
        """Return what each rank of `pp` holds."""
        of_stages = _layers_of_stages(plan, sizes.layers)
        return [cls(plan, sizes, of_stages, rank) for rank in range(plan.layout.size("pp"))]

    def __init__(self, plan: ShardingPlan, sizes: TracedSizes, of_stages: Sequence[tuple[int, int]], rank: int) -> None:
        self.plan, self.sizes, self.rank = plan, sizes, rank
        self.stages = stages_of_rank(plan, rank)
        # A rank with the same rows has the same totals and gradients, but for what it receives.
        self._like, self._places = alike_rank(plan, rank), {stage: place for place, stage in enumerate(self.stages)}
        self._totals = replace(totals_of_rank(plan, self._like), receive_buffer_bytes=receive_buffer_bytes(plan, rank))
        pp = plan.layout.size("pp")
        between = range(pp, (passes_of(plan) - 1) * pp)  # the passes without a gradient keep nothing
        around = sizes.around // min(2, passes_of(plan))  # it is that of the first and of the last pass
        self._kept = [0 if stage in between else around + of_stages[stage][0] for stage in self.stages]
        # The first stage that is trained has no half for inputs.
        self._halved = [0 if stage <= first_trained(plan) else of_stages[stage][1] for stage in self.stages]
        self._sent = [self._crosses(stage + 1, stage) for stage in self.stages]
        self._returned = [self._crosses(stage, stage - 1) for stage in self.stages]

    def _crosses(self, cut: int, other: int) -> int:
        """Return the bytes that cross the cut before a stage, if another stage beyond it is on another rank."""
        if not 0 <= other < len(self.plan.stages) or cut == len(self.plan.stages) or other in self.stages:
            return 0
        return crossing_bytes(self.plan, cut)

    def moments(self, most: int | None = None) -> dict[str, Parts]:
        """Return what the rank holds at the fullest of its turns, apart for those that end the gradients of a stage, and in the
        update.

        Args:
            most: microbatches of a run that are looked at, at the most. A longer run holds no less.
        """
        turns = turns_of_rank(self.plan if most is None else _shorter(self.plan, most), self.rank)
        found = {}
        for moment, last in (("with most microbatches alive", False), ("the last backward", True)):
            found[moment] = self._parts_of(max((self._held(turn) for turn in turns if turn.last is last), key=sum))
        return {**found, UPDATE: self.update}

    @cached_property
    def update(self) -> Parts:
        """What the rank holds in the update."""
        rows = rows_on_stages(self.plan, stages_of_rank(self.plan, self._like))
        return {**self.idle, "gradients": self._totals.gradient_bytes, "communication": 0, "update": held_in_update(rows)}

    @cached_property
    def idle(self) -> Parts:
        """What the rank holds before the first turn."""
        names = ("gradients", "gathered", "unsharded_gradients", "activations", "logits", "update")
        return {
            "parameters": self._totals.parameter_bytes,
            "optimizer": self._totals.optimizer_bytes,
            "buffers": self.sizes.buffers,
            "communication": self._totals.receive_buffer_bytes,
            **dict.fromkeys(names, 0),
        }

    def at(self, turn: HeldTurn) -> Parts:
        """Return what the rank holds at a turn when it holds the most."""
        return self._parts_of(self._held(turn))

    def _parts_of(self, held: "_Held") -> Parts:
        return {**self.idle, "gathered": self._totals.gathered_peak_bytes, **held._asdict()}

    def _held(self, turn: HeldTurn) -> "_Held":
        """Return what of it differs between turns."""
        activations = _dot(turn.alive, self._kept) + _dot(turn.halved, self._halved)
        works = self.sizes.forward_works if turn.phase is Phase.FORWARD else self.sizes.works
        logits, head = 0, len(self.plan.stages) - 1
        if head in self._places:
            of_head, place = self.sizes.of_head, self._places[head]
            alive, halved = turn.alive[place], turn.halved[place]
            activations += alive * of_head[Kind.ACTIVATIONS]
            activations += halved * max(0, of_head[Kind.OUTPUTS] - of_head[Kind.LOGITS])
            # The half for inputs of the head holds the logits beside their gradient, and leaves the gradient.
            logits = (alive + (turn.phase is Phase.INPUT and turn.stage == head)) * of_head[Kind.LOGITS]
        if turn.stage != head:
            return self._held_with(turn, activations + works, logits, making=True)
        # What this microbatch keeps for the loss is there while the loss is computed, before it makes gradients of parameters.
        gone, there = self.sizes.of_head, self.sizes.loss_works
        layers = self._held_with(turn, activations + works - gone[Kind.ACTIVATIONS], logits - gone[Kind.LOGITS], making=True)
        loss = self._held_with(turn, activations + there[Kind.ACTIVATIONS], logits + there[Kind.LOGITS], making=False)
        return max(layers, loss, key=sum)

    def _held_with(self, turn: HeldTurn, activations: int, logits: int, *, making: bool) -> "_Held":
        """Return what the rank holds at a turn with some activations and logits.

        Args:
            turn: the turn.
            activations: bytes of them.
            logits: bytes of them.
            making: whether the turn is where it makes gradients of parameters, if it makes some.
        """
        unsharded, shards, reduces = self._gradients(turn, making and turn.phase in (Phase.BACKWARD, Phase.WEIGHT))
        communication = self._totals.receive_buffer_bytes + self._held_sends(turn) + self.sizes.communication[reduces]
        return _Held(shards, unsharded, activations, logits, communication)

    def _held_sends(self, turn: HeldTurn) -> int:
        """Return the bytes of what was sent, is used no more, and waits for the end of the run."""
        schedule = self.plan.options.pipeline_schedule
        if schedule is PipelineSchedule.ONE_F_ONE_B:
            return 0
        outputs = 0 if schedule is PipelineSchedule.GPIPE else _dot(turn.left, self._sent)
        return outputs + _dot(turn.returned, self._returned)

    @cached_property
    def _gradients_of_parts(self) -> list[tuple["_Gradients", list[int]]]:
        """The gradients of each model of the rank, and the places of its stages among those of the rank."""
        parts, like = (parts_of_rank(self.plan, rank) for rank in (self.rank, self._like))
        gradients = [self.plan.once(_gradients_of, stages) for stages in like]
        return [(own, [self._places[one] for one in stages]) for own, stages in zip(gradients, parts, strict=True)]

    def _gradients(self, turn: HeldTurn, making: bool) -> tuple[int, int, bool]:
        """Return the bytes of unsharded gradients and of shards where a turn makes gradients, or before; and whether they are
        reduced there.
        """
        unsharded = shards = 0
        reduces = False
        for own, places in self._gradients_of_parts:
            over = [turn.over[place] for place in places]
            held = (0, 0)
            if all(over):
                held = 0, own.shards
            elif making and (here := self._places[turn.stage]) in places:
                last = turn.last and all(turn.over[place] for place in places if place != here)
                reduces |= last or own.early > 0
                if last:
                    held = max((own.most, own.early + own.shard_of_unit), (own.of_unit, own.shards), key=sum)
                elif any(turn.begun[place] for place in places):
                    held = own.most, own.early
                else:  # the first gradients come as the activations of the microbatch go
                    held = max(own.of_unit, own.most - self._kept[here]), own.early
            elif any(turn.begun[place] for place in places):
                held = own.between, own.early
            unsharded, shards = unsharded + held[0], shards + held[1]
        return unsharded, shards, reduces


class _Held(NamedTuple):
    """What a rank holds at a turn, in bytes; see :class:`~meshwright.trace.held.memory.MemoryForecast`."""

    gradients: int
    unsharded_gradients: int
    activations: int
    logits: int
    communication: int


@dataclass(frozen=True)
class _Gradients:
    """Bytes of the gradients of a model of a rank.

    Attributes:
        most: unsharded ones in a backward, at the most.
        between: unsharded ones between two microbatches.
        of_unit: unsharded ones of the largest unit.
        shards: all shards.
        early: shards between two microbatches.
        shard_of_unit: shards of the largest unit.
    """

    most: int
    between: int
    of_unit: int
    shards: int
    early: int
    shard_of_unit: int


def _gradients_of(whole: ShardingPlan, stages: tuple[int, ...]) -> _Gradients:
    """Return the bytes of the gradients of the model that some stages are."""
    plan = rows_on_stages(whole, stages)
    between, early = gradients_between(plan)
    of_units = plan.shared.ways_of_units.values()
    return _Gradients(
        most=gradient_peak(plan),
        between=between,
        of_unit=max((rows.reduced_bytes for rows in of_units), default=0),
        shards=plan.shared.ways.gradient_bytes,
        early=early,
        shard_of_unit=max((rows.gradient_bytes for rows in of_units), default=0),
    )

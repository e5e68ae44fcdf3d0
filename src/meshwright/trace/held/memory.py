"""What the fullest rank of a run holds at the worst moment, and of what: closed forms of the plan, and a trace of some layers.

A step has few moments in which a rank may hold the most: the forward, the loss, the backward of the last two layers and of the
first two, and the update. In each of them, what a rank holds grows by the same bytes with each further layer of a kind. So a
trace of a few layers gives the bytes of all of them. Shards (of parameters, gradients, and the optimizer's state) depend on the
number of ranks, and come from the plan.

With a pipeline, a rank holds the activations of several microbatches: see :mod:`meshwright.trace.held.stage_memory`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.plan.cost.price import Totals, totals
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.trace.few_layers import Traces, slopes_of
from meshwright.trace.held.stage_memory import StageMemory, TracedSizes, held_in_update
from meshwright.trace.kept_traces import SmallTrace
from meshwright.trace.live import Kind
from meshwright.trace.step import UPDATE
from meshwright.train.start.setup import RunSetup

__all__ = ["MemoryForecast", "forecast_memory", "memory_moments", "moments_of_stages"]


@dataclass(frozen=True)
class MemoryForecast:
    """What the fullest rank holds at the worst moment. All sizes are in bytes.

    Attributes:
        moment: the worst moment.
        parts: what it holds then: ``parameters``, ``optimizer``, ``gradients`` (shards), ``gathered`` (whole parameters),
            ``unsharded_gradients``, ``activations``, ``logits``, ``communication``, ``buffers`` and ``update`` (what an
            optimizer holds in its step beside its state).
        gradients: shards of all its gradients, which it has in the update.
        traced: number of layers of the model that was traced.
        rank: the rank of ``pp``.
    """

    moment: str
    parts: Mapping[str, int]
    gradients: int
    traced: int
    rank: int = 0

    @property
    def peak(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


def forecast_memory(setup: RunSetup, traces: Traces | None = None) -> MemoryForecast:
    """Forecast the memory of a run: its worst moment (:func:`memory_moments`)."""
    return max(memory_moments(setup, traces), key=lambda found: found.peak)


def memory_moments(setup: RunSetup, traces: Traces | None = None) -> list[MemoryForecast]:
    """Forecast what is held in each moment of a step: ``forward``, ``loss``, ``backward of layer N`` (the first and the last
    two, or all) and ``update``. With stages, the moments are those of
    :meth:`~meshwright.trace.held.stage_memory.StageMemory.moments`, of each rank of `pp`.

    No process group may exist; nothing of the run's model is used up.

    Args:
        setup: the run.
        traces: the trace of the run, if it was made already.

    Raises:
        MeshwrightError: the smaller runs that are traced are refused, or what the model computes depends on values.
    """
    traces = traces or Traces(setup)
    if setup.plan.stages:
        return moments_of_stages(setup.plan, TracedSizes.of(traces), traces.first)
    slopes, trace, shards = slopes_of(traces), traces.trace, totals(setup.plan)
    more = Counter(traces.kinds[traces.first :])
    buffers, found = trace.buffer_bytes(setup.plan.options.microbatches), []
    for name, held in traces.moments.items():
        grown = Counter(held)
        for kind, times in more.items():
            for part, slope in slopes[kind].get(name, Counter()).items():
                grown[part] += times * slope
        update = held_in_update(setup.plan) if name == UPDATE else 0
        parts = {**_parts(grown, shards, trace), "buffers": buffers, "update": update}
        found.append(MemoryForecast(name, parts, shards.gradient_bytes, traces.first))
    return found


def moments_of_stages(plan: ShardingPlan, sizes: TracedSizes, traced: int = 0, most: int | None = None) -> list[MemoryForecast]:
    """Return what the ranks of `pp` hold in each moment of a step.

    Args:
        plan: a plan with stages.
        sizes: what is known of a microbatch.
        traced: number of layers of the model that was traced.
        most: see :meth:`~meshwright.trace.held.stage_memory.StageMemory.moments`.
    """
    return [
        MemoryForecast(moment, parts, own.update["gradients"], traced, own.rank)
        for own in StageMemory.of_ranks(plan, sizes)
        for moment, parts in own.moments(most).items()
    ]


def _parts(held: Counter[Kind], shards: Totals, trace: SmallTrace) -> dict[str, int]:
    """Return the parts of a moment, with the shards of the whole run in place of those of a trace."""
    reduced = held[Kind.REDUCED] / max(1, trace.gradient_bytes)
    return {
        "parameters": shards.parameter_bytes,
        "optimizer": shards.optimizer_bytes,
        "gradients": round(min(1.0, reduced) * shards.gradient_bytes),
        "gathered": held[Kind.GATHERED],
        "unsharded_gradients": held[Kind.UNREDUCED],
        "activations": held[Kind.ACTIVATIONS],
        "logits": held[Kind.LOGITS],
        "communication": held[Kind.COMMUNICATION],
    }

"""Does a run fit into its devices, by how much, and if not, what would make it fit."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.plan.cost.hardware import Hardware
from meshwright.plan.given.closed_choices import ActivationCheckpointing, SyncPolicy
from meshwright.trace.changes import KEPT_FIRST, Overrides, filled, least_factor, override_text, with_values
from meshwright.trace.few_layers import Traces
from meshwright.trace.held.memory import MemoryForecast, memory_moments, moments_of_stages
from meshwright.trace.held.stage_memory import TracedSizes
from meshwright.train.config import RunConfig
from meshwright.train.start.setup import RunSetup, change_setup
from meshwright.train.start.teacher_setup import teacher_bytes, with_teacher

__all__ = ["ALLOCATOR", "Change", "Verdict", "fit", "judge", "least_fit"]

ALLOCATOR = 0.15
"""What torch's allocator adds to all but the state, for rounding and fragments. Fitted on two rows of torchtitan's table of
December 2024 (a dense 8B on 8 and on 128 H100), which report reserved memory. Beside it, the allocator keeps the memory of each
stream apart. FSDP2 makes the shards of gradients in the stream of the reduction (``foreach_reduce`` in torch's
_fsdp_collectives.py), so what they take in the update is taken in every other moment, too."""

PROPOSED = 3
"""Number of changes that are proposed."""


@dataclass(frozen=True)
class Change:
    """A change of a run, and what it does to its memory.

    Attributes:
        overrides: what to append to the command.
        cost: what it costs, in words.
        peak_bytes: the peak with it.
        fits: whether the run fits with it.
    """

    overrides: tuple[str, ...]
    cost: str
    peak_bytes: int
    fits: bool


@dataclass(frozen=True)
class Verdict:
    """Whether a run fits.

    Attributes:
        fits: whether it does.
        limit_bytes: memory of a device.
        peak_bytes: what the fullest rank needs at the worst moment.
        moment: that moment.
        parts: what it is needed for; together they are ``peak_bytes``.
        changes: changes that would make the run fit, the cheapest first; empty if it fits.
        rank: the rank of ``pp`` that holds the most.
    """

    fits: bool
    limit_bytes: int
    peak_bytes: int
    moment: str
    parts: dict[str, int]
    changes: tuple[Change, ...] = ()
    rank: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as plain values, for JSON."""
        return asdict(self)


def judge(setup: RunSetup, hardware: Hardware, traces: Traces | None = None) -> Verdict:
    """Return whether a run fits into devices. If it does not, changes are tried until some fit.

    No process group may exist.

    Args:
        setup: the run.
        hardware: the devices.
        traces: the trace of the run, if it was made already.
    """
    traces = traces or Traces(setup)
    verdict = _worst(memory_moments(setup, traces), hardware, setup)
    if verdict.fits:
        return verdict
    found: list[Change] = []
    worse: list[Change] = []
    for overrides, cost in _candidates(setup):
        if len(found) == PROPOSED:
            break
        try:
            config = with_values(setup.config, overrides)
            changed = change_setup(setup, config, setup.layout.world_size, program=False)
            changed = changed if setup.teacher is None else with_teacher(changed)
            other = _worst(memory_moments(changed, replace(traces, setup=changed)), hardware, changed)
        except MeshwrightError:  # the change is illegal for this run
            continue
        change = Change(tuple(f"{key}={override_text(value)}" for key, value in overrides), cost, other.peak_bytes, other.fits)
        (found if other.fits else worse).append(change)
    worse = sorted((change for change in worse if change.peak_bytes < verdict.peak_bytes), key=lambda change: change.peak_bytes)
    changes = (*found, *worse[: PROPOSED - len(found)])
    return Verdict(**{**vars(verdict), "changes": changes})


def fit(setup: RunSetup, hardware: Hardware, traces: Traces | None = None) -> Verdict:
    """Return whether a run fits into devices, without changes that would make it fit. See :func:`judge`."""
    return _worst(memory_moments(setup, traces), hardware, setup)


def least_fit(setup: RunSetup, hardware: Hardware, sizes: TracedSizes, most: int | None) -> Verdict:
    """Return whether a run with stages would fit into devices if it held nothing that only traces tell.

    Args:
        setup: the run.
        hardware: the devices.
        sizes: the least that a microbatch holds.
        most: of a run with more microbatches, the turns of one with so many are looked at; ``None``: all.
    """
    return _worst(moments_of_stages(setup.plan, sizes, most=most), hardware, setup)


def _worst(moments: Iterable[MemoryForecast], hardware: Hardware, setup: RunSetup) -> Verdict:
    """Return the verdict of the moment in which a device needs the most: what is in host memory does not count."""
    return max((_verdict(moment, hardware, setup) for moment in moments), key=lambda found: found.peak_bytes)


def _verdict(forecast: MemoryForecast, hardware: Hardware, setup: RunSetup) -> Verdict:
    parts, not_yet = dict(forecast.parts), max(0, forecast.gradients - forecast.parts["gradients"])
    if setup.plan.options.cpu_offload:  # these are in host memory
        parts |= dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
        not_yet = 0
    state = sum(parts[name] for name in ("parameters", "gradients", "optimizer"))
    parts["allocator"] = round(ALLOCATOR * (sum(parts.values()) - state)) + not_yet
    if teacher := teacher_bytes(setup):
        parts["teacher"] = teacher
    parts["reserved"] = round(hardware.reserved_gib * 2**30)
    limit, peak = round(hardware.memory_gib * 2**30), sum(parts.values())
    return Verdict(peak <= limit, limit, peak, forecast.moment, parts, rank=forecast.rank)


def _candidates(setup: RunSetup) -> Iterator[tuple[Overrides, str]]:
    """Yield changes that need less memory, the cheapest first, and then all that are compatible together."""
    config, plan, layout = setup.config, setup.plan, setup.layout
    parallel, rows = config.parallel, config.training.microbatch_size
    together: dict[str, Any] = {}
    if parallel.loss_chunks == 0:
        yield [("parallel.loss_chunks", None)], "nothing"
        together["parallel.loss_chunks"] = None
    if any(unit.sync is not SyncPolicy.REDUCE_EACH for unit in plan.units) and plan.options.microbatches > 1:
        yield [("parallel.sync", "reduce_each")], "parameters are gathered, and gradients reduced, in each microbatch"
        together["parallel.sync"] = "reduce_each"
    if not parallel.compile and any(unit.activation_checkpointing is ActivationCheckpointing.NONE for unit in plan.units):
        yield [("parallel.compile", True)], "layers are compiled as the run begins"
    modes = [mode.value for mode in KEPT_FIRST[KEPT_FIRST.index(parallel.activation_checkpointing) + 1 :]]
    for mode in modes:
        cost = {"selective": "recomputes about half of each layer", "submodule": "recomputes each layer"}.get(
            mode, "recomputes each layer: about a third more compute"
        )
        yield [("parallel.activation_checkpointing", mode)], cost
    if modes:
        together["parallel.activation_checkpointing"] = modes[-1]
    if config.optimizer.is_adamw:
        cost = "rounds the moments to 8 bits; needs pip install 'meshwright[torchao]'"
        yield [("optimizer.kind", "adamw8bit"), *_without_fused(config)], cost
    if rows > 1:
        times = least_factor(rows)
        yield [("training.microbatch_size", rows // times)], f"smaller products, and {_as_many(times)} the microbatches"
        together["training.microbatch_size"] = 1
    if (replicas := layout.size("dp_replicate")) > 1:
        times = least_factor(replicas)
        sizes = [("layout.dp_replicate", replicas // times), ("layout.dp_shard", times * layout.size("dp_shard"))]
        yield sizes, f"parameters are gathered over {_as_many(times)} the ranks"
    if layout.size("tp") > 1 and not parallel.sequence_parallel:
        yield [("parallel.sequence_parallel", True)], "nothing"
        together["parallel.sequence_parallel"] = True
    for axis in ("tp", "cp"):
        yield (
            [(f"layout.{axis}", 2 * layout.size(axis)), *filled(config, axis)],
            f"twice the communication over {axis}, in each layer",
        )
    if len(together) > 1:
        yield list(together.items()), "all of it together"
    yield [*together.items(), ("parallel.cpu_offload", True)], "shards travel to and from the host in each step"


def _as_many(times: int) -> str:
    return "twice" if times == 2 else f"{times} times"


def _without_fused(config: RunConfig) -> list[tuple[str, Any]]:
    """Return what must go with the kind of the optimizer."""
    return [("optimizer.fused", None)] if config.optimizer.fused is not None else []

"""Which layouts and choices a search looks at: what the user wrote is kept, the rest is free, and what cannot win is left out.

Left out, because something else is never worse:

- ``tp`` over more ranks than a node has: its collectives are in each layer.
- the schedule ``gpipe``: ``1f1b`` waits as long, and holds less.
- the method ``ring`` of ``cp``: it took longer than ``gather`` and held no less (docs/context-parallel.md).
- parts of a sequence of fewer than 256 tokens: ``cp`` is for long sequences.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from meshwright.errors import ConfigError, LayoutError
from meshwright.layout import AXES, Layout, ModelSizes, divisors
from meshwright.plan.given.closed_choices import ActivationCheckpointing, ContextMethod, PipelineSchedule, SyncPolicy
from meshwright.plan.result.sharding_plan import EXPERTS
from meshwright.trace.changes import OF_AXES, override_text, value_of, without_axis
from meshwright.train.config import RunConfig
from meshwright.train.start.setup import RunSetup

__all__ = ["FREE", "Branch", "Candidate", "Space"]

FREE = {
    "layout": ("layout.pp", "layout.dp_replicate", "layout.dp_shard", "layout.cp", "layout.tp", "layout.ep"),
    "microbatch": ("training.microbatch_size",),
    "schedule": ("parallel.pipeline.schedule", "parallel.pipeline.stages_per_rank"),
    "sync": ("parallel.sync",),
    "recompute": ("parallel.activation_checkpointing",),
    "sequence": ("parallel.sequence_parallel",),
    "context": ("parallel.context_parallel",),
    "loss": ("parallel.loss_chunks",),
    "offload": ("parallel.cpu_offload",),
    "compile": ("parallel.compile",),
    "optimizer": ("optimizer.kind",),
}
"""Names of `--free` to the keys that they free."""

_COMPARED = dict.fromkeys(
    (
        *(key for keys in FREE.values() for key in keys if not key.startswith("layout.")),
        *(f"parallel.{key}" for keys in OF_AXES.values() for key in keys),
        "optimizer.fused",
    )
)
"""Keys in which a candidate may differ from its base, beside the sizes."""

ONLY_FREED = ("optimizer.kind",)
"""Keys that are searched only if they are named, because they change what is computed."""

MOST_ROWS = 64
"""Sequences of a microbatch, at most, unless the configuration has more."""

LEAST_PART = 256
"""Tokens of a rank's part of a sequence, at least, in each of the two chunks that it has."""

_SCHEDULES = (PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.INTERLEAVED, PipelineSchedule.ZBV)


@dataclass(frozen=True)
class Candidate:
    """A layout with choices.

    Attributes:
        layout: resolved sizes.
        values: key of the configuration to its value, for all free keys that are no sizes.
    """

    layout: Layout
    values: tuple[tuple[str, Any], ...]

    def config(self, base: RunConfig) -> RunConfig:
        """Return the configuration of this candidate, for a base that the space was made of."""
        changed: dict[str, dict[str, Any]] = {
            "layout": {axis: self.layout.size(axis) for axis in AXES} | {"ep": self.layout.ep}
        }
        back = [pair for axis in OF_AXES if self.layout.size(axis) == 1 for pair in without_axis(base.parallel, axis)]
        pipeline: dict[str, Any] = {}
        for key, value in (*self.values, *back):
            section, _, name = key.partition(".")
            if name.startswith("pipeline."):
                pipeline[name.removeprefix("pipeline.")] = value
            elif key != "optimizer.kind":
                changed.setdefault(section, {})[name] = value
        changed.setdefault("parallel", {})["pipeline"] = base.parallel.pipeline.model_copy(update=pipeline)
        sections = {name: getattr(base, name).model_copy(update=values) for name, values in changed.items()}
        if (kind := dict(self.values).get("optimizer.kind", base.optimizer.kind)) != base.optimizer.kind:
            same = base.optimizer.model_dump(by_alias=True)
            sections["optimizer"] = type(base.optimizer).model_validate({**same, "kind": kind, "fused": None})
        return base.model_copy(update=sections)

    def overrides(self, base: RunConfig) -> tuple[str, ...]:
        """Return what to append to the command of the base, so that it is this candidate."""
        asked, found = base.layout.layout(), []
        for axis in (*AXES, "ep"):
            size = self.layout.ep if axis == "ep" else self.layout.size(axis)
            if getattr(asked, axis) != size:
                found.append(f"layout.{axis}={size}")
        own = self.config(base)
        for key in _COMPARED:
            before, value = value_of(base, key), value_of(own, key)
            if before != value:
                found.append(f"{key}={override_text(value)}")
        return tuple(found)


@dataclass(frozen=True)
class Branch:
    """The candidates of one layout and one size of microbatches.

    Attributes:
        layout: resolved sizes.
        rows: sequences of a microbatch.
        microbatches: passes of a rank in a step.
        choices: the other free keys, each with its values.
    """

    layout: Layout
    rows: int
    microbatches: int
    choices: Mapping[str, tuple[Any, ...]]

    @property
    def size(self) -> int:
        """The number of candidates, those that the schedule does not run included."""
        count = 1
        for values in self.choices.values():
            count *= len(values)
        return count

    def candidates(self) -> Iterator[Candidate]:
        """Yield the candidates, but those that a pipeline is known to refuse."""
        for values in product(*self.choices.values()):
            found = dict(zip(self.choices, values, strict=True))
            if self.layout.size("pp") == 1 or self._runs(found):
                yield Candidate(self.layout, (("training.microbatch_size", self.rows), *found.items()))

    def _runs(self, values: Mapping[str, Any]) -> bool:
        schedule, each = values.get("parallel.pipeline.schedule"), values.get("parallel.pipeline.stages_per_rank")
        if schedule is None:
            return True
        split = values.get("parallel.compile") or values.get("parallel.activation_checkpointing") not in (
            None, ActivationCheckpointing.NONE,
        )  # fmt: skip
        several = schedule is PipelineSchedule.INTERLEAVED or each is None
        takes: bool = schedule.takes(self.layout.size("pp"), self.microbatches)
        return takes and several and not (schedule.splits and split)


class Space:
    """The layouts and choices of a run on a number of ranks.

    Args:
        setup: the run, on any number of ranks.
        world_size: number of ranks.
        node: ranks of a node.
        free: names of :data:`FREE` whose keys are searched although the configuration sets them; ``all``: all of them.

    Raises:
        ConfigError: an unknown name.
    """

    def __init__(self, setup: RunSetup, world_size: int, node: int, free: Iterable[str] = ()) -> None:
        names = set(free)
        if unknown := sorted(names - {*FREE, "all"}):
            raise ConfigError("search.free", f"--free={','.join(unknown)}: legal are {', '.join(FREE)} and all")
        self.setup, self.world_size, self.node = setup, world_size, node
        freed = {key for name in (FREE if "all" in names else names) for key in FREE[name]}
        written = written_keys(setup.config)
        self.free = {
            key for keys in FREE.values() for key in keys if key in freed or (key not in written and key not in ONLY_FREED)
        }
        """Keys that are searched."""

    def searches(self, key: str) -> bool:
        """Return whether a key is searched; a size that is null always is."""
        value = value_of(self.setup.config, key)
        return key in self.free or (key.startswith("layout.") and value in (None, -1))

    def _axis(self, axis: str, values: Iterable[int]) -> tuple[int, ...]:
        """Return the sizes of an axis: those given, or the one that the configuration sets."""
        return tuple(values) if self.searches(f"layout.{axis}") else (getattr(self.setup.config.layout, axis),)

    def layouts(self) -> Iterator[Layout]:
        """Yield the layouts that the number of ranks and the model allow."""
        ranks, sizes = self.world_size, self.sizes
        length = self.setup.config.data.sequence_length
        most = max(1, length // (2 * LEAST_PART))
        for tp in self._axis("tp", [size for size in divisors(ranks) if size <= self.node]):
            for cp in self._axis("cp", [size for size in divisors(ranks) if size <= most]):
                for pp in self._axis("pp", [size for size in divisors(ranks) if size <= (sizes.layers or 1)]):
                    if ranks % (tp * cp * pp):
                        continue
                    data = ranks // (tp * cp * pp)
                    for replicas in self._axis("dp_replicate", divisors(data)):
                        shards = self._axis("dp_shard", [data // replicas if data % replicas == 0 else 0])
                        for shard, ep in product(shards, self._axis("ep", divisors(sizes.experts or 1))):
                            if replicas * shard != data:
                                continue
                            try:
                                yield Layout(pp, replicas, shard, cp, tp, ep).resolve(ranks, sizes)
                            except LayoutError:
                                continue

    @property
    def sizes(self) -> ModelSizes:
        """The sizes of the model that limit a layout."""
        assert self.setup.facts is not None
        return self.setup.facts.sizes

    def branches(self) -> Iterator[Branch]:
        """Yield the layouts with each size of microbatches."""
        training = self.setup.config.training
        for layout in self.layouts():
            share, rest = divmod(training.global_batch_size, layout.size("dp"))
            if rest:
                continue
            own, free = training.microbatch_size, "training.microbatch_size" in self.free
            for size in divisors(share):
                if size != own and not (free and size <= MOST_ROWS):
                    continue
                yield Branch(layout, size, share // size, self._choices(layout, share // size))

    @property
    def _whole_backward(self) -> bool:
        """Whether what the configuration keeps forbids schedules that split backward."""
        parallel = self.setup.config.parallel
        compiled = "parallel.compile" not in self.free and parallel.compile
        modes = set(parallel.activation_checkpointing_layers.values())
        if "parallel.activation_checkpointing" not in self.free:
            modes.add(parallel.activation_checkpointing)
        return compiled or bool(modes - {ActivationCheckpointing.NONE})

    def _parts_experts(self, layout: Layout) -> bool:
        """Return whether `sync: null` may give experts another policy than the rest; otherwise it is one of the policies."""
        others, experts = self._unsharded
        budget = self.setup.plan.options.sync_budget
        return others / layout.size("tp") <= budget < others + experts / layout.ep

    @cached_property
    def _unsharded(self) -> tuple[int, int]:
        """The bytes that `defer` keeps unsharded through a step on one rank: of what is no expert, and of experts."""
        plan, sizes = self.setup.plan, [0, 0]
        kinds = {unit.name: unit.kind for unit in plan.units}
        for row in plan.parameters:
            sizes[kinds[row.unit] == EXPERTS] += row.gathered_bytes + row.reduced_bytes
        return sizes[False], sizes[True]

    def _choices(self, layout: Layout, microbatches: int) -> dict[str, tuple[Any, ...]]:
        found: dict[str, tuple[Any, ...]] = {
            "parallel.compile": (True, False),
            "parallel.activation_checkpointing": tuple(ActivationCheckpointing),
            "parallel.cpu_offload": (False, True),
            "parallel.loss_chunks": (None,),
        }
        if layout.size("dp_cp") > 1 and microbatches > 1:
            found["parallel.sync"] = (*SyncPolicy, *((None,) if self._parts_experts(layout) else ()))
        if layout.size("tp") > 1:
            found["parallel.sequence_parallel"] = (True, False)
        if layout.size("cp") > 1:
            found["parallel.context_parallel"] = (ContextMethod.GATHER, ContextMethod.ULYSSES)
        if (pp := layout.size("pp")) > 1:  # each stage has a layer
            layers = self.sizes.layers or 4 * pp
            schedules = _SCHEDULES if 2 * pp <= layers else _SCHEDULES[:1]
            found["parallel.pipeline.schedule"] = tuple(one for one in schedules if not (one.splits and self._whole_backward))
            found["parallel.pipeline.stages_per_rank"] = (None, 4) if 4 * pp <= layers else (None,)
        if "optimizer.kind" in self.free and self.setup.config.optimizer.is_adamw:
            found["optimizer.kind"] = tuple(dict.fromkeys((self.setup.config.optimizer.kind, "adamw8bit")))
        return {key: values for key, values in found.items() if key in self.free}


def written_keys(config: RunConfig) -> set[str]:
    """Return the keys of :data:`FREE` that a configuration sets; a size that is null is not set."""
    found = set()
    for key in (key for keys in FREE.values() for key in keys):
        value: Any = config
        written = True
        for part in key.split("."):
            written = written and part in value.model_fields_set
            value = getattr(value, part)
        if written and not (key.startswith("layout.") and value in (None, -1)):
            found.add(key)
    return found

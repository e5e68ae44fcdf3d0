"""Traces that were made already, in memory and in the user's cache directory, by all that they depend on.

A trace is of a run with a few layers in the smallest world (:mod:`meshwright.trace.fewer`). So it does not depend on the number
of data ranks, of stages, of layers, nor on devices, and layouts of a search share it.
"""

import hashlib
import json
import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from meshwright.errors import MeshwrightError
from meshwright.files import write_shared
from meshwright.models._transformers_compat import attention_of
from meshwright.plan.cost.price import totals
from meshwright.trace.fewer import options_of_fewer, with_fewer, world_of
from meshwright.trace.held.compiled import spared_by_compiler
from meshwright.trace.live import Kind
from meshwright.trace.step import StepTrace, trace_step
from meshwright.trace.work import Work
from meshwright.train.proofs.claim import model_digest, objective_digest, versions
from meshwright.train.proofs.own_code import package_digest
from meshwright.train.proofs.records import cache_directory
from meshwright.train.start.setup import RunSetup

__all__ = ["SmallTrace", "TraceStore"]

_ELSEWHERE = ("output", "layout", "parallel", "optimizer", "schedule", "checkpoint", "launch", "metrics", "callbacks", "sample")
"""Sections of the configuration that a trace does not depend on, or that are in its layout and its options."""


LOGGER = logging.getLogger(__name__)

T = TypeVar("T", bound=StrEnum)


@dataclass(frozen=True)
class SmallTrace:
    """A trace of the first layers of a run.

    Attributes:
        step: what a rank held and computed.
        layers: names of the layers.
        parameter_bytes: shards of the parameters in it.
        gradient_bytes: shards of their gradients.
        optimizer_bytes: shards of the optimizer's state.
    """

    step: StepTrace
    layers: tuple[str, ...]
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    def buffer_bytes(self, microbatches: int) -> int:
        """Return the bytes of buffers, and of the batches of a step with so many microbatches."""
        state = self.step.state - self.parameter_bytes - self.optimizer_bytes
        return max(0, state + (microbatches - self.step.microbatches) * self.step.batch)

    @classmethod
    def of(cls, setup: RunSetup, layers: int, *, device: bool, load: float) -> "SmallTrace":
        """Make it; see :func:`~meshwright.trace.step.trace_step` for the arguments."""
        small = with_fewer(setup, layers)
        held, names = totals(small.plan), small.plan.layers
        step = trace_step(small, device=device, load=load)
        return cls(step, names, held.parameter_bytes, held.gradient_bytes, held.optimizer_bytes)

    @classmethod
    def from_json(cls, text: str) -> "SmallTrace":
        """Return the trace of :meth:`to_json`.

        Raises:
            ValueError, KeyError, TypeError: the text is something else.
        """
        content = json.loads(text)
        step = content.pop("step")
        found = StepTrace(
            moments=_read(step["moments"], Kind),
            works={name: _read(layers, Work) for name, layers in step["works"].items()},
            noted=_read(step["noted"], Kind),
            of_layers={name: _read(layers, Kind) for name, layers in step["of_layers"].items()},
            **{name: int(step[name]) for name in ("microbatches", "state", "batch", "peak")},
        )
        return cls(found, tuple(map(str, content.pop("layers"))), **{name: int(size) for name, size in content.items()})

    def to_json(self) -> str:
        """Return the trace as text."""
        return json.dumps({**vars(self), "step": vars(self.step)})


def _read(text: Mapping[str, Mapping[str, Any]], kind: type[T]) -> dict[str, dict[T, int]]:
    """Return bytes or work by kind of some names."""
    return {name: {kind(key): int(size) for key, size in held.items()} for name, held in text.items()}


class TraceStore:
    """The traces of a run, and of runs of the same model with other layouts and choices.

    Args:
        setup: one of these runs.
        directory: where traces are kept for other processes; ``None``: in the user's cache directory.

    Attributes:
        made: number of traces that were made here, and not found.
    """

    def __init__(self, setup: RunSetup, directory: Path | None = None) -> None:
        self.setup, self.made = setup, 0
        self._found: dict[str, SmallTrace] = {}
        self._spared: dict[str, dict[str, int]] = {}
        self._directory = directory

    def get(self, setup: RunSetup, layers: int, *, device: bool, load: float) -> SmallTrace:
        """Return the trace of the first layers of a run, which is made if it is not there.

        Args:
            setup: a run of the same model.
            layers: how many layers.
            device: whether kernels keep what they keep on a device.
            load: tokens of the experts of the rank, over an even share.
        """
        key = self._key(setup, layers, device, load)
        if key not in self._found:
            self._found[key] = self._read(key) or self._make(key, setup, layers, device, load)
        return self._found[key]

    def spared(self, setup: RunSetup, layers: int, names: Collection[str], *, device: bool, load: float) -> dict[str, int]:
        """Return how many bytes of a microbatch some layers keep less if they are compiled.

        It is read of a microbatch of one sequence. If that cannot be run, they are taken to keep all.

        Args:
            setup: see :meth:`get`.
            layers: see there.
            names: names of the layers that are asked for.
            device: see there.
            load: see there.
        """
        rows = setup.config.training.microbatch_size
        training = setup.config.training.model_copy(update={"microbatch_size": 1})
        options = replace(setup.plan.options, tokens=(setup.plan.options.tokens or 0) // rows)
        one = replace(
            setup,
            config=setup.config.model_copy(update={"training": training}),
            plan=replace(setup.plan, options=options),
        )
        key = _digest({"step": self._key(one, layers, device, load), "compiled": sorted(names)})
        if key not in self._spared:
            with suppress(OSError, RuntimeError, ValueError, TypeError, AttributeError):
                self._spared[key] = {str(name): int(size) for name, size in json.loads(self._file(key).read_text()).items()}
        if key not in self._spared:
            try:
                small = with_fewer(one, layers, compiled=True)
                self._spared[key] = spared_by_compiler(small, sorted(names), device=device, load=load)
            except MeshwrightError as error:  # as where an objective wants several sequences
                LOGGER.info("what compiled layers keep is not known: %s", error)
                self._spared[key] = {}
            with suppress(OSError, RuntimeError):
                write_shared(self._file(key), json.dumps(self._spared[key]))
        return {name: rows * size for name, size in self._spared[key].items()}

    def _make(self, key: str, setup: RunSetup, layers: int, device: bool, load: float) -> SmallTrace:
        made = SmallTrace.of(setup, layers, device=device, load=load)
        self.made += 1
        with suppress(OSError, RuntimeError):  # a cache that cannot be written; RuntimeError: no home directory
            write_shared(self._file(key), made.to_json())
        return made

    def _read(self, key: str) -> SmallTrace | None:
        with suppress(OSError, RuntimeError, ValueError, KeyError, TypeError):  # absent or damaged: it is made anew
            return SmallTrace.from_json(self._file(key).read_text())
        return None

    def _file(self, key: str) -> Path:
        return (self._directory or cache_directory("traces")) / f"{key}.json"

    def _key(self, setup: RunSetup, layers: int, device: bool, load: float) -> str:
        config, options = setup.config, options_of_fewer(setup, layers)
        parts: dict[str, Any] = {
            "run": self._run,
            "layers": layers,
            "world": asdict(world_of(setup.layout)),
            "options": options.to_dict(),
            "rows": config.training.microbatch_size,
            "length": config.data.sequence_length,
            "device": device,
            "load": load,
        }
        return _digest(parts)

    @cached_property
    def _run(self) -> str:
        """Digest of what runs of the same model share."""
        setup = self.setup
        config = setup.config.model_dump(mode="json", exclude={*_ELSEWHERE, "training"})
        return _digest(
            {
                "model": model_digest(setup.spec, setup.model, setup.config.imports),
                "sizes": setup.model.config.to_dict(),
                "attention": attention_of(setup.model),
                "objective": [objective_digest(setup), setup.config.training.objective],
                "config": config,
                "param_dtype": setup.config.parallel.param_dtype,
                "versions": versions(),
                "code": package_digest("trace/", "objectives/"),
            }
        )


def _digest(parts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]

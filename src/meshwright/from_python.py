"""A run from Python, for a script or a notebook: planned, audited and trained as by the commands."""

import copy
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from meshwright.errors import ConfigError
from meshwright.terminal import html
from meshwright.train.config import RunConfig, load_config, overridden
from meshwright.train.schema.our_objectives import as_ours
from meshwright.user_code import part_of

if TYPE_CHECKING:
    from rich.console import RenderableType
    from transformers import PreTrainedModel

    from meshwright.audit.report import AuditReport
    from meshwright.plan.cost.hardware import Hardware
    from meshwright.plan.result.sharding_plan import ShardingPlan
    from meshwright.search.answer import Answer
    from meshwright.trace.time import TimeForecast
    from meshwright.trace.verdict import Verdict

__all__ = ["PlanView", "Run"]


@dataclass(frozen=True)
class PlanView:
    """A plan, maybe with a forecast for a device. A notebook shows it as tables, ``print`` as text.

    Attributes:
        plan: what every rank holds and sends.
        hardware: the device; ``None``: no forecast was asked for.
        verdict: whether the run fits.
        time: how long a step takes.
    """

    plan: "ShardingPlan"
    hardware: "Hardware | None" = None
    verdict: "Verdict | None" = None
    time: "TimeForecast | None" = None

    def explain(self, *, full: bool = False) -> "RenderableType":
        """Return it as tables for rich to print; ``full``: a line for each parameter and unit."""
        from rich.console import Group

        from meshwright.plan.show.explain import explain
        from meshwright.trace.show import show_remarks, show_time, show_verdict

        parts: list[RenderableType] = [explain(self.plan, full=full)]
        if self.hardware is not None and self.verdict is not None and self.time is not None:
            parts += [show_verdict(self.verdict, self.hardware), show_time(self.time, calibrated=self.hardware.calibrated)]
            parts.append(show_remarks(self.hardware))
        return Group(*parts)

    def __str__(self) -> str:
        from io import StringIO

        from meshwright.terminal import console

        page = StringIO()
        console(page).print(self.explain())
        return page.getvalue()

    def _repr_html_(self) -> str:
        return html(self.explain())


class Run:
    """A run.

    Args:
        config: a YAML file, or the configuration as a mapping.
        overrides: key to value, as ``{"optimizer.lr": 1e-4}``; or lines as on the command line.
        objective: a class, a function, or an object that keeps its arguments as attributes; ``None``: as in the configuration.
        callbacks: further callbacks, likewise.
        sinks: further sinks of metrics, likewise.
        source: what to train on, in place of that of the configuration: a function or class that gives rows, likewise.

    Attributes:
        config: the whole configuration.

    Raises:
        ConfigError: all that is wrong with the configuration; or an object that other processes cannot make again, by name.
    """

    def __init__(
        self,
        config: "str | Path | Mapping[str, Any]",
        overrides: "Mapping[str, Any] | Sequence[str]" = (),
        *,
        objective: Any = None,
        callbacks: Iterable[Any] = (),
        sinks: Iterable[Any] = (),
        source: Any = None,
    ) -> None:
        given = overrides.items() if isinstance(overrides, Mapping) else ()
        lines = [f"{key}={_text(value)}" for key, value in given] or list(overrides)
        if objective is not None:
            lines.append(f"training.objective={_text(as_ours(part_of('objective', objective)))}")
        if source is not None:  # in place of that of the configuration
            lines += ["data.corpus=null", "data.files=[]", "data.hub=null"]
            lines.append(f"data.source={_text(part_of('source', source))}")
        if isinstance(config, Mapping):
            found = overridden(copy.deepcopy(dict(config)), lines)
        else:
            found = load_config(str(config), lines)
        content = found.model_dump(mode="json", exclude_unset=True)  # a search keeps what is written, and nothing else
        if more := [part_of("callbacks", one) for one in callbacks]:
            content["callbacks"] = [*content.get("callbacks", []), *more]
        if more := [part_of("sinks", one) for one in sinks]:
            metrics = content.setdefault("metrics", {})
            metrics["sinks"] = [*metrics.get("sinks", []), *more]
        self.config: RunConfig = overridden(content, ())

    def plan(self, world_size: int | None = None, *, gpu: str | None = None) -> PlanView:
        """Return what every rank will hold and send, as ``meshwright plan``.

        Args:
            world_size: number of ranks; ``None``: as many processes as :meth:`train` would start.
            gpu: device for a forecast: a name, or a hardware file; ``None``: no forecast.
        """
        from meshwright.plan.cost.hardware import load_hardware
        from meshwright.train.start.processes import planned_processes
        from meshwright.train.start.setup import make_setup
        from meshwright.train.start.teacher_setup import with_teacher

        hardware = None if gpu is None else load_hardware(gpu)
        setup = with_teacher(make_setup(self.config, world_size or planned_processes(self.config), planning=True))
        if hardware is None:
            return PlanView(setup.plan)
        from meshwright.trace.forecasts import Forecasts

        found = Forecasts(setup, hardware)
        return PlanView(setup.plan, hardware, found.verdict, found.time)

    def search(self, world_size: int, *, gpu: str, free: Iterable[str] = (), most: int = 5) -> "Answer":
        """Return the best layouts of the run on a number of ranks, as ``meshwright plan --search``.

        Args:
            world_size: number of ranks.
            gpu: device: a name, or a hardware file.
            free: what may change although the configuration sets it: names of ``--free``.
            most: number of layouts to return.

        Raises:
            ConfigError: an unknown device, or an unknown name in ``free``.
        """
        from meshwright.plan.cost.hardware import load_hardware
        from meshwright.search.answer import base_of, search

        hardware = load_hardware(gpu)
        return search(base_of(self.config), world_size, hardware, free=tuple(free), most=most)

    def audit(self, nproc: int | None = None, *, steps: int = 3, dtype: str = "float64", drawn: bool = False) -> "AuditReport":
        """Prove the layout on local processes, as ``meshwright audit``. Its report says whether it ``passed``.

        Args:
            nproc: number of processes; ``None``: as few as the layout needs.
            steps: number of optimizer steps.
            dtype: ``float64``, ``float32`` or ``bfloat16``.
            drawn: feed random tokens instead of the run's documents.
        """
        from meshwright.audit.conduct import audit

        return audit(self.config, nproc=nproc, steps=steps, dtype=dtype, drawn=drawn, say=print)

    def train(self, nproc: int | None = None) -> list[dict[str, Any]]:
        """Train to the end on local processes, as ``meshwright train``, and return the lines of ``metrics.jsonl``.

        Args:
            nproc: number of processes; ``None``: as in the configuration.

        Raises:
            ConfigError: this is a worker of torchrun; or a part is defined where processes of an accelerator cannot find it.
            MeshwrightError: what the run failed with.
        """
        from meshwright.trace.background import command as forecast
        from meshwright.train.start.launch import launch
        from meshwright.train.start.processes import device_kind, local_processes
        from meshwright.train.start.run_files import Paths

        config = self.config if nproc is None else overridden(self.config.model_dump(mode="json"), [f"launch.nproc={nproc}"])
        if "RANK" in os.environ:
            raise ConfigError(
                "run.environment", "Run.train: starts processes of its own; under torchrun use `meshwright train`"
            )
        here = [line for line in config.own_parts if "__main__:" in line]
        if here and not _has_file() and device_kind(config, local_processes(config)) != "cpu":
            said = f"{here[0]}: is defined in a notebook, where workers of an accelerator cannot find it; put it into a module"
            raise ConfigError("config.part", said)
        launch(config, forecast=forecast)
        lines = Paths(config.directory).metrics
        return [json.loads(line) for line in lines.read_text().splitlines()] if lines.is_file() else []

    def model(self) -> "PreTrainedModel":
        """Return the trained model, in memory of this process, with adapters merged.

        Raises:
            CheckpointError: the run has no complete checkpoint.
        """
        from transformers import AutoConfig

        from meshwright.checkpoint.directory import latest
        from meshwright.checkpoint.export import export_checkpoint
        from meshwright.errors import CheckpointError
        from meshwright.models.families.listed import family_named
        from meshwright.models.heads import auto_class
        from meshwright.train.start.run_files import Paths

        newest = latest(Paths(self.config.directory).checkpoints)
        if newest is None:
            raise CheckpointError("checkpoint.incomplete", f"{self.config.directory}: has no complete checkpoint; train first")
        trusted = self.config.model.trust_remote_code
        with tempfile.TemporaryDirectory(prefix="meshwright-model-") as folder:
            out = Path(folder) / "model"
            export_checkpoint(newest, out)
            kind = AutoConfig.from_pretrained(out, trust_remote_code=trusted).model_type
            head = self.config.model.head
            loads = auto_class(head.kind) if head else family_named(kind).auto_class()
            return loads.from_pretrained(out, dtype="auto", trust_remote_code=trusted)


def _has_file() -> bool:
    import __main__

    return hasattr(__main__, "__file__")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()

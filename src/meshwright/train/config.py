"""The configuration of a run: one schema, which reports all errors together and can be printed in full.

It is light to import (pydantic and YAML only). Each section is one class; a field's description is its documentation.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from meshwright.data.data_config import DataConfig
from meshwright.data.tokenizer_config import TokenizerConfig
from meshwright.errors import ConfigError, Problems, Refusal
from meshwright.models.model_config import AdapterConfig, DiffusionConfig, ModelConfig
from meshwright.paths import PathText, nearby
from meshwright.train.schema.config_problems import message
from meshwright.train.schema.optimizer_config import OptimizerConfig, ScheduleConfig
from meshwright.train.schema.our_objectives import wanted_of
from meshwright.train.schema.parallel_config import LayoutConfig, ParallelConfig, Section
from meshwright.train.schema.plain_yaml import Dumper, Loader
from meshwright.train.schema.run_sections import (
    CheckpointConfig,
    LaunchConfig,
    MetricsConfig,
    MoEConfig,
    ProfileConfig,
    SampleConfig,
    TeacherConfig,
)
from meshwright.user_code import PartName, part_text

__all__ = [
    "LayoutConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RunConfig",
    "ScheduleConfig",
    "checked_config",
    "load_config",
    "overridden",
]


class TrainingConfig(Section):
    """The loop."""

    objective: PartName | None = Field(
        default=None,
        description="What the model learns: `next_token`, `block_diffusion`, `preference`, `reward`, `classification` "
        "(docs/objectives.md), or an objective of your own as `module:Name` (docs/own-parts.md); with arguments as `{use: ..., "
        "with: {...}}`. null: what it is made for.",
    )
    steps: int | None = Field(default=None, ge=1, description="Optimizer steps in all. Required, or epochs.")
    epochs: float | None = Field(
        default=None,
        gt=0,
        le=10_000,
        description="In place of steps: how often all training sequences are seen, such as 3 or 0.5. Steps are counted once "
        "the data are packed; the last one is filled up from the next epoch.",
    )
    global_batch_size: int = Field(ge=1, description="Sequences in an optimizer step, over all ranks and microbatches.")
    microbatch_size: int = Field(default=1, ge=1, description="Sequences in one forward and backward of a rank.")
    clip_norm: float | None = Field(default=1.0, gt=0, description="Largest norm of the whole gradient; null: no clipping.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Of weights, data order and dropout.")
    on_nonfinite: Literal["stop", "skip"] = Field(
        default="stop",
        description="A NaN or infinite loss or gradient norm: 'stop' the run, or 'skip' the step and go on.",
    )
    max_skipped: int | None = Field(
        default=10, ge=1, description="Steps skipped in a row that end the run as a failure; null: no limit."
    )
    eval_every: int = Field(default=0, ge=0, description="Steps between evaluations; 0: only before and after training.")
    eval_sequences: int | None = Field(default=None, ge=1, description="Sequences of an evaluation; null: all held out.")
    log_every: int = Field(default=1, ge=1, description="Steps between lines of metrics.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.steps is None and self.epochs is None:
            raise ValueError("training.steps: is required (or training.epochs)")
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"training.steps={self.steps} and training.epochs={self.epochs:g} exclude each other; set one to null"
            )
        return self


class RunConfig(Section):
    """A whole run."""

    output: PathText = Field(description="Directory of the run: checkpoints, metrics, tokenizer, tokens, export.")
    imports: list[str] = Field(
        default=[],
        description="Modules to import before the model is built, in every process, such as [my_family]: files that register a "
        "parallelization strategy or a model (docs/adding-a-family.md). Found as by `python -m`; the working directory is "
        "looked into last.",
    )
    model: ModelConfig = Field(description="Which model.")
    adapter: AdapterConfig | None = Field(default=None, description="Train an adapter; null: train the model.")
    teacher: TeacherConfig | None = Field(default=None, description="A model to learn from, beside it; null: none.")
    layout: LayoutConfig = Field(default=LayoutConfig(), description="Sizes of the mesh axes.")
    parallel: ParallelConfig = Field(default=ParallelConfig(), description="How the layout is carried out.")
    data: DataConfig = Field(description="What to train on.")
    tokenizer: TokenizerConfig = Field(default=TokenizerConfig(), description="How text becomes tokens.")
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="The optimizer.")
    schedule: ScheduleConfig = Field(default=ScheduleConfig(), description="Learning rate over the steps.")
    training: TrainingConfig = Field(description="The loop.")
    callbacks: list[PartName] = Field(
        default=[],
        description="What is called at fixed points of the run, in this order: `ema`, `early_stopping`, `freeze`, or callbacks "
        "of your own, as `module:Name` or `{use: module:Name, with: {...}}` (docs/own-parts.md).",
    )
    profile: ProfileConfig | None = Field(default=None, description="A trace of some steps; null: none.")
    diffusion: DiffusionConfig = Field(default=DiffusionConfig(), description="Block diffusion.")
    moe: MoEConfig = Field(default=MoEConfig(), description="Balance of experts.")
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), description="Saving and resuming.")
    metrics: MetricsConfig = Field(default=MetricsConfig(), description="Where metrics go.")
    launch: LaunchConfig = Field(default=LaunchConfig(), description="Local worker processes.")
    export: bool = Field(default=False, description="Write the final model as a Hugging Face directory, export/.")
    export_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None,
        description="Dtype of exported weights, here and by `meshwright export`. null: those that a pretrained model was read "
        "in, tensor by tensor where they differ; of a new model, model.dtype.",
    )
    sample: SampleConfig = Field(default=SampleConfig(), description="What the exported model is asked at the end.")

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        problems = self.data.read_as(wanted_of(self.training.objective, self.data.format, self.model))
        if self.training.steps is not None and (problem := self.warmup_problem(self.training.steps)):
            problems.append(problem)
        if self.training.eval_every and not self.data.held_out and not self.data.eval_files:
            problems.add(
                "config.together",
                f"training.eval_every={self.training.eval_every}: nothing is held out (data.eval_fraction, eval_files)",
            )
        if self.sample.prompts and not self.export and not self.sample.every:
            words = (
                "sample.prompts: the prompts are for the exported model; set export: true or sample.every, or leave them out"
            )
            problems.add("config.together", words)
        if self.sample.every and not self.sample.prompts:
            problems.add("config.together", f"sample.every={self.sample.every}: there is nothing to sample; set sample.prompts")
        if problems:
            raise ValueError(Refusal(problems[0].code, "; ".join(problems)))
        return self

    def warmup_problem(self, steps: int) -> Refusal | None:
        """Return what is wrong with the warmup in a run of ``steps`` optimizer steps; ``None``: nothing is."""
        warmup, training = self.schedule.warmup_steps, self.training
        if warmup < steps:
            return None
        said = (
            f"training.steps={steps}"
            if training.epochs is None
            else f"{steps}, the steps of training.epochs={training.epochs:g}"
        )
        return Refusal(
            "config.warmup", f"schedule.warmup_steps={warmup}: must be below {said}, or the peak learning rate is never reached"
        )

    @property
    def own_parts(self) -> list[str]:
        """A line for each part of the user, with its arguments, and one for the columns that reach the batch."""
        parts = {"objective": self.training.objective, "optimizer": self.optimizer.part, "schedule": self.schedule.part}
        parts |= {"source": self.data.source, "map": self.data.map}
        named = [(kind, part) for kind, part in parts.items() if part is not None]
        listed = (("callback", self.callbacks), ("sink", self.metrics.sinks))
        named += [(kind, part) for kind, parts in listed for part in parts]
        groups = [(f"optimizer of {one.match}", self.optimizer.updater_of(one).part) for one in self.optimizer.groups]
        named += [(kind, part) for kind, part in groups if part is not None and part != self.optimizer.part]
        columns = [f"{name} (per {one.per}, {one.dtype})" for name, one in self.data.values.items()]
        return [f"{kind}: {part_text(part)}" for kind, part in named] + ([f"columns: {', '.join(columns)}"] if columns else [])

    @property
    def saves_trained_only(self) -> bool:
        """Whether checkpoints hold only what is trained: an adapter, whose base is in files."""
        return self.adapter is not None and self.model.path is not None

    def to_yaml(self) -> str:
        """Return the complete configuration as YAML. Loading it gives an equal configuration."""
        return yaml.dump(self.model_dump(mode="json"), Dumper=Dumper, sort_keys=False, allow_unicode=True)

    @property
    def directory(self) -> Path:
        """The output directory."""
        return Path(self.output).expanduser()


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a YAML file and apply overrides of the form ``section.key=value``.

    Relative paths in the file are relative to the working directory.

    Raises:
        ConfigError: all problems together: a missing file, YAML that cannot be read, unknown keys with the nearest legal
            name, wrong types, contradictions.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError("config.file", f"{path}: no such file{nearby(file)}")
    try:
        content = yaml.load(file.read_text(), Loader) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("config.file", f"{path}: not readable as YAML: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError("config.file", f"{path}: must be a mapping of sections, found {type(content).__name__}")
    for name, field in RunConfig.model_fields.items():
        if hasattr(field.annotation, "model_fields") and content.get(name, ...) is None:
            content[name] = {}  # a section whose lines are all commented out
    return overridden(content, overrides, f"; {path} does not have it")


def overridden(content: dict[str, Any], overrides: Iterable[str], missing: str = "") -> RunConfig:
    """Return the configuration that plain values mean after overrides of the form ``section.key=value``.

    Raises:
        ConfigError: all problems together.
    """
    problems = Problems()
    for override in overrides:
        problem = _apply(content, override)
        if problem:
            problems.append(problem)
    return checked_config(content, problems, missing)


def checked_config(content: Mapping[str, Any], problems: Problems | None = None, missing: str = "") -> RunConfig:
    """Return the configuration that plain values mean.

    Args:
        content: section to its keys.
        problems: what is known to be wrong already.
        missing: end of the message about a key that is required and not there.

    Raises:
        ConfigError: all problems together.
    """
    problems = Problems() if problems is None else problems
    try:
        config = RunConfig.model_validate(content)
    except ValidationError as error:
        for item in error.errors():
            problems.append(message(item, RunConfig).within("", missing if item["type"] == "missing" else ""))
    if problems:
        raise ConfigError(problems)
    return config


def _apply(content: dict[str, Any], override: str) -> Refusal | None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        return Refusal("config.override", f"{override!r}: an override has the form section.key=value")
    try:
        value = yaml.load(text, Loader) if text else ""
    except yaml.YAMLError:
        value = text
    *path, last = key.split(".")
    section = content
    for part in path:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            return Refusal("config.override", f"{key}: {part} is not a section")
    section[last] = value
    return None

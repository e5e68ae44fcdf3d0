"""The sections of the configuration that say how a run is parallel: ``layout`` and ``parallel``."""

from dataclasses import MISSING, fields
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from meshwright.layout import Layout
from meshwright.plan.given.closed_choices import (
    ActivationCheckpointing,
    ContextBalance,
    ContextMethod,
    PipelineSchedule,
    SyncPolicy,
)
from meshwright.plan.given.options import ParallelOptions

__all__ = ["LayoutConfig", "ParallelConfig", "PipelineConfig", "Section"]

Dtype = Literal["float32", "bfloat16", "float64"]


class Section(BaseModel):
    """A section of the configuration: unknown keys are errors, and values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


_OPTIONS = {item.name: item for item in fields(ParallelOptions)}


def _key(option: str, **changed: Any) -> Any:
    """Return the key that is an option of the plan: it has its default, bound and description.

    Args:
        option: name of the field of :class:`~meshwright.plan.given.options.ParallelOptions`.
        changed: another default.
    """
    item = _OPTIONS[option]
    default = item.default if item.default_factory is MISSING else item.default_factory()
    default = list(default) if isinstance(default, tuple) else default
    return Field(
        **{"default": default, "description": item.metadata["description"], "ge": item.metadata.get("least"), **changed}
    )


class LayoutConfig(Section):
    """Sizes of the mesh axes. At most one of the first five may be null: it takes what is left of the processes."""

    pp: int | None = Field(default=1, description="Pipeline stages.")
    dp_replicate: int | None = Field(default=1, description="Replicas of the sharded model (HSDP).")
    dp_shard: int | None = Field(default=None, description="Ranks that parameters are sharded over (FSDP).")
    cp: int | None = Field(default=1, description="Ranks that share a sequence.")
    tp: int | None = Field(default=1, description="Ranks that share a layer's matrices.")
    ep: int = Field(default=1, description="Ranks that share the experts of a layer.")

    def layout(self) -> Layout:
        """Return these sizes as a Layout that is not resolved yet."""
        return Layout(**self.model_dump())


class PipelineConfig(Section):
    """How the stages of a pipeline are cut and run, with ``layout.pp``."""

    schedule: PipelineSchedule = _key("pipeline_schedule")
    stages_per_rank: int | None = _key("stages_per_rank")
    cuts: list[int] = _key("pipeline_cuts")
    runs_per_step: int = _key("runs_per_step")

    @property
    def resolved_stages_per_rank(self) -> int:
        """The number of stages of a rank."""
        return self.stages_per_rank or (1 if self.schedule.single else 2)

    def least(self, pp: int, microbatches: int) -> int:
        """Return the least number of microbatches of a step, not below a given one, that ``pp`` ranks can run."""
        return microbatches if pp == 1 else self.runs_per_step * self.schedule.least(pp, microbatches // self.runs_per_step)


class ParallelConfig(Section):
    """How the layout is carried out."""

    param_dtype: Dtype | None = _key("param_dtype")
    reduce_dtype: Dtype | None = _key("reduce_dtype")
    output_dtype: Dtype | None = _key("output_dtype")
    reshard_after_forward: bool | None = _key("reshard_after_forward")
    sync: SyncPolicy | None = _key("sync")
    sync_budget_gib: float = Field(
        default=8.0, ge=0, le=2**40, description="GiB that sync=null may keep unsharded through a step."
    )
    sync_units: dict[str, SyncPolicy] = _key("sync_units")
    exclude_units: list[str] = _key("exclude_units")
    all_reduce_once: bool = _key("all_reduce_once")
    twin_units: bool | None = _key("twin_units")
    prefetch_forward: int | None = _key("prefetch_forward")
    prefetch_backward: int | None = _key("prefetch_backward")
    cpu_offload: bool = _key("cpu_offload")
    activation_checkpointing: ActivationCheckpointing = _key("activation_checkpointing")
    activation_checkpointing_layers: dict[str, ActivationCheckpointing] = _key("activation_checkpointing_layers")
    activation_checkpointing_save: list[str] = _key("activation_checkpointing_save")
    sequence_parallel: bool = _key("sequence_parallel")
    loss_parallel: bool | None = _key("loss_parallel", default=None)
    loss_chunks: int | None = _key("loss_chunks", default=None)
    tp_plan: dict[str, str] | str | None = _key("tp_plan")
    context_parallel: ContextMethod = _key("context_parallel")
    context_balance: ContextBalance = _key("context_balance")
    context_recompute: bool | None = _key("context_recompute")
    pipeline: PipelineConfig = Field(default=PipelineConfig(), description="With pp: how stages are cut and run.")
    compile: bool = _key("compile")
    compile_backend: str = _key("compile_backend")
    freeze: list[str] = _key("freeze")

    def options(self, microbatches: int) -> ParallelOptions:
        """Return these settings as options of the plan."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        budget = int(values.pop("sync_budget_gib") * 2**30)
        pipeline: PipelineConfig = values.pop("pipeline")
        return ParallelOptions(
            **values,
            sync_budget=budget,
            microbatches=microbatches,
            pipeline_schedule=pipeline.schedule,
            stages_per_rank=pipeline.stages_per_rank,
            pipeline_cuts=tuple(pipeline.cuts),
            runs_per_step=pipeline.runs_per_step,
        )

"""The sections of the configuration that say how a run is parallel: ``layout`` and ``parallel``."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from meshwright.layout import Layout
from meshwright.plan.given.options import (
    ActivationCheckpointing,
    ContextBalance,
    ContextMethod,
    ParallelOptions,
    PipelineSchedule,
    SyncPolicy,
)

__all__ = ["LayoutConfig", "ParallelConfig", "PipelineConfig", "Section"]

Dtype = Literal["float32", "bfloat16", "float64"]


class Section(BaseModel):
    """A section of the configuration: unknown keys are errors, and values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


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

    schedule: PipelineSchedule = Field(
        default=PipelineSchedule.ONE_F_ONE_B,
        description="Order of forwards and backwards. 'gpipe': all forwards first. '1f1b': one forward, one backward. "
        "'interleaved_1f1b': the same with several stages a rank. 'interleaved_zero_bubble', 'zbv', 'dualpipe_v': backward is "
        "split in two halves, of which the second fills the bubble.",
    )
    stages_per_rank: int | None = Field(
        default=None, ge=1, description="Stages of each rank. null: 1 for gpipe and 1f1b, 2 for the others."
    )
    cuts: list[int] = Field(
        default=[],
        description="For each stage but the first, the number of its first layer, counted from 0. Empty: the largest stage "
        "gets the least work, with embedding and head.",
    )
    runs_per_step: int = Field(
        default=1, ge=1, description="Runs of the schedule in a step, each with its share of the microbatches."
    )

    @property
    def each(self) -> int:
        """The number of stages of a rank."""
        return self.stages_per_rank or (1 if self.schedule.single else 2)

    def least(self, pp: int, microbatches: int) -> int:
        """Return the least number of microbatches of a step, not below a given one, that ``pp`` ranks can run."""
        return microbatches if pp == 1 else self.runs_per_step * self.schedule.least(pp, microbatches // self.runs_per_step)


class ParallelConfig(Section):
    """How the layout is carried out."""

    param_dtype: Dtype | None = Field(default="bfloat16", description="Dtype of compute and of gathered parameters.")
    reduce_dtype: Dtype | None = Field(default="float32", description="Dtype that gradients are added in.")
    output_dtype: Dtype | None = Field(default=None, description="Dtype that the model's outputs are cast to.")
    reshard_after_forward: bool | None = Field(
        default=None,
        description="Free gathered parameters after forward. null: all layers but the last, and not the root. "
        "true excludes sync=defer, which keeps them.",
    )
    sync: SyncPolicy | None = Field(
        default=None,
        description="Between microbatches: 'defer' gathers and reduces once a step (fastest; whole parameters and "
        "gradients stay), 'reshard_each' gathers each time and reduces once (gradients stay), 'reduce_each' does both each "
        "time (least memory). null: defer if what it keeps is at most sync_budget_gib, otherwise reduce_each: for experts, and "
        "if that is not enough, for all.",
    )
    sync_budget_gib: float = Field(
        default=8.0, ge=0, le=2**40, description="GiB that sync=null may keep unsharded through a step."
    )
    sync_units: dict[str, SyncPolicy] = Field(
        default={},
        description="Policies for some units, by pattern of their names, such as {'model.layers.*': reduce_each}.",
    )
    exclude_units: list[str] = Field(
        default=[],
        description="Patterns of modules that are no units of their own, though the family declares them so; the unit around "
        "them has their parameters.",
    )
    all_reduce_once: bool = Field(
        default=True,
        description="With reduce_each and replicas: all-reduce across replicas only in the last microbatch.",
    )
    twin_units: bool | None = Field(
        default=None,
        description="Where two layers share parameters (an encoder's and a decoder's): true makes a unit of each, "
        "which holds one layer's gradients and sends twice as much; false one of both, which holds those of the whole stack. "
        "null: one of both where these are at most sync_budget_gib.",
    )
    prefetch_forward: int | None = Field(
        default=None,
        ge=1,
        description="How many layers ahead all-gathers are started in forward; each holds one layer more. null: FSDP2's own "
        "way, which overlaps one where the CPU runs ahead of the GPU.",
    )
    prefetch_backward: int | None = Field(
        default=None,
        ge=0,
        description="The same in backward; 0: none. null: FSDP2's own way, one ahead. A number excludes sync=defer, under "
        "which backward gathers nothing.",
    )
    cpu_offload: bool = Field(default=False, description="Keep shards, gradients and optimizer state in host memory.")
    activation_checkpointing: ActivationCheckpointing = Field(
        default=ActivationCheckpointing.NONE,
        description="What is recomputed in backward instead of kept. 'full': each layer, from its input (least memory). "
        "'submodule': its attention, MLP and norms, one by one. 'selective': each layer, but the results of attention, "
        "communication, expert routing and every second matrix product are kept.",
    )
    activation_checkpointing_layers: dict[str, ActivationCheckpointing] = Field(
        default={},
        description="Modes for some layers, by pattern of their names; a later one wins, as in {'model.layers.*': selective, "
        "'model.layers.0': none}.",
    )
    activation_checkpointing_save: list[str] = Field(
        default=[],
        description="What 'selective' keeps instead: names of operators, as in [aten.mm.default, aten.addmm.default].",
    )
    sequence_parallel: bool = Field(
        default=False,
        description="With tp: between attention and MLP each rank holds its part of the sequence. Less activation memory; a "
        "gather and a scatter for each all-reduce. Sequences are padded to a multiple of tp.",
    )
    loss_parallel: bool | None = Field(
        default=None,
        description="With tp: logits stay sharded over the vocabulary, and the loss is computed there. null: wherever the "
        "model's output head is known.",
    )
    loss_chunks: int | None = Field(
        default=None,
        ge=0,
        description="Compute logits and loss of a microbatch in so many chunks of tokens, so that only the logits of one chunk "
        "exist at a time. 0: at once. null: by vocabulary, tokens of a microbatch and dtype, so that a chunk has at most "
        "512 MiB of logits.",
    )
    tp_plan: dict[str, str] | str | None = Field(
        default=None,
        description="Tensor parallel styles that win over the family's and the model's own: {pattern of modules: style}, or "
        "the import path of such a dict or of a function that returns one.",
    )
    context_parallel: ContextMethod = Field(
        default=ContextMethod.GATHER,
        description="With cp, how attention gets the keys of the other ranks. 'gather': all-gather keys and values (any mask, "
        "any heads). 'ulysses': exchange sequence for heads, tp * cp must divide them. 'ring': pass keys on from rank to rank, "
        "so that none ever has all.",
    )
    context_balance: ContextBalance = Field(
        default=ContextBalance.ZIGZAG,
        description="With cp, which positions a rank has. 'zigzag': a chunk from the front and one from the back, so that "
        "causal attention is equal work for all. 'contiguous': one chunk.",
    )
    context_recompute: bool | None = Field(
        default=None,
        description="With cp: backward gets keys of other ranks again instead of keeping them. null: no; a layer that is "
        "recomputed gets them again anyway.",
    )
    pipeline: PipelineConfig = Field(default=PipelineConfig(), description="With pp: how stages are cut and run.")
    compile: bool = Field(default=False, description="torch.compile each layer.")
    compile_backend: str = Field(default="inductor", description="Backend of torch.compile.")
    freeze: list[str] = Field(
        default=[],
        description="Patterns of parameter names that are not trained; '*' is one component of a name, '**' one or more, as "
        "in 'model.layers.0.**'.",
    )

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

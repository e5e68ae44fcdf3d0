"""Sections of the configuration that say what a run does besides its steps: balance, checkpoints, metrics, launch, samples."""

from typing import Literal

from pydantic import Field

from meshwright.paths import PathText
from meshwright.train.schema.parallel_config import Dtype, LayoutConfig, Section
from meshwright.user_code import PartName

__all__ = [
    "BestConfig",
    "CheckpointConfig",
    "LaunchConfig",
    "MetricsConfig",
    "MoEConfig",
    "ProfileConfig",
    "SampleConfig",
    "TeacherConfig",
]


class MoEConfig(Section):
    """Balance of the experts of a mixture (docs/moe.md)."""

    aux_loss: float | None = Field(
        default=None,
        ge=0,
        description="Coefficient of a balance loss that is added to the training loss: sequence by sequence, each weighted by "
        "its share of the tokens of the optimizer step (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20). null or 0: none.",
    )
    bias_update_rate: float | None = Field(
        default=None,
        ge=0,
        description="What the bias of each expert moves by after an optimizer step, up where it got less than the mean load, "
        "down where it got more; for families whose router has such a bias. null or 0: biases stay.",
    )
    load_metrics: bool = Field(
        default=True,
        description="Log for each layer the largest load of an expert over the mean load, and how many experts got no token.",
    )


class BestConfig(Section):
    """Which evaluation is the best."""

    metric: str = Field(default="eval/loss", description="Name of a value of evaluations, as in metrics.jsonl.")
    mode: Literal["min", "max"] = Field(default="min", description="Whether less is better, or more.")


class ProfileConfig(Section):
    """A trace of some steps, by torch's profiler: profile/ of the output directory, a file for each rank."""

    step: int = Field(ge=1, description="The first step of the trace.")
    steps: int = Field(default=1, ge=1, description="Number of steps.")
    ranks: list[int] = Field(default=[0], min_length=1, description="Ranks that are traced.")
    memory: bool = Field(
        default=True, description="Also write a snapshot of the memory, where torch records the history of a device's memory."
    )


class CheckpointConfig(Section):
    """Saving and resuming. The last step is always saved, and the one at which SIGTERM, SIGINT or SIGUSR1 ends the run."""

    every: int = Field(default=0, ge=0, description="Steps between checkpoints; 0: none by their number.")
    every_minutes: float | None = Field(
        default=30.0, gt=0, description="Minutes between checkpoints, whatever saved the one before; null: none by the clock."
    )
    keep: int | None = Field(default=2, ge=1, description="Complete checkpoints to keep; null: all.")
    best: BestConfig | None = Field(
        default=None,
        description="`{metric: eval/loss, mode: min}`: a checkpoint is saved after each evaluation that is the best so far; "
        "`keep` does not remove the last of these. With export: true it becomes export-best/. null: none.",
    )
    asynchronous: bool = Field(default=False, description="Write in the background while training goes on.")
    resume: PathText = Field(
        default="auto", description="'auto': from the newest complete checkpoint of the output directory, if there is one; "
        "'never': refuse a directory that has checkpoints; or the path of a checkpoint."
    )  # fmt: skip


class MetricsConfig(Section):
    """Where metrics go, besides the terminal."""

    jsonl: bool = Field(default=True, description="A line a step in metrics.jsonl of the output directory.")
    tensorboard: bool = Field(default=True, description="Event files in tensorboard/ of the output directory.")
    wandb: str | None = Field(default=None, description="Project of Weights & Biases (needs the extra [wandb]).")
    mlflow: str | None = Field(default=None, description="Experiment of MLflow (needs the extra [mlflow]).")
    html: bool = Field(
        default=False,
        description="At the end, report.html in the output directory: loss, learning rate, throughput and memory, with the "
        "forecast beside the measured step, as one page (docs/report.md).",
    )
    sinks: list[PartName] = Field(
        default=[], description="Sinks of your own, as `module:Name` or `{use: module:Name, with: {...}}` (docs/own-parts.md)."
    )
    gpu: str | None = Field(
        default=None,
        description="Device for `mfu`, and for a forecast beside the measured step, as of `meshwright plan --gpu`: a name, or "
        "a hardware file. null: the one that torch names, if it is known.",
    )


class LaunchConfig(Section):
    """Local worker processes. Where torchrun or Slurm starts them, theirs is the number, and nproc and port are not read."""

    nproc: int | None = Field(default=None, ge=1, description="Processes; null: one for each accelerator, or one.")
    device: str = Field(
        default="auto",
        pattern="^[a-z0-9_]+$",
        description="'auto': accelerators (GPUs and others) if there is one for every process of this machine, otherwise the "
        "CPU. 'accelerator': those, or an error. Or torch's name of their kind, or cpu.",
    )
    port: int = Field(default=0, ge=0, le=65535, description="Port of the rendezvous; 0: any that is free.")
    timeout_minutes: float = Field(
        default=10.0, gt=0, le=525_600, description="How long a collective may wait for other ranks."
    )
    hang_report_seconds: float | None = Field(
        default=60.0,
        gt=0,
        description="Seconds without progress after which a report says where each rank is. It ends nothing. null: no report.",
    )


class SampleConfig(Section):
    """What the model is asked: the exported one at the end, and the one that trains between steps."""

    prompts: list[str] = Field(default=[], description="Prompts to continue.")
    every: int = Field(
        default=0,
        ge=0,
        description="Steps between samples of the model that trains, each token the most likely one; 0: only of the exported "
        "model, at the end.",
    )
    max_new_tokens: int = Field(default=48, ge=1, description="Tokens of each continuation.")
    raw: bool = Field(
        default=False,
        description="Continue each prompt as it stands. false: where the tokenizer has a chat template, ask it as a user does.",
    )


class TeacherConfig(Section):
    """A second model, which is not trained, and says the next token beside the other: for training.objective=distillation."""

    path: PathText = Field(
        description="The teacher: a local directory of transformers (safetensors), such as an export, or a hub name."
    )
    dtype: Dtype | None = Field(
        default=None, description="What it is stored in, and computes in. null: the dtype that the run computes in."
    )
    layout: LayoutConfig | None = Field(
        default=None,
        description="Sizes of its axes, over the same processes. cp and the data ranks (dp_replicate x dp_shard) are as many "
        "as those of the run; pp and tp may differ. null: those of the run, without ep.",
    )
    top_k: int = Field(default=64, ge=1, le=2**16, description="Its likeliest words for a token that the objective gets.")

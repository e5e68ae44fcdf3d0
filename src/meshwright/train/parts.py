"""The parts of a trainer. An audit replaces some of a run's parts by others; the order of a step stays that of a run."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import nn

from meshwright.data.loader import TrainLoader
from meshwright.data.store import TokenStore
from meshwright.distributed.data.grad_sync import GradSync
from meshwright.distributed.experts.balance import Balance
from meshwright.distributed.mesh import ParallelMesh, build_mesh
from meshwright.distributed.pipeline.stage_parts import StageParts, make_parts, models_of
from meshwright.models.objective import Objective
from meshwright.models.specs.registry import get_parallelization_strategy
from meshwright.models.weights.build import materialize
from meshwright.plan.axes.pipeline.stage_plan import crossing_shape, elsewhere, on_stages, stages_of_rank
from meshwright.train.config import RunConfig
from meshwright.train.engine import Engine, Sequential
from meshwright.train.forecast import Forecast
from meshwright.train.optimizer import build_optimizer
from meshwright.train.start.setup import RunSetup

Loader = TypeVar("Loader", bound=TrainLoader)

__all__ = ["PARTS", "PartialTrainer", "Parts", "balance_of_plan", "clip", "engine_of_plan", "fill", "train_loader"]


class PartialTrainer(Protocol):
    """A trainer under construction: the attributes that its parts may read. Each is set before the parts that need it."""

    setup: RunSetup
    config: RunConfig
    device: torch.device
    step: int
    progress: Callable[[str], None]
    mesh: ParallelMesh
    model: nn.Module
    objective: Objective
    sync: GradSync | None
    balance: Balance
    engine: Engine


def mesh_of_layout(trainer: PartialTrainer) -> ParallelMesh:
    """Build the mesh of the layout, over all ranks."""
    return build_mesh(trainer.setup.layout, trainer.device.type)


def carry_out(trainer: PartialTrainer) -> nn.Module:
    """Carry out the plan on the model, which has no values yet, and return the model, or the stages of this rank."""
    model, plan = trainer.setup.model, trainer.setup.plan
    strategy = get_parallelization_strategy(model)
    if plan.stages:
        return make_parts(lambda: copy.deepcopy(model), plan, trainer.mesh, strategy.carry_out)
    return strategy.carry_out(model, plan, trainer.mesh)


def fill(trainer: PartialTrainer, device: torch.device) -> None:
    """Give parameters and buffers their first values, on the device that holds the shards."""
    config, setup = trainer.config, trainer.setup
    stages = stages_of_rank(setup.plan, trainer.mesh.rank("pp"))
    for model, stage in zip(models_of(trainer.model), stages, strict=True):
        others = elsewhere(setup.plan, [stage])
        materialize(model, config.model, device, config.training.seed, setup.plan.layers, others, config.adapter)


def optimizer_of_plan(trainer: PartialTrainer) -> torch.optim.Optimizer:
    """Build AdamW. The plan says which parameters are trained, and which of them are decayed."""
    return build_optimizer(trainer.model, trainer.config.optimizer, trainer.setup.plan.parameters)


def sync_of_plan(trainer: PartialTrainer) -> GradSync | None:
    """Build what decides when the units of the model gather and reduce; ``None``: each stage of a pipeline has its own."""
    return None if trainer.setup.plan.stages else GradSync.from_plan(trainer.model, trainer.setup.plan)


def balance_of_plan(trainer: PartialTrainer) -> Balance:
    """Build the balance of the experts. The loads of all stages are added up, so it knows the mixtures of the whole model."""
    plan, moe, mesh = trainer.setup.plan, trainer.config.moe, trainer.mesh
    own = on_stages(plan, stages_of_rank(plan, mesh.rank("pp"))).experts
    return Balance(
        trainer.model,
        plan.experts,
        trainer.device,
        aux_loss=moe.aux_loss or 0.0,
        bias_update_rate=moe.bias_update_rate or 0.0,
        load_metrics=moe.load_metrics,
        group=mesh["cp"].get_group() if plan.layout.size("cp") > 1 else None,
        own=[row.module for row in own],
    )


def train_loader(trainer: PartialTrainer, store: TokenStore, kind: type[Loader] = TrainLoader) -> Loader:  # type: ignore[assignment]
    """Build the loader of this rank's training data."""
    training, data = trainer.config.training, trainer.config.data
    return kind(
        store,
        sequence_length=data.sequence_length,
        global_batch_size=training.global_batch_size,
        microbatch_size=training.microbatch_size,
        data_rank=trainer.mesh.rank("dp"),
        data_ranks=trainer.setup.layout.size("dp"),
        seed=training.seed,
        packing=data.packing,
        shuffle=data.shuffle,
        multiple=sequence_multiple(trainer.setup),
    )


def sequence_multiple(setup: RunSetup) -> int:
    """Return the number that sequences of training are padded to a multiple of.

    The stages of a pipeline expect one shape, so there all sequences are padded to the length of a full one.
    """
    multiple = setup.plan.sequence_multiple
    return -(-setup.config.data.sequence_length // multiple) * multiple if setup.plan.stages else multiple


def engine_of_plan(trainer: PartialTrainer) -> Engine:
    """Build the engine: one microbatch after another, or the stages of a pipeline."""

    def progress(words: str = "") -> None:
        trainer.progress(f"step {trainer.step + 1}{words and ', '}{words}")

    setup = trainer.setup
    if not setup.plan.stages:
        assert trainer.sync is not None
        return Sequential(trainer.model, trainer.objective, trainer.sync, trainer.balance, progress)
    from meshwright.distributed.pipeline.scheduled_stages import ScheduledStages
    from meshwright.train.pipelined import Pipelined

    assert isinstance(trainer.model, StageParts)
    stages = ScheduledStages(trainer.model, setup.plan, trainer.mesh, trainer.device, progress)
    stages.prepare(crossing_shape(setup.plan, setup.config.training.microbatch_size, sequence_multiple(setup)))
    return Pipelined(stages, trainer.objective, trainer.balance)


def clip(trainer: PartialTrainer) -> torch.Tensor:
    """Clip the gradient of the whole model, and return its norm before clipping."""
    return trainer.engine.clip(trainer.config.training.clip_norm)


@dataclass(frozen=True)
class Parts:
    """The functions that a trainer is made of. Each gets the trainer, with the attributes set so far.

    While it is constructed, the trainer calls all but ``clip`` once, in this order (``fill`` only if it does not resume). It
    calls ``clip`` in every step.

    Attributes:
        mesh: makes the mesh.
        distribute: carries the plan out on the model, without values, and returns the model.
        fill: gives the model values on a device.
        optimizer: makes the optimizer of the model's parameters.
        sync: makes what decides when the model's units gather and reduce.
        loader: makes the loader of training data, from a token store.
        engine: makes what runs microbatches.
        clip: clips the gradient after the microbatches, and returns its norm before clipping.
        forecast: the command that makes the forecast that is printed beside a step; ``None``: none is made.
    """

    mesh: Callable[[PartialTrainer], ParallelMesh] = mesh_of_layout
    distribute: Callable[[PartialTrainer], nn.Module] = carry_out
    fill: Callable[[PartialTrainer, torch.device], None] = fill
    optimizer: Callable[[PartialTrainer], torch.optim.Optimizer] = optimizer_of_plan
    sync: Callable[[PartialTrainer], GradSync | None] = sync_of_plan
    loader: Callable[[PartialTrainer, TokenStore], TrainLoader] = train_loader
    engine: Callable[[PartialTrainer], Engine] = engine_of_plan
    clip: Callable[[PartialTrainer], torch.Tensor] = clip
    forecast: Forecast | None = None


PARTS = Parts()
"""The parts of a run."""

"""The parts of a trainer. An audit replaces some of a run's parts by others; the order of a step stays that of a run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import nn

from meshwright.data.loader import TrainLoader
from meshwright.data.store import TokenStore
from meshwright.distributed.grad_clip import clip_grad_norm_
from meshwright.distributed.grad_sync import GradSync
from meshwright.distributed.mesh import ParallelMesh, build_mesh
from meshwright.models.build import materialize
from meshwright.models.objective import Objective
from meshwright.models.registry import get_parallelization_strategy
from meshwright.moe.balance import Balance
from meshwright.train.config import RunConfig
from meshwright.train.engine import Engine, Sequential
from meshwright.train.optimizer import build_optimizer
from meshwright.train.setup import RunSetup

Loader = TypeVar("Loader", bound=TrainLoader)
Runs = TypeVar("Runs", bound=Sequential)

__all__ = ["PARTS", "Made", "Parts", "clip", "fill", "sequential", "train_loader"]


class Made(Protocol):
    """A trainer under construction: the attributes that its parts may read. Each is set before the parts that need it."""

    setup: RunSetup
    config: RunConfig
    device: torch.device
    step: int
    progress: Callable[[str], None]
    mesh: ParallelMesh
    model: nn.Module
    objective: Objective
    sync: GradSync
    balance: Balance


def mesh_of_layout(trainer: Made) -> ParallelMesh:
    """Build the mesh of the layout, over all ranks."""
    return build_mesh(trainer.setup.layout, trainer.device.type)


def carry_out(trainer: Made) -> nn.Module:
    """Carry out the plan on the model, which has no values yet, and return the model."""
    model = trainer.setup.model
    return get_parallelization_strategy(model).carry_out(model, trainer.setup.plan, trainer.mesh)


def fill(trainer: Made, device: torch.device) -> None:
    """Give parameters and buffers their first values, on the device that holds the shards."""
    config, setup = trainer.config, trainer.setup
    materialize(setup.model, config.model, device, config.training.seed, setup.plan.layers)


def optimizer_of_plan(trainer: Made) -> torch.optim.Optimizer:
    """Build AdamW. The plan says which parameters are trained, and which of them are decayed."""
    return build_optimizer(trainer.model, trainer.config.optimizer, trainer.setup.plan.parameters)


def sync_of_plan(trainer: Made) -> GradSync:
    """Build what decides when the units of the model gather and reduce."""
    return GradSync.from_plan(trainer.model, trainer.setup.plan)


def train_loader(trainer: Made, store: TokenStore, kind: type[Loader] = TrainLoader) -> Loader:  # type: ignore[assignment]
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
        multiple=trainer.setup.plan.sequence_multiple,
    )


def sequential(trainer: Made, kind: type[Runs] = Sequential) -> Runs:  # type: ignore[assignment]
    """Build the engine that runs one microbatch after another."""

    def progress() -> None:
        trainer.progress(f"step {trainer.step + 1}")

    return kind(trainer.model, trainer.objective, trainer.sync, trainer.balance, progress)


def clip(trainer: Made) -> torch.Tensor:
    """Clip the gradient of the whole model, and return its norm before clipping."""
    return clip_grad_norm_(trainer.model.parameters(), trainer.config.training.clip_norm)


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
    """

    mesh: Callable[[Made], ParallelMesh] = mesh_of_layout
    distribute: Callable[[Made], nn.Module] = carry_out
    fill: Callable[[Made, torch.device], None] = fill
    optimizer: Callable[[Made], torch.optim.Optimizer] = optimizer_of_plan
    sync: Callable[[Made], GradSync] = sync_of_plan
    loader: Callable[[Made, TokenStore], TrainLoader] = train_loader
    engine: Callable[[Made], Engine] = sequential
    clip: Callable[[Made], torch.Tensor] = clip


PARTS = Parts()
"""The parts of a run."""

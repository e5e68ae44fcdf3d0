"""The parts of a trainer. An audit replaces some of a run's parts by others; the order of a step stays that of a run."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from meshwright.data.loader import EvalLoader, TrainLoader
from meshwright.data.packing import SequenceDataset
from meshwright.data.store import TokenStore
from meshwright.distributed.data.grad_sync import GradSync
from meshwright.distributed.experts.balance import Balance
from meshwright.distributed.experts.router_replay import Replay
from meshwright.distributed.mesh import ParallelMesh, build_mesh
from meshwright.distributed.pipeline.stage_parts import StageParts, make_parts, models_of
from meshwright.models.added_modules import initialize_added, without_added
from meshwright.models.objective import Objective
from meshwright.models.specs.registry import get_parallelization_strategy
from meshwright.models.weights.build import materialize
from meshwright.models.weights.initial_values import derive_seed
from meshwright.plan.axes.pipeline.stage_plan import elsewhere, parts_of_rank, stages_of_rank
from meshwright.plan.axes.pipeline.stage_rows import on_stages
from meshwright.plan.given.names import nearest
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.train.callbacks.hooks import Callbacks
from meshwright.train.config import RunConfig
from meshwright.train.engine.runner import Runner, Sequential
from meshwright.train.forecast import Forecast
from meshwright.train.optimizer import build_optimizer
from meshwright.train.start.setup import RunSetup

Loader = TypeVar("Loader", bound=TrainLoader)
Progress = Callable[..., None]
"""Called before each microbatch, with words such as ``microbatch 2 of 4`` or with nothing."""

__all__ = [
    "PARTS",
    "Parts",
    "RankSetup",
    "balance_of_plan",
    "eval_loader",
    "fill",
    "replay_of_plan",
    "runner_of_plan",
    "seed_of_dropout",
    "train_loader",
]


@dataclass(frozen=True)
class RankSetup:
    """What this rank has before it has a model.

    Attributes:
        setup: the resolved run.
        device: the device to compute on.
        mesh: the mesh of the layout.
    """

    setup: RunSetup
    device: torch.device
    mesh: ParallelMesh

    @property
    def config(self) -> RunConfig:
        """The configuration of the run."""
        return self.setup.config

    @property
    def plan(self) -> ShardingPlan:
        """The plan of the run."""
        return self.setup.plan


def mesh_of_layout(setup: RunSetup, device: torch.device) -> ParallelMesh:
    """Build the mesh of the layout, over all ranks."""
    return build_mesh(setup.layout, device.type)


def carry_out(run: RankSetup) -> nn.Module:
    """Carry out the plan on the model, which has no values yet, and return the model, or the stages of this rank."""
    model = run.setup.model
    strategy = get_parallelization_strategy(model)
    if run.plan.stages:
        return make_parts(lambda: copy.deepcopy(model), run.plan, run.mesh, strategy.carry_out)
    return strategy.carry_out(model, run.plan, run.mesh)


def fill(run: RankSetup, model: nn.Module, device: torch.device) -> None:
    """Give parameters and buffers their first values, on the device that holds the shards."""
    config, parts = run.config, parts_of_rank(run.plan, run.mesh.rank("pp"))
    for part, stages in zip(models_of(model), parts, strict=True):
        others = elsewhere(run.plan, stages)
        layers = tuple(name for name in run.plan.layers if not nearest(name, others))  # those of idle modules are not here
        with without_added(part):
            materialize(part, config.model, device, config.training.seed, layers, others, config.adapter)
        initialize_added(part, device, config.training.seed)


def optimizer_of_plan(run: RankSetup, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer. The plan says which parameters are trained, and which of them are decayed."""
    return build_optimizer(model, run.config.optimizer, run.plan.parameters)


def sync_of_plan(run: RankSetup, model: nn.Module) -> GradSync | None:
    """Build what decides when the units of the model gather and reduce; ``None``: each stage of a pipeline has its own."""
    return None if run.plan.stages else GradSync.from_plan(model, run.plan)


def balance_of_plan(run: RankSetup, model: nn.Module) -> Balance:
    """Build the balance of the experts. The loads of all stages are added up, so it knows the mixtures of the whole model."""
    plan, moe, mesh = run.plan, run.config.moe, run.mesh
    own = on_stages(plan, stages_of_rank(plan, mesh.rank("pp"))).experts
    return Balance(
        model,
        plan.experts,
        run.device,
        aux_loss=moe.aux_loss or 0.0,
        bias_update_rate=moe.bias_update_rate or 0.0,
        load_metrics=moe.load_metrics,
        group=mesh["cp"].get_group() if plan.layout.size("cp") > 1 else None,
        slices=mesh["tp"].get_group() if any(row.slice_axis for row in plan.experts) else None,
        own=[row.module for row in own],
    )


def replay_of_plan(run: RankSetup, model: nn.Module) -> Replay:
    """Build what gives routers the experts of a column. Rows have those of all stages."""
    own = on_stages(run.plan, stages_of_rank(run.plan, run.mesh.rank("pp"))).experts
    return Replay(model, run.plan.experts, [row.module for row in own])


def train_loader(run: RankSetup, store: TokenStore, kind: type[Loader] = TrainLoader) -> Loader:  # type: ignore[assignment]
    """Build the loader of this rank's training data."""
    training, data = run.config.training, run.config.data
    return kind(
        store,
        sequence_length=data.sequence_length,
        global_batch_size=training.global_batch_size,
        microbatch_size=training.microbatch_size,
        data_rank=run.mesh.rank("dp"),
        data_ranks=run.setup.layout.size("dp"),
        seed=training.seed,
        packing=data.packing,
        shuffle=data.shuffle,
        multiple=sequence_multiple(run.setup),
    )


def eval_loader(run: RankSetup, store: TokenStore) -> EvalLoader | None:
    """Build the loader of this rank's part of the documents that are held out; ``None``: none are."""
    if not store.index.eval_documents:
        return None
    training, data = run.config.training, run.config.data
    return EvalLoader(
        SequenceDataset(store, "eval", data.sequence_length, data.packing, shuffle=False),
        training.microbatch_size,
        run.mesh.rank("dp"),
        run.setup.layout.size("dp"),
        training.eval_sequences,
        multiple=run.plan.sequence_multiple,
    )


def seed_of_dropout(run: RankSetup, *more: int) -> int:
    """Return the seed of this rank's random numbers, which ranks with other tokens or layers do not have."""
    stage = (run.mesh.rank("pp"),) if run.plan.stages else ()
    return derive_seed(run.config.training.seed, "dropout", run.mesh.rank("dp_cp"), *stage, *more)


def sequence_multiple(setup: RunSetup) -> int:
    """Return the number that sequences of training are padded to a multiple of.

    The stages of a pipeline expect one shape, so there all sequences are padded to the length of a full one.
    """
    multiple = setup.plan.sequence_multiple
    return -(-setup.config.data.sequence_length // multiple) * multiple if setup.plan.stages else multiple


def runner_of_plan(
    run: RankSetup,
    model: nn.Module,
    objective: Objective,
    sync: GradSync | None,
    balance: Balance,
    progress: Progress,
    prepares: bool = True,
) -> Runner:
    """Build the runner: one microbatch after another, or the stages of a pipeline, maybe prepared for the run's sequences."""
    if sync is not None:
        sequential = Sequential(model, objective, sync, balance, progress)
        sequential.plan, sequential.mesh, sequential.replay = run.plan, run.mesh, replay_of_plan(run, model)
        return sequential
    from meshwright.distributed.pipeline.passes import passes_of_model
    from meshwright.distributed.pipeline.scheduled_stages import ScheduledStages
    from meshwright.train.engine.pipelined import Pipelined

    assert isinstance(model, StageParts)
    stages = ScheduledStages(model, run.plan, run.mesh, run.device, progress)
    for passes in filter(None, map(passes_of_model, models_of(model))):
        columns, multiple = (objective.canvas_sizes or (0,))[0], run.plan.sequence_multiple
        passes.columns = -(-columns // multiple) * multiple
    if prepares:
        stages.prepare(run.config.training.microbatch_size, sequence_multiple(run.setup))
    pipelined = Pipelined(stages, objective, balance)
    pipelined.plan, pipelined.mesh, pipelined.replay = run.plan, run.mesh, replay_of_plan(run, model)
    return pipelined


@dataclass(frozen=True)
class Parts:
    """The functions that a trainer is made of. Each gets what those before it have made.

    While it is constructed, the trainer calls each once, in this order (``fill`` only if it does not resume).

    Attributes:
        mesh: makes the mesh.
        distribute: carries the plan out on the model, without values, and returns the model.
        fill: gives the model values on a device.
        optimizer: makes the optimizer of the model's parameters.
        sync: makes what decides when the model's units gather and reduce.
        loader: makes the loader of training data, from a token store.
        runner: makes what runs microbatches.
        callbacks: makes what calls the callbacks of the trainer that it is given, and the checkpoint to resume from.
        forecast: the command that makes the forecast that is printed beside a step; ``None``: none is made.
    """

    mesh: Callable[[RunSetup, torch.device], ParallelMesh] = mesh_of_layout
    distribute: Callable[[RankSetup], nn.Module] = carry_out
    fill: Callable[[RankSetup, nn.Module, torch.device], None] = fill
    optimizer: Callable[[RankSetup, nn.Module], torch.optim.Optimizer] = optimizer_of_plan
    sync: Callable[[RankSetup, nn.Module], GradSync | None] = sync_of_plan
    loader: Callable[[RankSetup, TokenStore], TrainLoader] = train_loader
    runner: Callable[[RankSetup, nn.Module, Objective, GradSync | None, Balance, Progress], Runner] = runner_of_plan
    callbacks: Callable[..., Callbacks] = Callbacks
    forecast: Forecast | None = None


PARTS = Parts()
"""The parts of a run."""

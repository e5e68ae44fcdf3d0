"""FSDP2Manager: sizes and policies in one object, which builds the mesh and shards a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from meshwright.distributed import _torch_compat
from meshwright.distributed.conductor import check_supported
from meshwright.distributed.mesh import ParallelMesh, build_mesh
from meshwright.distributed.policies import options_of_policies
from meshwright.errors import LayoutError
from meshwright.layout import Layout
from meshwright.models.registry import get_parallelization_strategy
from meshwright.plan.given_styles import leaves_logits_sharded
from meshwright.plan.inspection import inspect_model
from meshwright.plan.options import ActivationCheckpointing, SyncPolicy
from meshwright.plan.resolver import resolve
from meshwright.plan.sharding_plan import ShardingPlan
from meshwright.plan.spec import ParallelSpec

__all__ = ["FSDP2Manager"]


@dataclass
class FSDP2Manager:
    """Shards models over the ranks of the default process group.

    Unlike in Meshwright's own trainer, gradients are averaged over the data ranks: torch's default, and what a loop that
    takes a mean loss on every rank expects.

    Args:
        dp_size: data ranks in all; ``None``: what the other sizes leave of the world.
        dp_replicate_size: replicas among them (HSDP).
        tp_size: tensor parallel ranks.
        cp_size: context parallel ranks.
        pp_size: pipeline stages.
        ep_size: expert parallel ranks.
        sequence_parallel: with ``tp``, hold each rank's part of the sequence between attention and MLP. Every sequence must
            have a length that ``tp`` divides.
        loss_parallel: with ``tp``, the model returns its logits as a DTensor that is sharded over the vocabulary, for
            :func:`~meshwright.distributed.loss_parallel.cross_entropy_sum`, or torch's ``loss_parallel()``, inside which
            backward has to run too. ``None``: where ``tp_plan`` says so of the output head.
        tp_plan: tensor parallel styles that win over all others: a dict of module patterns to styles (of torch, or names), or
            the import path of one or of a function that returns one.
        mp_policy: dtypes; ``None``: bf16 compute, fp32 reduction.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards in host memory.
        activation_checkpointing: what of each layer is recomputed in backward; ``True``: all of it (``full``).
        defer_fsdp_grad_sync: reduce gradients only in the last microbatch of a step (see
            :class:`~meshwright.distributed.grad_sync.GradSync`, whose default policy this sets).
        backend: of the process group, where it has to be started; ``None``: gloo, and NCCL for tensors on a GPU.

    Attributes:
        mesh: the mesh of the layout, built on construction.
        plan: the plan of the last :meth:`parallelize`.

    Raises:
        LayoutError: sizes that do not fit the world size.
        UnsupportedError: an axis or option that is not carried out.
    """

    dp_size: int | None = None
    dp_replicate_size: int | None = 1
    tp_size: int | None = 1
    cp_size: int | None = 1
    pp_size: int | None = 1
    ep_size: int | None = 1
    sequence_parallel: bool = False
    loss_parallel: bool | None = None
    tp_plan: Mapping[str, Any] | str | None = None
    mp_policy: MixedPrecisionPolicy | None = None
    offload_policy: OffloadPolicy | None = None
    activation_checkpointing: bool | ActivationCheckpointing = False
    defer_fsdp_grad_sync: bool = True
    backend: str | None = None
    mesh: ParallelMesh = field(init=False)
    plan: ShardingPlan | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Check the sizes and build the mesh; starts the process group if torchrun's variables are there and none is."""
        if not dist.is_initialized():
            _torch_compat.one_gloo_worker()
            dist.init_process_group(self.backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"))
        layout = self._layout().resolve(dist.get_world_size())
        check_supported(layout)
        self.mesh = build_mesh(layout)

    def _layout(self) -> Layout:
        def size(value: int | None) -> int:
            return 1 if value is None or value <= 0 else value

        replicas = size(self.dp_replicate_size)
        shard = None
        if self.dp_size is not None and self.dp_size > 0:
            if self.dp_size % replicas:
                raise LayoutError(
                    f"dp_replicate_size={replicas}: must divide dp_size={self.dp_size}; legal are divisors of {self.dp_size}"
                )
            shard = self.dp_size // replicas
        return Layout(
            pp=size(self.pp_size),
            dp_replicate=replicas,
            dp_shard=shard,
            cp=size(self.cp_size),
            tp=size(self.tp_size),
            ep=size(self.ep_size),
        )

    @property
    def device_mesh(self) -> torch.distributed.device_mesh.DeviceMesh:
        """The five-axis mesh."""
        return self.mesh.root

    def parallelize(self, model: nn.Module, spec: ParallelSpec | None = None) -> nn.Module:
        """Shard a model in place.

        Args:
            model: on the meta device, or materialised with the same values on all ranks.
            spec: what its family declares; ``None``: what the strategy of the model says.
        """
        options = options_of_policies(
            self.mp_policy,
            self.offload_policy,
            self.activation_checkpointing,
            self.mesh.device_type,
            sync=SyncPolicy.RESHARD_EACH if self.defer_fsdp_grad_sync else SyncPolicy.REDUCE_EACH,
            sequence_parallel=self.sequence_parallel,
            loss_parallel=self.loss_parallel,
            tp_plan=self.tp_plan,
        )
        strategy = get_parallelization_strategy(model)
        spec = spec or strategy.spec(model, options.param_dtype)
        facts = inspect_model(spec, model)
        if self.loss_parallel is None:
            sharded = self.tp_plan is not None and leaves_logits_sharded(spec, self.tp_plan, facts)
            options = replace(options, loss_parallel=sharded)
        self.plan = resolve(spec, facts, self.mesh.layout, options)
        return strategy.carry_out(model, self.plan, self.mesh)

"""A strategy: how a family of models is parallelized.

It says two things of the family: its spec, and (rarely) a step that has to be carried out otherwise than the conductor in
:mod:`~meshwright.distributed.conductor` does it. Which family a model belongs to, :mod:`~meshwright.models.registry` says.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from meshwright.distributed.conductor import parallelize
from meshwright.distributed.mesh import ParallelMesh, adopt_mesh
from meshwright.distributed.policies import options_of_policies
from meshwright.plan.given_styles import leaves_logits_sharded
from meshwright.plan.inspection import inspect_model
from meshwright.plan.options import SyncPolicy
from meshwright.plan.resolver import resolve
from meshwright.plan.sharding_plan import ShardingPlan
from meshwright.plan.spec import ParallelSpec

__all__ = ["ParallelizationStrategy"]


class ParallelizationStrategy(ABC):
    """How the models of a family are parallelized."""

    @abstractmethod
    def spec(self, model: nn.Module, param_dtype: str | None = "bfloat16") -> ParallelSpec:
        """What the family declares of itself.

        Args:
            model: of the family, on any device; only names, shapes and its config are read.
            param_dtype: dtype of compute. Some models ask for fp32 modules only where the rest is fp16.

        Raises:
            ModelError: a model that the family cannot say it of.
        """

    def carry_out(self, model: nn.Module, plan: ShardingPlan, mesh: ParallelMesh) -> nn.Module:
        """Carry a plan out on a model, in place.

        A family overrides it where something has to happen before or after what the conductor does, and calls this one in
        between; decisions belong into the spec, where the plan shows them.

        Args:
            model: that the plan was resolved for.
            plan: whose program is performed.
            mesh: of the plan's layout.
        """
        return parallelize(model, plan, mesh)

    def parallelize(
        self,
        model: nn.Module,
        device_mesh: DeviceMesh,
        mp_policy: MixedPrecisionPolicy | None = None,
        offload_policy: OffloadPolicy | None = None,
        sequence_parallel: bool = False,
        activation_checkpointing: bool = False,
        tp_shard_plan: Any = None,
        dp_replicate_mesh_name: str = "dp_replicate",
        dp_shard_cp_mesh_name: str = "dp_shard_cp",
        tp_mesh_name: str = "tp",
    ) -> nn.Module:
        """Resolve and carry out a plan over a mesh that is there: the interface of NeMo AutoModel.

        Gradients are averaged over data ranks and reduced in every backward, as torch does by default.

        Args:
            model: on the meta device, or with the same values on every rank; changed in place.
            device_mesh: with axes of these names; those it lacks count as 1, and others must have size 1.
            mp_policy: dtypes; ``None``: bf16 compute, fp32 reduction.
            offload_policy: ``CPUOffloadPolicy()`` keeps shards in host memory.
            sequence_parallel: shard the residual stream over the sequence, whose length ``tp`` must divide.
            activation_checkpointing: recompute every layer in backward.
            tp_shard_plan: tensor parallel styles that win over all others: a dict of module patterns to styles (of torch, or
                names), or the import path of one or of a function that returns one. Where its style of the output head leaves
                logits sharded (``Shard(-1)``, or ``colwise``), the model returns them as a DTensor; otherwise whole.
            dp_replicate_mesh_name: axis of the replicas.
            dp_shard_cp_mesh_name: axis that parameters are sharded over; a flattened one may be meant.
            tp_mesh_name: axis of tensor parallel.

        Raises:
            LayoutError: a mesh whose axes have another meaning.
            PlanError: a plan that does not fit the model; a family that cannot be sequence parallel.
            UnsupportedError: an axis or option that is not carried out.
        """
        mesh = adopt_mesh(device_mesh, dp_replicate_mesh_name, dp_shard_cp_mesh_name, tp_mesh_name)
        options = options_of_policies(
            mp_policy,
            offload_policy,
            activation_checkpointing,
            mesh.device_type,
            sync=SyncPolicy.REDUCE_EACH,
            sequence_parallel=sequence_parallel,
            tp_plan=tp_shard_plan,
        )
        spec = self.spec(model, options.param_dtype)
        facts = inspect_model(spec, model)
        if tp_shard_plan is not None and leaves_logits_sharded(spec, tp_shard_plan, facts):
            options = replace(options, loss_parallel=True)
        plan = resolve(spec, facts, mesh.layout, options)
        return self.carry_out(model, plan, mesh)

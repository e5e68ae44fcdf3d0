"""A strategy: how a family of models is parallelized.

It says two things of the family: its spec, and (rarely) a step that has to be carried out otherwise than the conductor in
:mod:`~meshwright.distributed.conductor` does it. Which family a model belongs to, :mod:`~meshwright.models.registry` says.

A strategy that was written for NeMo AutoModel overrides :meth:`ParallelizationStrategy.parallelize` instead. That is what
``FSDP2Manager`` and ``fsdp2_strategy_parallelize`` call; a run of ``meshwright train`` needs a spec.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from meshwright.distributed.conductor import parallelize
from meshwright.distributed.fsdp import refuse_parallelized, refuse_sliced
from meshwright.distributed.mesh import ParallelMesh, adopt_mesh
from meshwright.distributed.names import class_name
from meshwright.distributed.policies import options_of_policies
from meshwright.errors import ModelError, PlanError
from meshwright.plan.given_styles import declared_styles, leaves_logits_sharded, read_plan, shards_sequence
from meshwright.plan.inspection import inspect_model
from meshwright.plan.names import match_names
from meshwright.plan.options import SyncPolicy
from meshwright.plan.resolver import resolve
from meshwright.plan.sharding_plan import ShardingPlan
from meshwright.plan.spec import ParallelSpec

__all__ = ["ParallelizationStrategy", "Request", "requested"]


@dataclass
class Request:
    """What a manager asks of :meth:`ParallelizationStrategy.parallelize` beyond the arguments that it has in the reference.

    A strategy of the user's stands between the two, and passes on what it knows.

    Attributes:
        mesh: of a layout, where its root is the mesh that is passed.
        spec: in place of the strategy's.
        options: fields of :class:`~meshwright.plan.options.ParallelOptions`.
        styles: the ``tp_shard_plan`` that the manager passes to a strategy of the user's, as the reference does, where nobody
            gave a plan. If it comes back, it is as if none was given.
        model: the model that the plan is of. It may be a part of what the manager was given.
        plan: that was carried out; ``None``: the strategy did it without one.
    """

    mesh: ParallelMesh | None = None
    spec: ParallelSpec | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    styles: Mapping[str, Any] | None = None
    model: nn.Module | None = None
    plan: ShardingPlan | None = None


_REQUEST: ContextVar[Request] = ContextVar("request")


@contextmanager
def requested(request: Request) -> Iterator[Request]:
    """Inside, :meth:`ParallelizationStrategy.parallelize` does what a request says, and notes its plan there."""
    token = _REQUEST.set(request)
    try:
        yield request
    finally:
        _REQUEST.reset(token)


class ParallelizationStrategy:
    """How the models of a family are parallelized. A strategy overrides ``spec``, or all of ``parallelize``."""

    def spec(self, model: nn.Module, param_dtype: str | None = "bfloat16") -> ParallelSpec:
        """What the family declares of itself.

        Args:
            model: of the family, on any device; only names, shapes and its config are read.
            param_dtype: dtype of compute. Some models ask for fp32 modules only where the rest is fp16.

        Raises:
            ModelError: a model that the family cannot say it of; a strategy without a spec.
        """
        raise ModelError(
            f"{type(self).__name__}, the strategy of {class_name(model)}, has no spec, only parallelize(), which FSDP2Manager "
            "and fsdp2_strategy_parallelize call; define spec(), or derive from DefaultParallelizationStrategy"
        )

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
        *,
        use_hf_tp_plan: bool = False,
    ) -> nn.Module:
        """Resolve and carry out a plan over a mesh that is there: the interface of NeMo AutoModel.

        Gradients are averaged over data ranks and reduced in every backward, as torch does by default. Without tensor parallel
        ranks, what is said of tensor and sequence parallel counts for nothing.

        Args:
            model: on the meta device, or with the same values on every rank; changed in place.
            device_mesh: with axes of these names; those it lacks count as 1, and others must have size 1.
            mp_policy: dtypes; ``None``: bf16 compute, fp32 reduction, fp32 outputs of the model.
            offload_policy: ``CPUOffloadPolicy()`` keeps shards in host memory.
            sequence_parallel: shard the residual stream over the sequence, whose length ``tp`` must divide. It does so too
                where the styles of ``tp_shard_plan`` shard it.
            activation_checkpointing: recompute every layer in backward.
            tp_shard_plan: tensor parallel styles that win over all others: a dict of module patterns to styles (of torch, or
                names), or the import path of one or of a function that returns one. Where its style of the output head leaves
                logits sharded (``Shard(-1)``, or ``colwise``), the model returns them as a DTensor; otherwise whole. A pattern
                that names nothing here is left out with a warning, as torch does.
            dp_replicate_mesh_name: axis of the replicas.
            dp_shard_cp_mesh_name: axis that parameters are sharded over; a flattened one may be meant.
            tp_mesh_name: axis of tensor parallel.
            use_hf_tp_plan: take the styles that the model declares, where no plan is given.

        Raises:
            LayoutError: a mesh whose axes have another meaning.
            PlanError: a plan that does not fit the model; a family that cannot be sequence parallel; a model that is
                parallelized already.
            UnsupportedError: an axis or option that is not carried out.
        """
        refuse_parallelized(model)
        refuse_sliced(model)
        request = _REQUEST.get(None) or Request()
        if request.mesh is not None and request.mesh.root is device_mesh:
            mesh = request.mesh
        else:
            mesh = adopt_mesh(device_mesh, dp_replicate_mesh_name, dp_shard_cp_mesh_name, tp_mesh_name)
        sliced = mesh.layout.size("tp") > 1
        given = None if tp_shard_plan is request.styles or not sliced else tp_shard_plan
        chosen: dict[str, Any] = {"sync": SyncPolicy.REDUCE_EACH, "loss_parallel": None, **request.options}
        options = options_of_policies(mp_policy, offload_policy, activation_checkpointing, mesh.device_type, **chosen)
        spec = request.spec or self.spec(model, options.param_dtype)
        facts = inspect_model(spec, model)
        if given is not None:
            given = _naming_something(read_plan(given), facts.modules, class_name(model))
        elif use_hf_tp_plan and sliced:
            given = declared_styles(spec)
        head = given is not None and leaves_logits_sharded(spec, given, facts)
        options = replace(
            options,
            tp_plan=given,
            sequence_parallel=sliced and (sequence_parallel or (given is not None and shards_sequence(given))),
            loss_parallel=head if options.loss_parallel is None else options.loss_parallel,
        )
        plan = resolve(spec, facts, mesh.layout, options)
        request.model, request.plan = model, plan
        return self.carry_out(model, plan, mesh)


def _naming_something(plan: dict[str, Any], modules: Iterable[str], family: str) -> dict[str, Any]:
    """The entries of a plan that name a module. Plans are written for many families at once.

    Raises:
        PlanError: none of them names anything.
    """
    names = list(modules)
    idle = [pattern for pattern in plan if not match_names(pattern, names)]
    if len(idle) == len(plan):
        raise PlanError(f"tp_plan pattern {pattern!r} matches no parameter" for pattern in idle)
    if idle:
        warnings.warn(f"tp_shard_plan: {', '.join(idle)} names nothing in {family}; left out", stacklevel=3)
    return {pattern: style for pattern, style in plan.items() if pattern not in idle}

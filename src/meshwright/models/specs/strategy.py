"""Strategies: how a family of models is parallelized.

A strategy defines two things for its family: the spec and, rarely, a step that is carried out in another way than the conductor
in :mod:`~meshwright.distributed.conductor` does. :mod:`~meshwright.models.specs.registry` finds the family of a model.

A strategy that was written for NeMo AutoModel overrides :meth:`ParallelizationStrategy.parallelize` instead. ``FSDP2Manager``
and ``fsdp2_strategy_parallelize`` call this method; a run of ``meshwright train`` needs a spec.
"""

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from meshwright.distributed.class_names import class_name
from meshwright.distributed.conductor import parallelize
from meshwright.distributed.data.fsdp_units import (
    ShardFunction,
    refuse_parallelized,
    refuse_sliced,
    sharding_by,
)
from meshwright.distributed.data.torch_policies import options_of_policies
from meshwright.distributed.mesh import ParallelMesh, adopt_mesh
from meshwright.errors import ModelError, PlanError, Problems, Refusal, UnsupportedError
from meshwright.plan.axes.tensor.given_styles import declared_styles, leaves_logits_sharded, read_plan, shards_sequence
from meshwright.plan.given.closed_choices import SyncPolicy
from meshwright.plan.given.inspection import inspect_model
from meshwright.plan.given.names import match_names
from meshwright.plan.given.spec import ParallelSpec
from meshwright.plan.resolver import resolve
from meshwright.plan.result.sharding_plan import ShardingPlan

__all__ = [
    "ParallelizationStrategy",
    "Request",
    "check_depths",
    "check_shard_function",
    "name_of_function",
    "requested",
]


@dataclass
class Request:
    """What a manager passes to :meth:`ParallelizationStrategy.parallelize` besides the arguments that NeMo AutoModel has there.

    A strategy of the user may stand between the two: it calls the method with the arguments that it knows.

    Attributes:
        mesh: the mesh of a layout; used if its root is the mesh that is passed as an argument.
        spec: a spec that replaces that of the strategy.
        options: fields of :class:`~meshwright.plan.given.options.ParallelOptions`.
        styles: the plan that the manager made itself, as NeMo AutoModel does, and passes as ``tp_shard_plan`` to a strategy of
            the user. If the strategy passes it on to ``parallelize`` of this class, it counts as no plan.
        model: the model that the plan is for. It may be a part of the model that the manager was given.
        plan: the plan that was carried out; ``None``: the strategy did its work without a plan.
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
    """Inside this context, :meth:`ParallelizationStrategy.parallelize` follows a request, and stores its plan there."""
    token = _REQUEST.set(request)
    try:
        yield request
    finally:
        _REQUEST.reset(token)


class ParallelizationStrategy:
    """How the models of a family are parallelized. A strategy overrides ``spec``, or all of ``parallelize``."""

    def spec(self, model: nn.Module, param_dtype: str | None = "bfloat16") -> ParallelSpec:
        """Return the spec of a model of the family.

        Args:
            model: the model, on any device; only names, shapes and its config are read.
            param_dtype: dtype of compute. Some models ask for fp32 modules only if the rest is fp16.

        Raises:
            ModelError: the family has no spec for this model; or the strategy has no spec at all.
        """
        raise ModelError(
            "model.strategy",
            f"{type(self).__name__}, the strategy of {class_name(model)}, has no spec, only parallelize(), which FSDP2Manager "
            "and fsdp2_strategy_parallelize call; define spec(), or derive from DefaultParallelizationStrategy",
        )

    def carry_out(self, model: nn.Module, plan: ShardingPlan, mesh: ParallelMesh) -> nn.Module:
        """Carry out a plan on a model, in place.

        A family overrides this if something has to happen before or after the work of the conductor, and calls this method in
        between. Decisions belong in the spec, because the plan shows them.

        Args:
            model: the model that the plan was resolved for.
            plan: the plan whose program is performed.
            mesh: the mesh of the plan's layout.
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
        enable_async_tensor_parallel: bool = False,
        enable_compile: bool = False,
        enable_fsdp2_prefetch: bool | None = None,
        fsdp2_backward_prefetch_depth: int | None = None,
        fsdp2_forward_prefetch_depth: int | None = None,
        reshard_after_forward: bool | None = None,
        fully_shard_fn: ShardFunction | None = None,
    ) -> nn.Module:
        """Resolve and carry out a plan over an existing mesh: the interface of NeMo AutoModel.

        Gradients are averaged over data ranks and reduced in every backward, as torch does by default. If there is only one
        rank of tensor parallel, the arguments for tensor and sequence parallel have no effect.

        Args:
            model: the model, on the meta device, or with the same values on every rank; changed in place. On a
                manager's mesh with `pp`, it is this rank's stage.
            device_mesh: a mesh with axes of the names below. An axis that it lacks has size 1; other axes must have size 1.
            mp_policy: dtypes; ``None``: bf16 compute, fp32 reduction, fp32 outputs of the model.
            offload_policy: ``CPUOffloadPolicy()`` keeps shards in host memory.
            sequence_parallel: shard the residual stream over the sequence; ``tp`` must divide its length. This also happens if
                the styles of ``tp_shard_plan`` shard the stream.
            activation_checkpointing: recompute every layer in backward.
            tp_shard_plan: tensor parallel styles that win over all others: a dict of module patterns to styles (of torch, or
                names), or the import path of such a dict or of a function that returns one. If its style of the output head
                leaves logits sharded (``Shard(-1)``, or ``colwise``), the model returns them as a DTensor, otherwise whole. A
                pattern that matches nothing is left out with a warning, as in torch.
            dp_replicate_mesh_name: name of the axis of replicas.
            dp_shard_cp_mesh_name: name of the axis that parameters are sharded over; it may be a flattened axis.
            tp_mesh_name: name of the axis of tensor parallel.
            use_hf_tp_plan: use the styles that the model declares, if no plan is given.
            enable_async_tensor_parallel: the legal value is ``False``.
            enable_compile: the legal value is ``False``; compile the model afterwards.
            enable_fsdp2_prefetch: gather units ahead, in chains of the depths below; ``None``: if a depth is given. ``False``:
                FSDP2 decides.
            fsdp2_backward_prefetch_depth: number of units ahead in backward; ``None``: 2. 0: none.
            fsdp2_forward_prefetch_depth: number of units ahead in forward; ``None``: 1. 0: FSDP2 decides.
            reshard_after_forward: holds for all units but the root; ``None``: see ``ParallelOptions``.
            fully_shard_fn: a function that makes each unit, the root last, in place of torch's ``fully_shard``. It is called as
                ``fn(module, mesh=, mp_policy=, offload_policy=, reshard_after_forward=)`` and shards in place.

        Raises:
            LayoutError: the axes of the mesh have another meaning.
            PlanError: the plan does not fit the model; the family does not support sequence parallel; the model is
                parallelized already; a depth of prefetching has no effect; or `fully_shard_fn` cannot be called so, returns
                another module, or makes no unit.
            UnsupportedError: an axis or an option is not supported.
        """
        refuse_parallelized(model)
        refuse_sliced(model)
        check_shard_function(fully_shard_fn)
        request = _REQUEST.get(None) or Request()
        if request.mesh is not None and request.mesh.root is device_mesh:
            mesh = request.mesh
        else:
            mesh = adopt_mesh(device_mesh, dp_replicate_mesh_name, dp_shard_cp_mesh_name, tp_mesh_name)
        sliced = mesh.layout.size("tp") > 1
        given_styles = None if tp_shard_plan is request.styles or not sliced else tp_shard_plan
        refused = {"enable_async_tensor_parallel": enable_async_tensor_parallel, "enable_compile": enable_compile}
        if asked := [name for name, on in refused.items() if on]:
            raise UnsupportedError(
                Refusal("strategy.argument", f"{name}=True: not supported here; the legal value is False") for name in asked
            )
        chosen: dict[str, Any] = {
            "sync": SyncPolicy.REDUCE_EACH,
            "loss_parallel": None,
            "reshard_after_forward": reshard_after_forward,
            **_prefetch(enable_fsdp2_prefetch, fsdp2_forward_prefetch_depth, fsdp2_backward_prefetch_depth),
            "sharded_by": "" if fully_shard_fn is None else name_of_function(fully_shard_fn),
            **request.options,
        }
        options = options_of_policies(mp_policy, offload_policy, activation_checkpointing, mesh.device_type, **chosen)
        spec = request.spec or self.spec(model, options.param_dtype)
        facts = inspect_model(spec, model)
        if given_styles is not None:
            given_styles = _naming_something(read_plan(given_styles), facts.modules, class_name(model))
        elif use_hf_tp_plan and sliced:
            given_styles = declared_styles(spec)
        head = given_styles is not None and leaves_logits_sharded(spec, given_styles, facts)
        options = replace(
            options,
            tp_plan=given_styles,
            sequence_parallel=sliced and (sequence_parallel or (given_styles is not None and shards_sequence(given_styles))),
            loss_parallel=head if options.loss_parallel is None else options.loss_parallel,
        )
        if mesh.layout.size("pp") > 1 and options.sequence_parallel:
            raise UnsupportedError(
                "strategy.sequence_parallel",
                "sequence_parallel=True with pp > 1: a stage that was cut elsewhere cannot tell which slice of the sequence it "
                "gets; legal are sequence_parallel=False, and meshwright.Pipeline with the whole model",
            )
        # The model is a stage, whose ranks are those of the other axes.
        plan = replace(resolve(spec, facts, replace(mesh.layout, pp=1), options), layout=mesh.layout)
        request.model, request.plan = model, plan
        with sharding_by(fully_shard_fn):
            return self.carry_out(model, plan, mesh)


def _prefetch(enabled: bool | None, forward: int | None, backward: int | None) -> dict[str, int | None]:
    """Return the options that the prefetch of NeMo AutoModel means.

    Raises:
        PlanError: see :func:`check_depths`.
    """
    check_depths(enabled, forward, backward)
    if enabled is False or (enabled is None and forward is None and backward is None):
        return {}
    ahead, behind = (default if depth is None else depth for depth, default in ((forward, 1), (backward, 2)))
    return {"prefetch_forward": ahead or None, "prefetch_backward": behind}


def check_depths(enabled: bool | None, forward: int | None, backward: int | None) -> None:
    """Refuse depths of the prefetch of NeMo AutoModel that mean nothing, or have no effect.

    Its defaults (1 and 2) are legal without prefetch, because loops written for it pass them on.

    Raises:
        PlanError: a depth below 0; or another depth than the default without prefetch.
    """
    problems = Problems()
    for name, depth, default in (("forward", forward, 1), ("backward", backward, 2)):
        shown = f"fsdp2_{name}_prefetch_depth={depth}"
        if depth is not None and depth < 0:
            problems.add("fsdp.prefetch", f"{shown}: legal are 0 and above")
        elif enabled is False and depth not in (None, default):
            problems.add(
                "fsdp.prefetch",
                f"{shown}: has no effect with enable_fsdp2_prefetch=False; legal with it is {default}, the default, and with "
                "enable_fsdp2_prefetch=True 0 and above",
            )
    if problems:
        raise PlanError(problems)


_CALL = "fn(module, mesh=, mp_policy=, offload_policy=, reshard_after_forward=)"


def name_of_function(function: ShardFunction) -> str:
    """Return module and name of a function of the user, for messages and the plan."""
    inner = getattr(function, "func", function)  # of a partial
    return f"{getattr(inner, '__module__', '?')}:{getattr(inner, '__qualname__', type(inner).__qualname__)}"


def check_shard_function(function: ShardFunction | None) -> None:
    """Refuse what cannot be called as a function that makes units. ``None``: torch makes them.

    Raises:
        PlanError: it is no function, or does not take these arguments.
    """
    if function is None:
        return
    if not callable(function):
        raise PlanError(
            "fsdp.function", f"fully_shard_fn={function!r}: legal are None and a function that is called as {_CALL}"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C
        return
    try:
        signature.bind(None, mesh=None, mp_policy=None, offload_policy=None, reshard_after_forward=None)
    except TypeError as error:
        raise PlanError(
            "fsdp.function", f"fully_shard_fn: {name_of_function(function)} is called as {_CALL}, which fails: {error}"
        ) from None


def _naming_something(plan: dict[str, Any], modules: Iterable[str], family: str) -> dict[str, Any]:
    """Return the entries of a plan that match a module. Plans are often written for many families at once.

    Raises:
        PlanError: no entry matches anything.
    """
    names = list(modules)
    idle = [pattern for pattern in plan if not match_names(pattern, names)]
    if len(idle) == len(plan):
        raise PlanError(Refusal("tp.plan", f"tp_plan pattern {pattern!r} matches no parameter") for pattern in idle)
    if idle:
        warnings.warn(f"tp_shard_plan: {', '.join(idle)} names nothing in {family}; left out", stacklevel=3)
    return {pattern: style for pattern, style in plan.items() if pattern not in idle}

"""Strategies: how a family of models is parallelized, and which family a model belongs to.

A strategy says two things of a family: its spec, and (rarely) a step that has to be carried out otherwise than the conductor in
:mod:`~meshwright.distributed.parallelizer` does it. Everything that parallelizes a model asks for its strategy here: the
trainer, `plan`, `audit`, :class:`~meshwright.distributed.fsdp2.FSDP2Manager`, and the functions of the reference interface.

A family is found by the name of the model's class, so that it can be declared without importing the library that has the class.
This room knows no family: those that come with Meshwright are in `models/families.py`, and register themselves as anyone's do.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, overload

from meshwright.errors import ConfigError
from meshwright.plan.spec import ParallelSpec

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

    from meshwright.distributed.mesh import ParallelMesh
    from meshwright.plan.sharding_plan import ShardingPlan

__all__ = ["ParallelizationStrategy", "get_parallelization_strategy", "register_parallel_strategy", "registered_strategies"]


class ParallelizationStrategy(ABC):
    """How the models of a family are parallelized."""

    @abstractmethod
    def spec(self, model: "nn.Module", param_dtype: str | None = "bfloat16") -> ParallelSpec:
        """What the family declares of itself.

        Args:
            model: of the family, on any device; only names, shapes and its config are read.
            param_dtype: dtype of compute. Some models ask for fp32 modules only where the rest is fp16.

        Raises:
            ModelError: a model that the family cannot say it of.
        """

    def carry_out(self, model: "nn.Module", plan: "ShardingPlan", mesh: "ParallelMesh") -> "nn.Module":
        """Carry a plan out on a model, in place.

        A family overrides it where something has to happen before or after what the conductor does, and calls this one in
        between; decisions belong into the spec, where the plan shows them.

        Args:
            model: that the plan was resolved for.
            plan: the rows to carry out.
            mesh: of the plan's layout.
        """
        from meshwright.distributed.parallelizer import parallelize

        return parallelize(model, plan, mesh)

    def parallelize(
        self,
        model: "nn.Module",
        device_mesh: "DeviceMesh",
        mp_policy: "MixedPrecisionPolicy | None" = None,
        offload_policy: "OffloadPolicy | None" = None,
        sequence_parallel: bool = False,
        activation_checkpointing: bool = False,
        tp_shard_plan: Any = None,
        dp_replicate_mesh_name: str = "dp_replicate",
        dp_shard_cp_mesh_name: str = "dp_shard_cp",
        tp_mesh_name: str = "tp",
    ) -> "nn.Module":
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
        from meshwright.distributed.mesh import adopt_mesh
        from meshwright.distributed.policies import options_of_policies
        from meshwright.plan.given_styles import leaves_logits_sharded
        from meshwright.plan.inspection import inspect_model
        from meshwright.plan.options import SyncPolicy
        from meshwright.plan.resolver import resolve

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
        if tp_shard_plan is not None and leaves_logits_sharded(spec, tp_shard_plan, inspect_model(spec, model)):
            options = replace(options, loss_parallel=True)
        plan = resolve(spec, model, mesh.layout, options)
        return self.carry_out(model, plan, mesh)


Strategy = TypeVar("Strategy", bound=type[ParallelizationStrategy])

_REGISTRY: dict[str, ParallelizationStrategy] = {}
"""Name of a model class to the strategy of its family."""


@overload
def register_parallel_strategy(strategy: Strategy, /) -> Strategy: ...


@overload
def register_parallel_strategy(*names: str, name: str | None = None) -> Callable[[Strategy], Strategy]: ...


def register_parallel_strategy(*names: Any, name: str | None = None) -> Any:
    """Class decorator: models whose class has one of these names, and models of their subclasses, get this strategy.

    ``@register_parallel_strategy("MyModel", "MyModelForCausalLM")``, or ``name="MyModel"``. Bare, the name is that of the
    strategy without the ending ``ParallelizationStrategy`` or ``Strategy``: ``MyModelStrategy`` is for ``MyModel``.

    To register a strategy again is no error, also after its module was reloaded or its notebook cell was run again.

    Raises:
        ConfigError: a strategy for a name that another one has; it names both.
        TypeError: what is decorated is no strategy, or one that cannot be made without arguments.
    """
    if len(names) == 1 and isinstance(names[0], type) and name is None:
        (strategy,) = names
        return _register(strategy, (_model_of(strategy),))
    chosen = (*names, *(() if name is None else (name,)))
    if not chosen or not all(isinstance(item, str) and item.isidentifier() for item in chosen):
        raise TypeError(f"register_parallel_strategy{names!r}: takes names of model classes, such as 'LlamaForCausalLM'")
    return lambda strategy: _register(strategy, chosen)


def _model_of(strategy: type) -> str:
    """The model class that a bare registration means."""
    for ending in ("ParallelizationStrategy", "Strategy"):
        found = strategy.__name__.removesuffix(ending)
        if not found:
            raise TypeError(f"{strategy.__name__}: names no model class; register it as @register_parallel_strategy('MyModel')")
        if found != strategy.__name__:
            return found
    return strategy.__name__


def _register(strategy: Strategy, names: tuple[str, ...]) -> Strategy:
    if not (isinstance(strategy, type) and issubclass(strategy, ParallelizationStrategy)):
        raise TypeError(f"{strategy!r}: is no subclass of ParallelizationStrategy")
    _load_families()  # so that a name that Meshwright has is refused here, and not at some later time
    held = {name: type(_REGISTRY[name]) for name in names if name in _REGISTRY}
    problems = [
        f"the strategy of {name!r} is {_full_name(other)} already, so {_full_name(strategy)} cannot be; register it for a "
        "subclass of the model, or pass a ParallelSpec"
        for name, other in held.items()
        if _full_name(other) != _full_name(strategy)
    ]
    if problems:
        raise ConfigError(problems)
    instance = strategy()
    for name in names:
        if held.get(name) is not strategy:
            _REGISTRY[name] = instance
    return strategy


def _full_name(strategy: type) -> str:
    return f"{strategy.__module__}.{strategy.__qualname__}"


def get_parallelization_strategy(model: "nn.Module") -> ParallelizationStrategy:
    """The strategy of a model: that of its class, or of the nearest class that it inherits from; otherwise the default one,
    which derives everything from what a model of transformers declares of itself.
    """
    _load_families()
    for kind in type(model).__mro__:
        if kind.__name__ in _REGISTRY:
            return _REGISTRY[kind.__name__]
    # With _load_families(), the one place where this room looks at models: only they know what a model says of itself.
    from meshwright.models.spec import DefaultParallelizationStrategy

    return DefaultParallelizationStrategy()


def registered_strategies() -> dict[str, ParallelizationStrategy]:
    """Name of a model class to its strategy, in the order of registration; those of Meshwright are among them."""
    _load_families()
    return dict(_REGISTRY)


def _load_families() -> None:
    """Have the families that come with Meshwright register themselves. Light: none imports its model's library."""
    import meshwright.models.families  # noqa: F401

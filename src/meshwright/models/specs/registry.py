"""The registry of strategies: which family a model belongs to.

Everything that parallelizes a model gets its strategy here: the trainer, `plan`, `audit` and the interface of NeMo AutoModel. A
family is found by the name of the model's class, so it can be declared without importing the library that has the class.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, overload

from torch import nn

from meshwright.errors import ConfigError, Refusal
from meshwright.models.families.listed import FAMILIES
from meshwright.models.specs.derived import DefaultParallelizationStrategy, base_of_peft
from meshwright.models.specs.strategy import ParallelizationStrategy
from meshwright.plan.given.spec import ParallelSpec

__all__ = [
    "PARALLELIZATION_STRATEGIES",
    "get_parallelization_strategy",
    "register_parallel_strategy",
    "registered_strategies",
    "spec_of",
]

Strategy = TypeVar("Strategy", bound=type[ParallelizationStrategy])

_REGISTRY: dict[str, ParallelizationStrategy] = {
    name: family.strategy() for family in FAMILIES if family.strategy is not None for name in family.classes
}
"""Name of a model class to the strategy of its family. Those that come with Meshwright are first."""

PARALLELIZATION_STRATEGIES: Mapping[str, ParallelizationStrategy] = MappingProxyType(_REGISTRY)
"""A read-only view of the registry; :func:`register_parallel_strategy` adds to it."""


@overload
def register_parallel_strategy(strategy: Strategy, /) -> Strategy: ...


@overload
def register_parallel_strategy(*names: str, name: str | None = None) -> Callable[[Strategy], Strategy]: ...


def register_parallel_strategy(*names: Any, name: str | None = None) -> Any:
    """Class decorator that registers a strategy for models whose class has one of these names, and for those of subclasses.

    Use ``@register_parallel_strategy("MyModel", "MyModelForCausalLM")``, or ``name="MyModel"``. Without arguments, the model's
    name is that of the strategy without the ending ``ParallelizationStrategy`` or ``Strategy``: ``MyModelStrategy`` is for
    ``MyModel``.

    A strategy may be registered again, also after its module was reloaded or its notebook cell was run again.

    Raises:
        ConfigError: another strategy has this name already; the message names both.
        TypeError: the class is no strategy, or one that cannot be created without arguments.
    """
    if len(names) == 1 and isinstance(names[0], type) and name is None:
        (strategy,) = names
        return _register(strategy, (_model_of(strategy),))
    chosen = (*names, *(() if name is None else (name,)))
    if not chosen or not all(isinstance(item, str) and item.isidentifier() for item in chosen):
        raise TypeError(f"register_parallel_strategy{names!r}: takes names of model classes, such as 'LlamaForCausalLM'")
    return lambda strategy: _register(strategy, chosen)


def _model_of(strategy: type) -> str:
    """Return the name of the model class that a registration without arguments means."""
    for ending in ("ParallelizationStrategy", "Strategy"):
        model_name = strategy.__name__.removesuffix(ending)
        if not model_name:
            raise TypeError(f"{strategy.__name__}: names no model class; register it as @register_parallel_strategy('MyModel')")
        if model_name != strategy.__name__:
            return model_name
    return strategy.__name__


def _register(strategy: Strategy, names: tuple[str, ...]) -> Strategy:
    if not (isinstance(strategy, type) and issubclass(strategy, ParallelizationStrategy)):
        raise TypeError(f"{strategy!r}: is no subclass of ParallelizationStrategy")
    if all(getattr(strategy, name) is getattr(ParallelizationStrategy, name) for name in ("spec", "parallelize")):
        raise TypeError(f"{strategy.__name__}: defines neither spec() nor parallelize(); define one of them")
    registered = {name: type(_REGISTRY[name]) for name in names if name in _REGISTRY}
    problems = [
        Refusal(
            "model.strategy",
            f"{name!r} has the strategy {_full_name(other)} already, so {_full_name(strategy)} cannot be registered for it; "
            "register it for a subclass of the model, or pass a ParallelSpec",
        )
        for name, other in registered.items()
        if _full_name(other) != _full_name(strategy)
    ]
    if problems:
        raise ConfigError(problems)
    instance = strategy()
    for name in names:
        if registered.get(name) is not strategy:
            _REGISTRY[name] = instance
    return strategy


def _full_name(strategy: type) -> str:
    return f"{strategy.__module__}.{strategy.__qualname__}"


def get_parallelization_strategy(model: nn.Module) -> ParallelizationStrategy:
    """Return the strategy of a model: that of its class, or of the nearest class that it inherits from.

    If there is none, return the default one, which derives everything from the declarations of a model of transformers.
    """
    for kind in type(model).__mro__:
        if kind.__name__ in _REGISTRY:
            return _REGISTRY[kind.__name__]
    adapted = base_of_peft(model)
    return DefaultParallelizationStrategy(None if adapted is None else get_parallelization_strategy(adapted))


def registered_strategies() -> dict[str, ParallelizationStrategy]:
    """Return name of a model class to its strategy, in the order of registration, with those of Meshwright."""
    return dict(_REGISTRY)


def spec_of(model: nn.Module, param_dtype: str | None = "bfloat16") -> ParallelSpec:
    """Return the spec of a model, from the strategy of its class. It is derived if the family has no strategy or no spec.

    Args:
        model: the model, on any device.
        param_dtype: dtype of compute.

    Raises:
        ModelError: nothing is known of the model; the message says what to declare.
    """
    strategy = get_parallelization_strategy(model)
    if type(strategy).spec is ParallelizationStrategy.spec:  # it only overrides parallelize()
        strategy = DefaultParallelizationStrategy()
    return strategy.spec(model, param_dtype)

"""The facts of a model that a plan needs, read once. The passes of the resolver see a model only through these facts."""

import inspect
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import islice, takewhile
from types import CodeType, FunctionType

import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.layout import ModelSizes
from meshwright.once import Once
from meshwright.plan.given.hidden_argument import HIDDEN, forward_of, hidden_argument
from meshwright.plan.given.names import holder_of, holders_of, inside, match_names
from meshwright.plan.given.norms import is_norm
from meshwright.plan.given.options import NF4
from meshwright.plan.given.parameter_storage import is_transposed, names_of_parameters
from meshwright.plan.given.spec import ParallelSpec
from meshwright.plan.given.traces import Traces

__all__ = [
    "EXPERTS_ATTRIBUTE",
    "Inspection",
    "ModuleFacts",
    "ParameterFacts",
    "inspect_model",
    "model_sizes",
]

_HEADS = ("num_attention_heads", "num_heads", "num_key_value_heads", "num_key_value_groups")
"""Attributes of an attention that count its heads."""
FOREIGN = {"Params4bit", "Int8Params"}
"""Classes of quantized parameters of bitsandbytes."""

PACKED_ATTRIBUTE = "packed_weights"
"""Attribute of a module that names the parameters that it can take in 4 bits."""

EXPERTS_ATTRIBUTE = "num_experts"
"""Attribute of a mixture that counts its experts."""


@dataclass(frozen=True)
class ParameterFacts:
    """Facts of one parameter.

    Attributes:
        name: its first name in the model.
        aliases: the other names of a tied parameter.
        shape: shape of the whole parameter.
        dtype: dtype in which it is stored.
        requires_grad: whether it requires a gradient in the model.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool

    @property
    def names(self) -> tuple[str, ...]:
        """All its names."""
        return (self.name, *self.aliases)


@dataclass(frozen=True)
class ModuleFacts:
    """Facts of one module.

    Attributes:
        name: name in the model; that of the root is the empty string.
        kind: name of its class.
        parameters: its own parameters: name in the module to shape.
        buffers: names of its own buffers.
        children: its direct children: name in the module to name in the model. A child that is in several modules has the name
            of its first place.
        container: whether it is a list or a dict of modules, which is not called itself.
        embedding: whether it is an embedding.
        transposed: whether it is a ``Conv1D`` of transformers, or experts, whose weights are [in, out].
        padding: row of an embedding that gets no gradient.
        hidden: position and name of the hidden state among the arguments of its forward.
        code: names of the attributes and globals that its forward, and the methods that it calls, use.
        counts: attributes that count heads or experts, with their values.
        has_config: whether it has a config, which other modules may share.
        wrapped: ``adapter`` if peft added low-rank matrices to a matrix here, ``other`` if it wrapped something else; otherwise
            empty.
        norm: whether it is a norm with parameters of two or more dimensions, by its operators.
        unheld: for an adapter, what it has in addition to the two low-rank matrices.
    """

    name: str
    kind: str
    parameters: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    children: Mapping[str, str] = field(default_factory=dict)
    container: bool = False
    embedding: bool = False
    transposed: bool = False
    padding: int | None = None
    hidden: tuple[int, str] = (0, HIDDEN)
    code: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    has_config: bool = False
    wrapped: str = ""
    unheld: tuple[str, ...] = ()
    norm: bool = False


@dataclass(frozen=True)
class Inspection(Once):
    """A model as plain facts.

    Attributes:
        modules: facts of each module by name, in model order: parents come first.
        parameters: facts of each parameter, in model order; a tied parameter is listed once.
        sizes: sizes that limit a layout.
        caches: names of modules that keep keys and values between calls, one for each config that says so.
        traces: what is read by calling the model.
    """

    modules: Mapping[str, ModuleFacts]
    parameters: tuple[ParameterFacts, ...]
    sizes: ModelSizes = field(default_factory=ModelSizes)
    caches: tuple[str, ...] = ()
    traces: Traces = field(default_factory=Traces, compare=False, repr=False)

    @cached_property
    def names(self) -> list[str]:
        """Names of all modules but the root."""
        return [name for name in self.modules if name]

    def matched(self, pattern: str) -> list[str]:
        """Return the names of the modules that a pattern matches, in model order; the root is not one of them."""
        return match_names(pattern, self.names)

    @cached_property
    def parameter_of(self) -> dict[str, ParameterFacts]:
        """The facts of each parameter, by each of its names."""
        return {name: parameter for parameter in self.parameters for name in parameter.names}

    @cached_property
    def adapters(self) -> set[str]:
        """Names of the modules that peft put around a matrix and its adapter."""
        return {name for name, module in self.modules.items() if module.wrapped == "adapter"}

    def in_adapter(self, name: str) -> bool:
        """Return whether a module is inside of one of them."""
        return any(holder in self.adapters for holder in holders_of(name))

    def home(self, name: str) -> str:
        """Return a name of a module or parameter by the first place of each module that stands in several places."""
        if name not in self._homes:
            module, found = "", ""
            for part in name.split("."):
                found = f"{module}.{part}" if module else part
                facts = self.modules.get(module)
                module = facts.children.get(part, found) if facts else found
            self._homes[name] = module if module in self.modules else found
        return self._homes[name]

    @cached_property
    def _homes(self) -> dict[str, str]:
        return {}

    @cached_property
    def _all(self) -> list[str]:
        return list(self.modules)

    @cached_property
    def _order(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.modules)}

    @cached_property
    def _with_parameters(self) -> set[str]:
        modules = {""} if self.parameters else set()
        for name in self.parameter_of:
            while (name := holder_of(name)) not in modules:
                modules.add(name)
        return modules

    def inside(self, module: str) -> list[str]:
        """Return the names of the modules inside a module, in model order."""
        names = self._all
        begin = end = self._order[module] + 1  # the modules inside a module follow it directly
        while end < len(names) and inside(names[end], module):
            end += 1
        return names[begin:end]

    @cached_property
    def _sorted_names(self) -> list[str]:
        return sorted(self.parameter_of)

    def parameters_inside(self, module: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters in a module, at any depth, by their names relative to it."""
        prefix = f"{module}." if module else ""
        begin = bisect_left(self._sorted_names, prefix)
        names = takewhile(lambda name: name.startswith(prefix), islice(self._sorted_names, begin, None))
        return {name.removeprefix(prefix): self.parameter_of[name].shape for name in names}

    def children(self, module: str) -> list[str]:
        """Return the names of the direct children of a module."""
        return list(self.modules[module].children.values())

    def holds_parameters(self, module: str) -> bool:
        """Return whether a module, or one inside it, has parameters."""
        return module in self._with_parameters


def inspect_model(spec: ParallelSpec, model: nn.Module) -> Inspection:
    """Read what a plan needs to know of a model.

    Args:
        spec: names the attributes of the model's config that have sizes.
        model: a model on any device; only names, shapes, dtypes, ties, ``requires_grad``, code and configs are read.
    """
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ in FOREIGN:  # github.com/bitsandbytes-foundation/bitsandbytes issue 1945
            raise PlanError(
                "fsdp.bitsandbytes",
                f"parameter {name!r} is of bitsandbytes, and FSDP2 would lose its scales and some of its bytes, without an "
                "error; build the model in bfloat16, and for frozen weights in 4 bits see adapter.base (docs/fine-tuning.md)",
            )
    packed = {f"{name}.{own}" for name, module in model.named_modules() for own in getattr(module, PACKED_ATTRIBUTE, ())}
    parameters = tuple(
        ParameterFacts(
            first, tuple(others), tuple(own.shape), NF4 if first in packed else _dtype_of(own), own.requires_grad
        )
        for own, (first, *others) in names_of_parameters(model).items()
    )  # fmt: skip
    modules = dict(model.named_modules())
    configs: dict[int, str] = {}
    for name, module in modules.items():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            configs.setdefault(id(config), name)
    places = {id(module): name for name, module in modules.items()}
    facts = {name: _facts_of(name, module, places) for name, module in modules.items()}
    traces = Traces() if spec.traces is None else spec.traces(model)
    return Inspection(facts, parameters, model_sizes(spec, model), tuple(configs.values()), traces)


def model_sizes(spec: ParallelSpec, model: nn.Module) -> ModelSizes:
    """Read the sizes that limit a layout from the model's config, through the names that the spec gives."""
    sizes = {}
    for field_name, attribute in spec.sizes.items():
        value = getattr(model, "config", None)
        for part in attribute.split("."):
            value = getattr(value, part, None)
        if isinstance(value, int):
            sizes[field_name] = value
    groups = spec.structure is not None and bool(spec.structure.kv_projections)
    declared = spec.tp_styles or (spec.structure is not None and spec.structure.styles)
    return ModelSizes(**sizes, kv_groups=groups, whole_heads=not declared and spec.traces is not None)


def _facts_of(name: str, module: nn.Module, places: Mapping[int, str]) -> ModuleFacts:
    kind = type(module)
    wrapped, unheld = _wrapped(module)
    counts = {own: value for own in (*_HEADS, EXPERTS_ATTRIBUTE) if type(value := getattr(module, own, None)) is int}
    return ModuleFacts(
        name=name,
        kind=kind.__name__,
        parameters={own: tuple(parameter.shape) for own, parameter in module.named_parameters(recurse=False)},
        buffers=tuple(own for own, _ in module.named_buffers(recurse=False)),
        children={own: places[id(child)] for own, child in module._modules.items() if child is not None},
        container=forward_of(kind) is nn.Module.forward,
        embedding=isinstance(module, nn.Embedding),
        transposed=is_transposed(module),
        padding=getattr(module, "padding_idx", None),
        hidden=hidden_argument(module),
        code=_names_of(kind),  # type: ignore[arg-type]  # classes are hashable
        counts=counts,
        has_config=getattr(module, "config", None) is not None,
        wrapped=wrapped,
        unheld=unheld,
        norm=is_norm(module),
    )


def _dtype_of(parameter: torch.Tensor) -> str:
    return str(parameter.dtype).removeprefix("torch.")


def _wrapped(module: nn.Module) -> tuple[str, tuple[str, ...]]:
    """Return whether peft wrapped something here, and what of its wrapping is not carried out with slices."""
    if not hasattr(module, "base_layer"):
        return "", ()
    parts = [getattr(module, name, None) for name in ("base_layer", "lora_A", "lora_B")]
    if not all(isinstance(part, nn.Module) for part in parts) or not isinstance(parts[0], nn.Linear | nn.Embedding):
        return "other", ()
    others = ("lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
    return "adapter", tuple(name for name in others if len(getattr(module, name, ())))


@lru_cache(maxsize=4096)
def _names_of(kind: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of the attributes and globals that the forward of a class, and the methods that it calls, use."""
    names: list[str] = []
    todo: list[Callable[..., object]] = [forward_of(kind)]
    seen: set[str] = set()
    while todo:
        function = inspect.unwrap(todo.pop())
        code = getattr(function, "__code__", None)
        for name in _names_in(code) if isinstance(code, CodeType) else ():
            names.append(name)
            method = inspect.getattr_static(kind, name, None)
            if isinstance(method, FunctionType) and name not in seen and not hasattr(nn.Module, name):
                seen.add(name)
                todo.append(method)
    return tuple(names)


def _names_in(code: CodeType) -> list[str]:
    """Return the names that a function uses, and those that the functions inside it use."""
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names_in(constant)]
    return [*code.co_names, *inner]

"""One forward of a causal language model without values, to read what it does instead of listing what families do.

The model is called with tensors on the meta device: they have shapes, and nothing is computed. What depends on values is
replaced for this call: the attention function with its masks, and mixtures of experts.

Each question about a model has a :class:`Tracer` of its own: which labels tensors have at first, and what operators, attentions
and the borders of modules do with them. It has a forward of its own, too, because most questions change what the model computes
with, and a plan asks few of them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.distributed._torch_compat.repeated_operators import RepeatedOperators
from meshwright.models import _transformers_compat as compat
from meshwright.models.reading.model_code import place_of_error
from meshwright.models.reading.traced_tensors import in_each_place, meta_positions, meta_tensors, prime_length, tensors_in
from meshwright.plan.given.hidden_argument import HIDDEN, forward_of, value_of
from meshwright.plan.given.names import match_names
from meshwright.plan.given.spec import ExpertsRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "RULE",
    "Attention",
    "Inputs",
    "Labels",
    "Operator",
    "Tracer",
    "attributes",
    "first_that_runs",
    "forward",
    "hooked",
    "meta_positions",
    "meta_tensors",
    "prime_length",
    "tensors_in",
    "traced",
]

_NAME = "meshwright_trace"
RULE = "_meshwright_rule"
"""Attribute of a traced mask that holds its rule: (batch, head, query, key) -> bool."""

_ROUTED = {"top_k_index", "top_k_weights"}
"""Names of the arguments that the experts of transformers get beside their hidden state, whatever a family declares of them."""

MASK_DEVICES = ("cpu", "meta", None)
"""The mask devices to try, see :class:`Inputs`: which of them a model can be called with depends on its code."""


# -- tracers -----------------------------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """What a model is called with.

    Attributes:
        tensors: its parameters and buffers, from :func:`meta_tensors`.
        positions: the positions [rows, length].
        mask_device: device of an attention mask of ones. Models ask whether it is all ones, which needs values, or multiply
            with it, which needs none. ``None``: no mask is given.
    """

    tensors: Mapping[str, torch.Tensor]
    positions: torch.Tensor
    mask_device: str | None


class Labels(WeakIdKeyDictionary):
    """A label of each tensor that has one. Tensors are told apart by identity, and none is kept alive."""

    def among(self, tensors: Iterable[torch.Tensor]) -> list[Any]:
        """Return the labels of those tensors that have one."""
        return [self[tensor] for tensor in tensors if tensor in self]

    def put(self, tensors: Iterable[torch.Tensor], label: Any = True) -> None:
        """Give tensors a label."""
        for tensor in tensors:
            self[tensor] = label


class Operator(NamedTuple):
    """An operator that ran, the tensors that it read and made, and the name of the innermost module that was running."""

    function: Any
    args: Any
    kwargs: dict[str, Any]
    tensors: list[torch.Tensor]
    results: list[torch.Tensor]
    module: str

    @property
    def name(self) -> str:
        """The name without namespace and overload."""
        return str(self.function._schema.name.partition("::")[2])

    @property
    def on_meta(self) -> list[torch.Tensor]:
        """The tensors without values among those that it read."""
        return [tensor for tensor in self.tensors if tensor.is_meta]

    @property
    def operands(self) -> dict[str, Any]:
        """All arguments by name, with the defaults of those that were not given."""
        declared = [(argument.name, argument.default_value) for argument in self.function._schema.arguments]
        given = {name: value for (name, _), value in zip(declared, self.args, strict=False)}
        return {**dict(declared), **given, **self.kwargs}


class Attention(NamedTuple):
    """A call of the attention function by a module, and the tensor [batch, token, head, size] that stands for its output."""

    module: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: Any
    options: dict[str, Any]
    output: torch.Tensor


class Tracer:
    """Follows one question through a forward. This one follows nothing: a question overrides what it needs.

    Args:
        inputs: what the model is called with.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs

    def arguments(self) -> dict[str, Any]:
        """Return what the model is called with beside the inputs."""
        return {}

    def functions(self, model: nn.Module, attend: Callable[..., Any]) -> AbstractContextManager[Any]:
        """Inside, attentions and masks are what the tracer follows: by default a function and masks of ours, for all."""
        return _registered(model, attend)

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """At the start of a module: return its new ``(args, kwargs)``, or ``None``."""

    def leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """At the end of a module: return its new output, or ``None``."""

    def operator(self, operator: Operator) -> None:
        """After an operator."""

    def attention(self, call: Attention) -> None:
        """After a call of the attention function."""


R = TypeVar("R", bound=Tracer)


class _Mode(TorchDispatchMode):
    """Tells a tracer what happens in a forward: the only dispatch mode that reads a model."""

    def __init__(self, model: nn.Module, tracer: Tracer) -> None:
        super().__init__()
        self.names = {module: name for name, module in model.named_modules()}
        self.tracer, self.running, self.operators = tracer, [""], RepeatedOperators((torch.Tensor, nn.Parameter))

    def hooks(self) -> Iterator[RemovableHandle]:
        for module, name in self.names.items():
            yield module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
            yield module.register_forward_hook(partial(self._leave, name), with_kwargs=True)

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.running.append(name)
        return self.tracer.enter(name, module, args, kwargs)

    def _leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        self.running.pop()
        return self.tracer.leave(name, module, args, kwargs, output)

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Stand in for the attention function: query [B, heads, S, key size], key and value [B, key/value heads, S, size]."""
        output = query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))
        name = self.names.get(module, type(module).__name__)
        self.tracer.attention(Attention(name, query, key, value, attention_mask, options, output))
        return output, None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.is_view:  # torch knows its shape at once
            result = function(*args, **kwargs)
        else:
            result = self.operators.run(function, args, kwargs, function)
        read, made = tensors_in((args, kwargs)), tensors_in(result)
        self.tracer.operator(Operator(function, args, kwargs, read, made, self.running[-1]))
        return result


# -- the forward -------------------------------------------------------------------------------------------------------------


def traced(
    model: "PreTrainedModel",
    experts: Sequence[ExpertsRule],
    make: Callable[[Inputs], R],
    devices: Sequence[str | None] = MASK_DEVICES,
    *,
    tensors: Mapping[str, torch.Tensor] | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[R | None, str]:
    """Return a tracer after the forward that it followed, or ``None`` and the reason why the model cannot be called.

    Args:
        model: a causal language model, on any device. It is not changed.
        experts: its mixtures, see :func:`forward`.
        make: makes a tracer, for each attempt another one.
        devices: the mask devices to try, in this order.
        tensors: parameters and buffers, by default :func:`meta_tensors`.
        positions: by default one row of a prime length.
    """

    def attempt(device: str | None) -> R:
        given = meta_tensors(model) if tensors is None else tensors
        tracer = make(Inputs(given, meta_positions(prime_length(model)) if positions is None else positions, device))
        forward(model, experts, tracer)
        return tracer

    return first_that_runs(attempt, devices)


def forward(model: "PreTrainedModel", experts: Sequence[ExpertsRule], tracer: Tracer) -> Any:
    """Call a model once, in training mode, with the inputs of a tracer that follows it, and return its output.

    Args:
        model: the model, on any device. It is not changed.
        experts: its mixtures. They return their hidden state, because which experts compute depends on values.
        tracer: what follows it. Masks are tensors without values that carry their rule, see :data:`RULE`.
    """
    tensors, positions, device = tracer.inputs
    shape, mode, modules = tuple(positions.shape), _Mode(model, tracer), dict(model.named_modules())
    mixtures = [modules[name] for rule in experts for name in match_names(rule.pattern, modules)]
    mixtures += [module for module in mode.names if _is_routed(type(module))]  # type: ignore[arg-type]  # classes are hashable
    inputs = {"input_ids": torch.zeros(shape, dtype=torch.long, device="meta"), "position_ids": positions, "use_cache": False}
    if device is not None:
        inputs["attention_mask"] = torch.ones(shape, dtype=torch.long, device=device)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))  # some draw on the host whether a layer is left out
        torch.default_generator.manual_seed(0)
        stack.enter_context(hooked(mode.hooks()))
        stack.enter_context(tracer.functions(model, mode.attend))
        stack.enter_context(attributes((module, {"training": True}) for module in mode.names))  # it may drop attention weights
        stack.enter_context(attributes((module, {"forward": _pass_over}) for module in dict.fromkeys(mixtures)))
        if type(tracer).operator is not Tracer.operator:  # a mode takes time
            stack.enter_context(mode)
        given = {**inputs, **tracer.arguments()}
        return torch.func.functional_call(model, in_each_place(model, tensors), (), given, tie_weights=False)


def first_that_runs(attempt: Callable[[Any], Any], devices: Sequence[str | None] = MASK_DEVICES) -> tuple[Any, str]:
    """Return the result for the first device that raises nothing, or ``None`` and the reason why the first one failed.

    Args:
        attempt: what is tried, called with a mask device.
        devices: the mask devices to try, in this order.
    """
    reasons = []
    for device in devices:
        try:
            return attempt(device), ""
        except Exception as error:  # whatever a model does with tensors that have no values
            reasons.append(f"{type(error).__name__}{place_of_error(error)}: {str(error).strip().partition(chr(10))[0][:200]}")
    # That a mask is on another device than the model is no reason of the model's own.
    return None, next((reason for reason in reasons if "on device" not in reason), reasons[0])


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end."""
    handles = list(handles)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@cache
def _is_routed(kind: type[nn.Module]) -> bool:
    try:
        return {*signature(forward_of(kind)).parameters} >= _ROUTED
    except (TypeError, ValueError):  # it is not Python code
        return False


def _pass_over(*args: Any, **kwargs: Any) -> Any:
    return value_of((0, HIDDEN), args, kwargs, "experts")


@contextmanager
def _registered(model: nn.Module, attend: Callable[..., Any]) -> Iterator[None]:
    """Let every attention of the model call a function, and masks be rules."""
    before = [(config, config._attn_implementation) for config in compat.attention_configs(model)]
    try:
        compat.set_attention(model, _NAME)
        with compat.attention_function(_NAME, attend, _mask):
            yield
    finally:
        for config, name in before:
            config._attn_implementation = name


def _mask(
    mask_function: Callable[..., Any], batch_size: int = 1, q_length: int = 1, kv_length: int = 1, **_: Any
) -> torch.Tensor:
    """Stand in for a mask of transformers: a tensor that carries the rule."""
    mark = torch.empty((batch_size, 1, q_length, kv_length), device="meta")
    setattr(mark, RULE, mask_function)
    return mark


@contextmanager
def attributes(changes: Iterable[tuple[Any, Mapping[str, Any]]]) -> Iterator[None]:
    """Let objects have other values of attributes."""
    changes = [(vars(owner), values) for owner, values in changes]
    before = [{name: own[name] for name in values if name in own} for own, values in changes]
    try:
        for own, values in changes:
            own.update(values)
        yield
    finally:
        for (own, values), old in zip(changes, before, strict=True):
            for name in values.keys() - old.keys():
                del own[name]
            own.update(old)

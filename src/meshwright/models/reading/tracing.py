"""One forward of a causal language model without values, to read what it does instead of listing what families do.

The model is called with tensors on the meta device: they have shapes, and nothing is computed. What depends on values is
replaced for this call: the attention function with its masks, and mixtures of experts.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from meshwright.models import _transformers_compat as compat
from meshwright.plan.given.hidden_argument import HIDDEN, value_of
from meshwright.plan.given.names import match_names
from meshwright.plan.given.spec import ExpertsRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "RULE",
    "TokenDimension",
    "call_on_meta",
    "count_runs",
    "first_that_runs",
    "hooked",
    "meta_positions",
    "meta_tensors",
    "no_attention",
    "prime_length",
]

_NAME = "meshwright_trace"
RULE = "_meshwright_rule"
"""Attribute of a traced mask that holds its rule: (batch, head, query, key) -> bool."""


MASK_DEVICES = ("cpu", "meta", None)
"""The mask devices to try, see :func:`call_on_meta`: which of them a model can be called with depends on its code."""


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end."""
    handles = list(handles)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def meta_positions(length: int, rows: int = 1) -> torch.Tensor:
    """Return the positions [rows, length] of a sequence, without values."""
    return torch.arange(length).to("meta").expand(rows, -1)


def prime_length(model: nn.Module, above: int = 30) -> int:
    """Return a prime above a number that divides no size of a parameter: otherwise features would look like tokens."""
    sizes = {size for parameter in model.parameters() for size in parameter.shape if size}
    primes = (
        number for number in range(above + 1, 1000) if all(number % divisor for divisor in range(2, 32) if divisor < number)
    )
    return next(prime for prime in primes if all(size % prime for size in sizes))


def meta_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a tensor without values for each parameter and buffer, by name; tied parameters are one tensor."""
    named = (model.named_parameters(), model.named_buffers())
    return {name: tensor.detach().to("meta") for some in named for name, tensor in some}


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
            reasons.append(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}")
    return None, reasons[0]


def call_on_meta(
    model: "PreTrainedModel",
    experts: Sequence[ExpertsRule],
    attend: Callable[..., Any],
    tensors: Mapping[str, torch.Tensor],
    positions: torch.Tensor,
    mask_device: str | None,
) -> Any:
    """Call a model once, in training mode, and return its output. The model is not changed.

    Args:
        model: the model, on any device.
        experts: its mixtures. They return their hidden state, because which experts compute depends on values.
        attend: the attention function. Masks are tensors without values that carry their rule, see :data:`RULE`.
        tensors: parameters and buffers, from :func:`meta_tensors`.
        positions: the positions [rows, length].
        mask_device: device of an attention mask of ones. Models ask whether it is all ones, which needs values, or multiply
            with it, which needs none. ``None``: no mask is given.
    """
    shape = tuple(positions.shape)
    inputs = {"input_ids": torch.zeros(shape, dtype=torch.long, device="meta"), "position_ids": positions, "use_cache": False}
    if mask_device is not None:
        inputs["attention_mask"] = torch.ones(shape, dtype=torch.long, device=mask_device)
    with ExitStack() as stack:
        stack.enter_context(_in_training(model))  # where it drops attention weights, if ever
        stack.enter_context(_registered(model, attend))
        stack.enter_context(_passed_over(model, experts))
        return torch.func.functional_call(model, dict(tensors), (), inputs)


def no_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Stand in for the attention function: return a tensor of the shape of its output."""
    batch, heads, tokens, _width = query.shape
    return query.new_empty((batch, tokens, heads, value.shape[3])), None


def count_runs(model: "PreTrainedModel", experts: Sequence[ExpertsRule] = ()) -> dict[str, tuple[int, int]]:
    """Return how often each module runs in one forward on tokens, and how often with gradient.

    A vision tower does not run, and a stack of layers may run twice. What is inside of a mixture is not called. The result is
    empty if the forward cannot be called without values.

    Args:
        model: a causal language model, on any device; it is called with tensors on the meta device, and not changed.
        experts: its mixtures.
    """
    tensors, positions = meta_tensors(model), meta_positions(prime_length(model))

    def counted(device: str | None) -> dict[str, tuple[int, int]]:
        runs = {name: (0, 0) for name, _ in model.named_modules()}

        def count(name: str) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                all_runs, with_gradient = runs[name]
                runs[name] = (all_runs + 1, with_gradient + torch.is_grad_enabled())

            return hook

        with hooked(module.register_forward_pre_hook(count(name)) for name, module in model.named_modules()):
            call_on_meta(model, experts, no_attention, tensors, positions, device)
        return runs

    found, _ = first_that_runs(counted)
    return found or {}


@contextmanager
def _registered(model: nn.Module, attend: Callable[..., Any]) -> Iterator[None]:
    """Let every attention of the model call a function, and masks be rules."""
    before = [(config, config._attn_implementation) for config in compat.attention_configs(model)]
    try:
        compat.set_attention(model, _NAME)
        with compat.attention_function(_NAME, attend, _rule):
            yield
    finally:
        for config, name in before:
            config._attn_implementation = name


def _rule(
    mask_function: Callable[..., Any], batch_size: int = 1, q_length: int = 1, kv_length: int = 1, **_: Any
) -> torch.Tensor:
    """Stand in for a mask of transformers: a tensor that carries the rule."""
    mark = torch.empty((batch_size, 1, q_length, kv_length), device="meta")
    setattr(mark, RULE, mask_function)
    return mark


@contextmanager
def _in_training(model: nn.Module) -> Iterator[None]:
    before = {module: module.training for module in model.modules()}
    try:
        model.train()
        yield
    finally:
        for module, training in before.items():
            module.training = training


@contextmanager
def _passed_over(model: nn.Module, experts: Sequence[ExpertsRule]) -> Iterator[None]:
    modules = dict(model.named_modules())
    mixtures = [modules[name] for rule in experts for name in match_names(rule.pattern, modules)]
    before = [module.__dict__.get("forward") for module in mixtures]
    try:
        for module in mixtures:
            module.forward = lambda *args, **kwargs: value_of((0, HIDDEN), args, kwargs, "experts")
        yield
    finally:
        for module, forward in zip(mixtures, before, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward


_MIXING = ("convolution", "roll", "flip", "_fft", "gru", "lstm", "rnn", "_thnn", "unfold", "_scaled_dot_product")
"""Beginnings of the names of operators that mix along some dimension that is not named in their arguments."""
_LAST_NUMBER = {"sort", "topk", "_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"}
_ALONG_A_DIMENSION = {*_LAST_NUMBER, "gather", "index_select", "scatter", "scatter_add", "select"}
"""Operators whose dimension is the last number among their arguments, or the first."""


class TokenDimension:
    """Finds the dimension of tokens by its size: a prime, or a multiple of it, that no parameter has as a size."""

    def __init__(self, length: int) -> None:
        self.length = length

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether a dimension counts tokens, or tokens times something."""
        return any(map(self._counts, tensor.shape))

    def _counts(self, size: int) -> bool:
        return size > 0 and size % self.length == 0

    def mixed(self, name: str, tensors: list[torch.Tensor], args: Any, results: list[torch.Tensor]) -> bool:
        """Return whether an operator combines or moves the entries of the dimension of tokens."""
        first = tensors[0]
        if not all(map(self.has, results)):  # a sum, a mean, a single token
            return True
        if name.startswith(_MIXING):
            return True
        if name in ("mm", "bmm"):
            return self._counts(first.shape[-1])
        if name in ("addmm", "baddbmm"):
            return len(tensors) > 1 and self._counts(tensors[1].shape[-1])
        if name in _ALONG_A_DIMENSION:
            dims = [item for item in args[1:] if isinstance(item, int) and not isinstance(item, bool)]
            dim = dims[-1] if name in _LAST_NUMBER else dims[0] if dims else 0
            return bool(dims) and -first.ndim <= dim < first.ndim and self._counts(first.shape[dim])
        if name == "index":
            return any(
                index is not None and dim < first.ndim and self._counts(first.shape[dim]) for dim, index in enumerate(args[1])
            )
        if name == "native_layer_norm":
            return any(map(self._counts, args[1]))
        if name == "constant_pad_nd":
            padded = [first.ndim - 1 - place // 2 for place, size in enumerate(args[1]) if size]
            return any(self._counts(first.shape[dim]) for dim in padded)
        # The head may take the last tokens alone (logits_to_keep); here it takes all.
        return name == "slice" and sum(map(self._counts, first.shape)) != sum(map(self._counts, results[0].shape))

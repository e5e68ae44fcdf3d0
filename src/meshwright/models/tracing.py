"""One forward of a causal language model without values, to read what it does instead of listing what families do.

The model is called with tensors on the meta device: they have shapes, and nothing is computed. What depends on values is
replaced for this call: the attention function with its masks, and mixtures of experts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright.models import _transformers_compat as compat
from meshwright.plan.names import match_names
from meshwright.plan.spec import ExpertsRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["RULE", "call_on_meta", "first_that_runs", "meta_tensors", "prime_length"]

_NAME = "meshwright_trace"
RULE = "_meshwright_rule"
"""Attribute of a traced mask that holds its rule: (batch, head, query, key) -> bool."""


def prime_length(model: nn.Module) -> int:
    """Return a prime that divides no size of a parameter: otherwise features would look like tokens."""
    sizes = {size for parameter in model.parameters() for size in parameter.shape if size}
    primes = (number for number in range(31, 1000) if all(number % divisor for divisor in range(2, 32) if divisor < number))
    return next(prime for prime in primes if all(size % prime for size in sizes))


def meta_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a tensor without values for each parameter and buffer, by name; tied parameters are one tensor."""
    named = (model.named_parameters(), model.named_buffers())
    return {name: tensor.detach().to("meta") for some in named for name, tensor in some}


def first_that_runs(attempts: Sequence[Callable[[], Any]]) -> tuple[Any, str]:
    """Return the result of the first attempt that raises nothing, or ``None`` and the reason why the first one failed."""
    reasons = []
    for attempt in attempts:
        try:
            return attempt(), ""
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
) -> None:
    """Call a model once, in training mode. The model is not changed.

    Args:
        model: the model, on any device.
        experts: its mixtures. They return their hidden state, because which experts compute depends on values.
        attend: the attention function. Masks are tensors without values that carry their rule, see :data:`RULE`.
        tensors: parameters and buffers, from :func:`meta_tensors`.
        positions: the positions [1, length].
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
        stack.enter_context(torch.no_grad())
        torch.func.functional_call(model, dict(tensors), (), inputs)


@contextmanager
def _registered(model: nn.Module, attend: Callable[..., Any]) -> Iterator[None]:
    """Let every attention of the model call a function, and masks be rules."""
    own: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in own if hasattr(config, "_attn_implementation")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation = _NAME
        with compat.attention_function(_NAME, attend, _rule):
            yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


def _rule(mask_function: Callable[..., Any], q_length: int = 1, kv_length: int = 1, **_: Any) -> torch.Tensor:
    """Stand in for a mask of transformers: a tensor that carries the rule."""
    mark = torch.empty((1, 1, q_length, kv_length), device="meta")
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
            module.forward = lambda hidden, *_, **__: hidden
        yield
    finally:
        for module, forward in zip(mixtures, before, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward

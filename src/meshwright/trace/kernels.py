"""What kernels of a device keep for backward, where those of a CPU keep something else.

Attention: a device keeps queries, keys, values, its output, and a logarithm for each query and head (Dao et al. 2022, arXiv
2205.14135, section 3.1). A CPU does so only where keys and values have heads of equal width and nothing is dropped. A mask that
torch's own attention is given as a tensor is kept too, for each call: one of booleans is made into numbers of the dtype of the
queries first, whatever kernel computes with it (``convert_boolean_attn_mask`` in torch's attention.cpp).

``rms_norm``: a device keeps its input, its weight and the reciprocal root for each token (``_fused_rms_norm`` in torch's
derivatives.yaml). A CPU takes it apart, and keeps copies in fp32. The norms that transformers writes out are the same on both,
and so are layer norms, losses and grouped products, which are one operator each.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.distributed import _torch_compat
from meshwright.distributed.context import attention_kernels as kernels
from meshwright.distributed.context.attention_kernels import AttentionRule
from meshwright.models import _transformers_compat

__all__ = ["device_kernels", "opaque_kernels", "report_attention"]

FUSED = ("flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Attention implementations of transformers that are one kernel, beside sdpa."""

_REPORTS: list[Any] = []

_OPAQUE: list[None] = []
"""Not empty: attention is one operator."""


@contextmanager
def report_attention(report: Any) -> Iterator[None]:
    """Inside, ``report(operations, backward)`` is called for each attention that :func:`device_kernels` stands in for."""
    _REPORTS.append(report)
    try:
        yield
    finally:
        _REPORTS.pop()


@contextmanager
def opaque_kernels() -> Iterator[None]:
    """Inside, attention (of :func:`device_kernels`) and collectives are operators with all that they read and keep."""
    before = [(room, name, getattr(room, name)) for room, names in _COLLECTIVES for name in names]
    _OPAQUE.append(None)
    for room, name, _ in before:
        setattr(room, name, _collective)
    try:
        yield
    finally:
        _OPAQUE.pop()
        for room, name, known in before:
            setattr(room, name, known)


_COLLECTIVES: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (dist, ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")),
    (_torch_compat, ("all_gather_single", "reduce_scatter_single")),
)
"""Collectives by their modules. The first tensor is what they write, the second one, if there is one, what they read."""


@torch.library.custom_op("meshwright::collective", mutates_args=())
def _opaque_collective(given: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return given.new_empty(shape)


_opaque_collective.register_fake(lambda given, shape: given.new_empty(shape))


def _collective(output: torch.Tensor, given: Any = None, *_: Any, **__: Any) -> None:
    output.copy_(_opaque_collective(given if isinstance(given, torch.Tensor) else output, output.shape))


def _outputs(query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, tokens, _ = query.shape
    output = query.new_empty((batch, tokens, heads, value.shape[-1])).transpose(1, 2)  # so a kernel leaves it in memory
    return output, query.new_empty(query.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("meshwright::attention", mutates_args=())
def _opaque_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs(query, value)


@torch.library.custom_op("meshwright::attention_backward", mutates_args=())
def _opaque_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor,
    normalizer: torch.Tensor, mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


_opaque_forward.register_fake(lambda query, key, value, mask: _outputs(query, value))
_opaque_backward.register_fake(lambda _, query, key, value, *more: tuple(map(torch.empty_like, (query, key, value))))


class _Attention(torch.autograd.Function):
    """Attention without values: a tensor of the shape of its output, and what a kernel keeps."""

    @staticmethod
    def forward(
        context: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, causal: bool,
        window: int | None, mask: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        if mask is not None and mask.dtype is torch.bool:
            mask = torch.empty_like(mask, dtype=query.dtype)
        output, normalizer = _opaque_forward(query, key, value, mask) if _OPAQUE else _outputs(query, value)
        context.save_for_backward(query, key, value, output, normalizer, mask)
        context.sinks, keys = sinks, key.shape[-2]
        context.scores = math.prod(query.shape[:-1]) * keys // (2 if causal else 1)
        if window is not None and window < keys:  # the first queries of a sequence see fewer keys
            context.scores = math.prod(query.shape[:-1]) * window - query.shape[:-2].numel() * window**2 // 2
        _tell(2 * context.scores * (query.shape[-1] + value.shape[-1]))
        return output

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, *more = context.saved_tensors
        _tell(2 * context.scores * (3 * query.shape[-1] + 2 * value.shape[-1]))  # Dao 2023, arXiv 2307.08691, section 3.1
        sinks_gradient = None if context.sinks is None else torch.empty_like(context.sinks)
        if _OPAQUE:
            return (*_opaque_backward(gradient, query, key, value, *more), sinks_gradient, None, None, None)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), sinks_gradient, None, None, None


class _RMSNorm(torch.autograd.Function):
    """A norm without values, which reads and writes what a kernel does."""

    @staticmethod
    def forward(context: Any, hidden: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        root = hidden.new_empty((*hidden.shape[:-1], 1), dtype=torch.promote_types(hidden.dtype, torch.float32))
        context.save_for_backward(hidden, weight, root)
        return hidden.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden, weight, _ = context.saved_tensors
        return gradient + hidden, None if weight is None else torch.empty_like(weight)


def _tell(operations: int) -> None:
    for report in _REPORTS:
        report(operations)


@contextmanager
def device_kernels(kernel: str, *, causal: bool) -> Iterator[None]:
    """Inside, attention and norms keep what they keep on a device. Nothing is computed.

    Args:
        kernel: the model's attention implementation.
        causal: whether a kernel that is given a mask as a tensor computes half of the scores.
    """
    before = nn.functional.scaled_dot_product_attention

    def attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        output: torch.Tensor = _Attention.apply(query, key, value, None, causal or is_causal, None, attn_mask)
        return output

    def rms_norm(hidden: torch.Tensor, shape: Any, weight: torch.Tensor | None = None, eps: float | None = None) -> Any:
        return _RMSNorm.apply(hidden, weight)

    flex, flash, norm = kernels._flex, kernels._flash, nn.functional.rms_norm
    nn.functional.rms_norm = rms_norm  # type: ignore[assignment]
    nn.functional.scaled_dot_product_attention = attention
    kernels._flex = kernels._flash = _context_parallel_attention
    try:
        with ExitStack() as stack:
            for name in {*FUSED, kernel} - {"eager", "sdpa"}:
                stack.enter_context(_transformers_compat.attention_function(name, _model_attention, lambda *_, **__: None))
            yield
    finally:
        nn.functional.scaled_dot_product_attention = before
        kernels._flex, kernels._flash, nn.functional.rms_norm = flex, flash, norm


def _model_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None,
    sliding_window: int | None = None, is_causal: bool | None = None, s_aux: torch.Tensor | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Stand in for a kernel that skips what its mask leaves out, as transformers calls it."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    output: torch.Tensor = _Attention.apply(query, key, value, s_aux, causal, sliding_window)
    return output.transpose(1, 2).contiguous(), None


def _context_parallel_attention(
    rule: AttentionRule, sequences: Any, pieces: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Stand in for the same under context parallel: a rank's queries see half of the keys on average."""
    output: torch.Tensor = _Attention.apply(query, key, value, sinks, rule.causal, rule.window)
    return output

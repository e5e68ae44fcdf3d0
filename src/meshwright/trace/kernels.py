"""What kernels of a device keep for backward, where those of a CPU keep something else.

Attention: a device keeps queries, keys, values, its output, and a logarithm for each query and head (Dao et al. 2022, arXiv
2205.14135, section 3.1). A CPU does so only where keys and values have heads of equal width and nothing is dropped.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["device_kernels", "report_attention"]

_REPORTS: list[Any] = []


@contextmanager
def report_attention(report: Any) -> Iterator[None]:
    """Inside, ``report(operations, backward)`` is called for each attention that :func:`device_kernels` stands in for."""
    _REPORTS.append(report)
    try:
        yield
    finally:
        _REPORTS.pop()


class _Attention(torch.autograd.Function):
    """Attention without values: a tensor of the shape of its output, and what a kernel keeps."""

    @staticmethod
    def forward(context: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> torch.Tensor:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        normalizer = query.new_empty(query.shape[:-1], dtype=torch.float32)
        context.save_for_backward(query, key, value, output, normalizer)
        context.scores = math.prod(query.shape[:-1]) * key.shape[-2] // (2 if causal else 1)
        _tell(2 * context.scores * (query.shape[-1] + value.shape[-1]))
        return output

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, *_ = context.saved_tensors
        _tell(2 * context.scores * (3 * query.shape[-1] + 2 * value.shape[-1]))  # Dao 2023, arXiv 2307.08691, section 3.1
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _tell(operations: int) -> None:
    for report in _REPORTS:
        report(operations)


@contextmanager
def device_kernels(*, causal: bool) -> Iterator[None]:
    """Inside, attention keeps what it keeps on a device. Nothing is computed.

    Args:
        causal: whether half of the scores are computed.
    """
    before = nn.functional.scaled_dot_product_attention

    def attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        output: torch.Tensor = _Attention.apply(query, key, value, causal or is_causal)
        return output

    nn.functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = before

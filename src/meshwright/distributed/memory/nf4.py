"""Frozen matrices in 4 bits: NF4 (Dettmers et al. 2023, QLoRA, arXiv 2305.14314, appendix E), in blocks of 64 numbers.

A matrix [..., n] is stored as bytes [..., n / 64, 36]: for each block of its last dimension 32 bytes with two codes each, the
first one in the high bits, then the largest magnitude of the block in fp32. So a slice of the matrix is a slice of the bytes,
in the same dimension, if it cuts no block. FSDP2 gathers bytes as they are, 4.5 bits for a number. And a matrix has the same
codes on every layout.

Products take the matrix from its bytes when they need it, in forward and again in backward, and keep only the bytes.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.distributed.mesh import ParallelMesh
from meshwright.distributed.slices import replace_parameter
from meshwright.plan.given.options import NF4_BLOCK
from meshwright.plan.result.program import Pack

__all__ = [
    "dequantize",
    "grouped_product",
    "is_packed",
    "pack",
    "packed_like",
    "product",
    "quantize",
    "unpacked_like",
]

CODES = NF4_BLOCK // 2
"""Bytes of the codes of a block."""

LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The 16 numbers: quantiles of the normal distribution, scaled to [-1, 1], with an exact zero."""


def is_packed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has the bytes of a matrix."""
    return tensor.dtype == torch.uint8


def quantize(matrix: torch.Tensor) -> torch.Tensor:
    """Return the bytes [..., n / 64, 36] of a matrix [..., n], whose last dimension is a multiple of 64."""
    if matrix.is_meta:
        return matrix.new_empty(packed_shape(matrix.shape), dtype=torch.uint8)
    wide = matrix.detach().to(torch.promote_types(matrix.dtype, torch.float32)).unflatten(-1, (-1, NF4_BLOCK))
    largest = wide.abs().amax(-1, keepdim=True).float()
    scaled = wide / largest.to(wide.dtype).clamp(min=torch.finfo(torch.float32).tiny)
    levels = torch.tensor(LEVELS, dtype=wide.dtype, device=matrix.device)
    codes = torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
    return torch.cat([codes[..., ::2] << 4 | codes[..., 1::2], largest.view(torch.uint8)], dim=-1)


def packed_shape(shape: torch.Size) -> tuple[int, ...]:
    """Return the shape of the bytes of a matrix."""
    return (*shape[:-1], shape[-1] // NF4_BLOCK, CODES + torch.float32.itemsize)


@torch.library.custom_op("meshwright::dequantize_nf4", mutates_args=())
def dequantize(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix [..., n] of bytes [..., n / 64, 36], with a kernel of bitsandbytes on a GPU where there is one."""
    codes = packed[..., :CODES].contiguous()
    largest = packed[..., CODES:].contiguous().view(torch.float32)
    shape = (*packed.shape[:-2], packed.shape[-2] * NF4_BLOCK)
    if packed.is_cuda and dtype != torch.float64 and find_spec("bitsandbytes") is not None:
        from bitsandbytes.functional import dequantize_4bit  # type: ignore[import-not-found]

        out = torch.empty(shape, dtype=dtype, device=packed.device)
        return dequantize_4bit(codes.view(-1, 1), absmax=largest.flatten(), out=out, blocksize=NF4_BLOCK, quant_type="nf4")
    pairs = _pairs(torch.promote_types(dtype, torch.float32), packed.device)
    numbers = nn.functional.embedding(codes.to(torch.int32), pairs).flatten(-2)
    return (numbers * largest.to(pairs.dtype)).to(dtype).view(shape)


@cache  # a copy from the host, for which it waits: once, and not for each matrix of each forward and backward
def _pairs(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the two numbers of each byte, [256, 2]."""
    levels = torch.tensor(LEVELS, dtype=dtype, device=device)
    return torch.cartesian_prod(levels, levels)


@dequantize.register_fake
def _(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return packed.new_empty((*packed.shape[:-2], packed.shape[-2] * NF4_BLOCK), dtype=dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, turned: bool) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.turned = turned
        matrix = dequantize(packed, rows.dtype)
        return nn.functional.linear(rows, matrix.mT if turned else matrix, bias)  # rounds once

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor | None, None]:
        (gradient,) = gradients
        matrix = dequantize(ctx.saved_tensors[0], gradient.dtype)
        bias_gradient = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return gradient @ (matrix.mT if ctx.turned else matrix), None, bias_gradient, None


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, packed: torch.Tensor, offsets: torch.Tensor, turned: bool) -> torch.Tensor:
        ctx.save_for_backward(packed, offsets)
        ctx.turned = turned
        matrices = dequantize(packed, rows.dtype)
        return nn.functional.grouped_mm(rows, matrices if turned else matrices.mT, offs=offsets)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,), (packed, offsets) = gradients, ctx.saved_tensors
        matrices = dequantize(packed, gradient.dtype)
        return nn.functional.grouped_mm(gradient, matrices.mT if ctx.turned else matrices, offs=offsets), None, None, None


def product(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, turned: bool) -> torch.Tensor:
    """Return W x + b of each row, [..., out].

    Args:
        rows: [..., in].
        packed: bytes of W, [out, in], or [in, out] if ``turned``. It gets no gradient.
        bias: b, [out]; ``None``: none.
        turned: see ``packed``.
    """
    result: torch.Tensor = _Product.apply(rows, packed, bias, turned)
    return result


def grouped_product(rows: torch.Tensor, packed: torch.Tensor, offsets: torch.Tensor, turned: bool) -> torch.Tensor:
    """Return W x of each row, where each group of rows has a matrix of its own.

    Args:
        rows: [rows, in], group after group.
        packed: bytes of the matrices, [groups, out, in], or [groups, in, out] if ``turned``. They get no gradient.
        offsets: [groups], where each group ends, int32.
        turned: see ``packed``.
    """
    result: torch.Tensor = _GroupedProduct.apply(rows, packed, offsets, turned)
    return result


def with_local(like: torch.Tensor, local: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return a tensor that is placed as another one, with another local tensor and another global shape."""
    if not isinstance(like, DTensor):
        return local
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)


def packed_like(matrix: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a matrix, of which each rank may have a slice."""
    local = matrix.to_local() if isinstance(matrix, DTensor) else matrix
    return with_local(matrix, quantize(local), torch.Size(packed_shape(matrix.shape)))


def unpacked_like(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without values that has the shape, and is placed as, the matrix of bytes."""

    def shape_of(tensor: torch.Tensor) -> torch.Size:
        return torch.Size((*tensor.shape[:-2], tensor.shape[-2] * NF4_BLOCK))

    local = packed.to_local() if isinstance(packed, DTensor) else packed
    return with_local(packed, torch.empty(shape_of(local), dtype=dtype, device="meta"), shape_of(packed))


def pack(model: nn.Module, action: Pack, mesh: ParallelMesh) -> None:
    """Store a parameter as bytes: of its values, or without values if it is on the meta device."""
    parameter = model.get_parameter(action.names[0])
    replace_parameter(model, action.names, nn.Parameter(packed_like(parameter.data), requires_grad=False))

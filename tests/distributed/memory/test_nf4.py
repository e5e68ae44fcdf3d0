"""NF4: which number a code means, that slices have the codes of the whole, and products that keep only bytes."""

import itertools
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from meshwright.distributed.memory.nf4 import LEVELS, dequantize, grouped_product, product, quantize

BYTES_OF_64 = 36


def drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_each_number_becomes_the_nearest_level_of_its_block() -> None:
    matrix = drawn(5, 192)
    packed = quantize(matrix)
    assert packed.shape == (5, 3, BYTES_OF_64)
    assert packed.dtype == torch.uint8
    found = dequantize(packed, torch.float64)
    for row, block in itertools.product(range(5), range(3)):
        values = matrix[row, 64 * block : 64 * (block + 1)]
        levels = torch.tensor(LEVELS, dtype=torch.float64) * values.abs().max().float().double()
        nearest = levels[(values[:, None] - levels).abs().argmin(dim=1)]
        torch.testing.assert_close(found[row, 64 * block : 64 * (block + 1)], nearest)


def test_the_bytes_have_two_codes_each_and_the_scale_in_fp32() -> None:
    """As kernels for NF4 expect them: the first of two codes is in the high bits."""
    (packed,) = quantize(torch.tensor([[-2.0, 2.0, 0.0, 1.0] * 16]))
    assert packed[0, :2].tolist() == [0x0F, 7 << 4 | 12]  # 0.5 is nearest to 0.44
    assert packed[0, 32:].view(torch.float32).item() == 2.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_levels_and_zeros_are_exact(dtype: torch.dtype) -> None:
    block = torch.tensor(LEVELS, dtype=dtype).repeat(4)
    matrix = torch.stack([block, 4 * block, torch.zeros_like(block)])
    levels = torch.tensor(LEVELS).to(dtype).repeat(4)
    assert torch.equal(dequantize(quantize(matrix), dtype), torch.stack([levels, 4 * levels, 0 * levels]))


def test_slices_have_the_codes_of_the_whole() -> None:
    matrix = drawn(4, 6, 256)
    whole = quantize(matrix)
    assert torch.equal(quantize(matrix[1:3]), whole[1:3])
    assert torch.equal(quantize(matrix[:, 2:5]), whole[:, 2:5])
    assert torch.equal(quantize(matrix[..., 64:192]), whole[..., 1:3, :])


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_products_are_those_of_the_matrix_and_keep_only_bytes(grouped: bool, turned: bool) -> None:
    dtype = torch.float32 if grouped else torch.float64
    packed = quantize(drawn(3, 64, 128) if grouped else drawn(64, 128))
    matrix = dequantize(packed, dtype)
    matrix = matrix if turned else matrix.mT  # [in, out]
    rows = drawn(10, matrix.shape[-2], dtype=dtype, seed=1).requires_grad_()
    offsets = torch.tensor([4, 4, 10], dtype=torch.int32)
    upstream = drawn(10, matrix.shape[-1], dtype=dtype, seed=2)
    bias = drawn(matrix.shape[-1], dtype=dtype, seed=3).requires_grad_()
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> Any:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        found = grouped_product(rows, packed, offsets, turned) if grouped else product(rows, packed, bias, turned)
    assert {tensor.dtype for tensor in kept} == ({torch.uint8, torch.int32} if grouped else {torch.uint8})
    (gradient,) = torch.autograd.grad(found, rows, upstream, retain_graph=True)
    if grouped:
        groups = [0] * 4 + [2] * 6
        expected = torch.stack([row @ matrix[group] for row, group in zip(rows, groups, strict=True)])
    else:
        expected = rows @ matrix + bias
        torch.testing.assert_close(torch.autograd.grad(found, bias, upstream, retain_graph=True)[0], upstream.sum(0))
    (truth,) = torch.autograd.grad(expected, rows, upstream)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, truth)


def test_the_levels_are_brought_to_a_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from the host makes it wait for the device, so there is none in a step."""
    packed, rows = quantize(drawn(64, 128)), drawn(3, 128, dtype=torch.float32).requires_grad_()
    product(rows, packed, None, turned=False).sum().backward()
    made: list[tuple[Any, ...]] = []
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *args, **kwargs: made.append(args) or tensor(*args, **kwargs))
    product(rows, packed, None, turned=False).sum().backward()
    assert not made

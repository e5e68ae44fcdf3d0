"""The bytes that operators move, the operations of products, and what stands in for the kernels of a device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.trace.kernels import device_kernels, report_attention
from meshwright.trace.work import Work, WorkCounter

ROWS, WIDE, FEW = 64, 32, 8
LARGE = torch.zeros(ROWS, WIDE)
INDEX = torch.zeros(FEW, dtype=torch.long)
OF_ROW = 4 * WIDE


def counted(run: Callable[[], Any]) -> dict[Work, int]:
    with WorkCounter() as counter:
        counter.begin("here")
        run()
    return counter.moments["here"]


@pytest.mark.parametrize(
    ("run", "moved"),
    [
        (lambda: torch.empty(ROWS, WIDE), 0),
        (lambda: LARGE.new_empty((ROWS, WIDE)), 0),
        (lambda: LARGE.view(-1).detach(), 0),
        (lambda: LARGE.new_zeros((ROWS, WIDE)), ROWS * OF_ROW),
        (lambda: torch.zeros_like(LARGE), ROWS * OF_ROW),
        (lambda: LARGE + LARGE, 3 * ROWS * OF_ROW),
        (lambda: LARGE.add_(LARGE), 3 * ROWS * OF_ROW),
        (lambda: LARGE + LARGE[0].expand(ROWS, -1), 3 * ROWS * OF_ROW),
        (lambda: LARGE + torch.zeros(1).expand(ROWS, WIDE), 2 * ROWS * OF_ROW + 8),
        (lambda: LARGE.clone().copy_(LARGE), 4 * ROWS * OF_ROW),
        (lambda: LARGE[INDEX], FEW * 8 + 2 * FEW * OF_ROW),
        (lambda: nn.functional.embedding(INDEX, LARGE), FEW * 8 + 2 * FEW * OF_ROW),
        (lambda: LARGE.index_add_(0, INDEX, LARGE[:FEW].clone()), 2 * FEW * OF_ROW + 3 * (FEW * 8 + FEW * OF_ROW)),
    ],
)
def test_bytes(run: Callable[[], Any], moved: int) -> None:
    assert counted(run)[Work.MOVED] == moved


def test_products_are_told_apart_by_dtype() -> None:
    wide, narrow = counted(lambda: LARGE @ LARGE.T), counted(lambda: LARGE.bfloat16() @ LARGE.bfloat16().T)
    assert wide[Work.PRODUCTS_FP32] == narrow[Work.PRODUCTS] == 2 * ROWS * ROWS * WIDE
    assert wide[Work.PRODUCTS] == narrow[Work.PRODUCTS_FP32] == 0
    assert counted(lambda: (LARGE + 1).view(-1))[Work.STARTED] == 1


def test_a_product_with_an_adapter_is_thin() -> None:
    """It has about as many operations for a byte as the adapter's rank; a wide one, or one in fp32, is not thin."""
    rows, wide, rank = torch.zeros(2048, 1024), torch.zeros(1024, 1024), torch.zeros(1024, 16)
    thin = counted(lambda: rows.bfloat16() @ rank.bfloat16())
    assert thin[Work.THIN] == thin[Work.PRODUCTS] == 2 * 2048 * 1024 * 16
    assert thin[Work.THIN_MOVED] == 2 * (2048 * 1024 + 1024 * 16 + 2048 * 16)
    for run in (lambda: rows.bfloat16() @ wide.bfloat16(), lambda: rows @ rank):
        assert counted(run)[Work.THIN_MOVED] == 0


@pytest.mark.parametrize("window", [None, 16, 100])
def test_a_window_leaves_less_to_compute(window: int | None) -> None:
    """transformers gives kernels beside sdpa the window of a layer; its mask is not made."""
    from transformers import AttentionInterface, AttentionMaskInterface

    operations: list[int] = []
    attend = AttentionInterface()["flex_attention"]
    sinks = torch.zeros(2, requires_grad=True)
    query = torch.zeros(1, 2, 64, 16, requires_grad=True)
    with device_kernels("flex_attention", causal=False), report_attention(operations.append):
        assert AttentionMaskInterface()["flex_attention"](batch_size=1) is None
        output, _ = AttentionInterface()["flex_attention"](
            nn.Module(), query, query[:, :1], query[:, :1], None, sliding_window=window, s_aux=sinks
        )
        output.sum().backward()
    assert output.shape == (1, 64, 2, 16)
    scores = 2 * (64 * 16 - 16**2 // 2 if window == 16 else 64 * 64 // 2)
    assert operations == [2 * scores * 32, 2 * scores * 5 * 16]
    assert sinks.grad is not None
    assert AttentionInterface()["flex_attention"] is attend


def test_a_fused_norm_keeps_its_input_and_a_number_for_each_token() -> None:
    norm, hidden = nn.RMSNorm(WIDE, dtype=torch.bfloat16), torch.zeros(ROWS, WIDE, dtype=torch.bfloat16, requires_grad=True)

    def kept() -> int:
        sizes = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: sizes.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()) and tensor,
            lambda tensor: tensor,
        ):
            norm(hidden).sum().backward()
        return sum(sizes.values())

    here = kept()
    with device_kernels("sdpa", causal=False):
        there = kept()
    assert there == hidden.nbytes + norm.weight.nbytes + 4 * ROWS < here
    assert norm.weight.grad is not None

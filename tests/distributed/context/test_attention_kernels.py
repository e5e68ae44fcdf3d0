"""What each kernel is told of a mask, against attention written out."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshwright.distributed.context.attention_kernels import AttentionRule, _segments, _tiles, attention
from meshwright.distributed.context.sequences import Sequences
from meshwright.errors import UnsupportedError
from meshwright.plan.axes.context.sharing import positions_of
from meshwright.plan.given.closed_choices import ContextBalance
from tests.distributed.context.test_attend import CASES, drawn, positions_of_documents, written_out

PIECES = {"whole": (range(32),), "zigzag": positions_of(32, 4, ContextBalance.ZIGZAG, 1)}
FLASH = {name: case for name, case in CASES.items() if not case.get("sinks") and not case.get("prefix")}


def sequences_of_case(case: dict[str, Any]) -> Sequences:
    positions = positions_of_documents(*case["documents"])
    return Sequences.of(positions, positions < 6 if case.get("prefix") else None)


def computed(kernel: str, case: dict[str, Any], pieces: tuple[range, ...], tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The output [batch, queries, heads, value size] of the queries of some pieces."""
    rule = AttentionRule(kernel, case.get("causal", True), case.get("window"), 0.3, case.get("softcap"))
    own = torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces])
    sinks = tensors["sinks"] if case.get("sinks") else None
    query = tensors["query"][:, :, own]
    return attention(rule, sequences_of_case(case), pieces, query, tensors["key"], tensors["value"], sinks).transpose(1, 2)


def of_pieces(output: torch.Tensor, pieces: tuple[range, ...]) -> torch.Tensor:
    return torch.cat([output[:, piece.start : piece.stop] for piece in pieces], dim=1)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize("name", CASES)
def test_flex_forward_is_attention_written_out(name: str, pieces: tuple[range, ...]) -> None:
    case, tensors = CASES[name], drawn(CASES[name])
    with torch.no_grad():
        output = computed("flex_attention", case, pieces, tensors)
    torch.testing.assert_close(output, of_pieces(written_out(case, tensors), pieces), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("window", "causal"), [(None, True), (150, True), (None, False)])
def test_tiles_of_flex_are_those_that_a_query_sees(window: int | None, causal: bool) -> None:
    """A tile that is left out of the block mask has no pair of the mask, and each other tile has one."""
    length, size = 1024, 128
    rule = AttentionRule("flex_attention", causal, window, 1.0)
    sequences = Sequences.of(positions_of_documents((300, 724), (1000, 24)))
    pieces = positions_of(length, 2, ContextBalance.ZIGZAG, 1)
    tiles = _tiles(rule, sequences, pieces, torch.device("cpu"))
    masks = [sequences.mask(piece, range(length), causal, window, torch.device("cpu")) for piece in pieces]
    mask = torch.cat([item.expand(2, 1, len(piece), length) for item, piece in zip(masks, pieces, strict=True)], dim=2)
    expected = mask.unflatten(3, (-1, size)).unflatten(2, (-1, size)).any(dim=5).any(dim=3)
    assert torch.equal(tiles.to_dense().bool(), expected)
    assert not expected.all()
    assert tiles is _tiles(rule, sequences, pieces, torch.device("cpu")), "made again for each layer"


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float = 1.0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    """What flash_attn documents of `flash_attn_varlen_func`, written out: a mask ends at the last query and the last key."""
    outputs = []
    bounds = [cu_seqlens_q.tolist(), cu_seqlens_k.tolist()]
    assert all(item.dtype == torch.int32 for item in (cu_seqlens_q, cu_seqlens_k))
    assert [item[-1] for item in bounds] == [len(q), len(k)]
    assert [max_seqlen_q, max_seqlen_k] == [max(b - a for a, b in itertools.pairwise(item)) for item in bounds]
    for index in range(len(bounds[0]) - 1):
        query, key, value = (
            item[bounds[of][index] : bounds[of][index + 1]].transpose(0, 1) for item, of in ((q, 0), (k, 1), (v, 1))
        )
        key, value = (item.repeat_interleave(len(query) // len(item), dim=0) for item in (key, value))
        scores = query @ key.transpose(1, 2) * softmax_scale
        scores = torch.tanh(scores / softcap) * softcap if softcap else scores
        distance = torch.arange(query.shape[1])[:, None] + key.shape[1] - query.shape[1] - torch.arange(key.shape[1])
        seen = torch.ones_like(distance, dtype=torch.bool)
        if causal:
            seen &= distance >= 0
        if window_size[0] >= 0:
            seen &= distance <= window_size[0]
        outputs.append((scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value).transpose(0, 1))
    return torch.cat(outputs)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """A flash kernel for CPUs, where transformers looks for the one of flash_attn."""
    from transformers import modeling_flash_attention_utils as utils

    monkeypatch.setattr(utils, "_lazy_imports", lambda *_, **__: (None, varlen, None, None, None))
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    return varlen


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize("name", FLASH)
def test_segments_of_flash_give_attention_and_its_gradients(name: str, pieces: tuple[range, ...]) -> None:
    case = CASES[name]
    both = []
    for compute in (
        lambda leaves: computed("flash_attention_2", case, pieces, leaves),
        lambda leaves: of_pieces(written_out(case, leaves), pieces),
    ):
        leaves = {key: value.clone().requires_grad_() for key, value in drawn(case).items()}
        output = compute(leaves)
        output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
        both.append([output.detach(), *(leaves[key].grad for key in ("query", "key", "value"))])
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_a_segment_ends_at_its_last_query_and_begins_at_its_document_or_window() -> None:
    sequences = Sequences.of(positions_of_documents((11, 21), (32,)))
    pieces = (range(8, 16), range(24, 32))
    rule = AttentionRule("flash_attention_2", True, 6, 1.0)
    assert _segments(rule, sequences, pieces, 0) == [
        (0, range(8, 11), range(3, 11)),
        (0, range(11, 16), range(11, 16)),
        (0, range(24, 32), range(19, 32)),
    ]
    assert _segments(rule, sequences, pieces, 1) == [(1, range(8, 16), range(3, 16)), (1, range(24, 32), range(19, 32))]


@pytest.mark.parametrize("name", ["sinks", "a prefix that sees itself"])
def test_what_flash_cannot_compute_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"flash_attention_2 has no {name}; legal are sdpa, eager and flex_attention"):
        computed("flash_attention_2", CASES[name], PIECES["whole"], drawn(CASES[name]))

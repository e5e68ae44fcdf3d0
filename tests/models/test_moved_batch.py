"""What the host knows of positions on a device: the same answers as transformers', without a question to the device."""

from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.models._transformers_compat import find_documents
from meshwright.models.moved_batch import move_batch
from meshwright.models.token_loss import forward_logits
from tests.tiny import tiny_model

CPU = torch.device("cpu")
PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5, 6, 7]])
WHOLE = torch.arange(8).expand(2, 8).contiguous()


class Questions(TorchDispatchMode):
    """Counts operators whose result the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.asked += operator in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
        return operator(*args, **(kwargs or {}))


def moved(positions: torch.Tensor) -> dict[str, torch.Tensor]:
    ids = torch.arange(positions.numel()).view_as(positions) % 60 + 3
    return move_batch({"input_ids": ids, "position_ids": positions.clone()}, CPU)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("positions", [PACKED, WHOLE], ids=["packed", "whole"])
def test_a_forward_asks_nothing_and_computes_the_same(positions: torch.Tensor, attention: str) -> None:
    model = tiny_model("llama").eval()
    model.set_attn_implementation(attention)
    batch = moved(positions)
    plain = {"input_ids": batch["input_ids"], "position_ids": positions.clone()}
    with torch.no_grad():
        with Questions() as before:
            expected = forward_logits(model, plain)
        with Questions() as after:
            found = forward_logits(model, batch)
    assert before.asked > 0
    assert after.asked == 0
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda positions: positions.copy_(WHOLE),
        lambda positions: positions[:, :6],
        lambda positions: positions.clone(),
        lambda positions: positions.flip(1),
    ],
    ids=["overwritten", "a part", "a copy", "turned"],
)
def test_other_positions_are_asked_about_again(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    positions = change(moved(PACKED)["position_ids"])
    found, expected = find_documents(positions), find_documents(torch.empty_like(positions).copy_(positions))
    assert (found is None and expected is None) or torch.equal(found, expected)


def test_a_view_of_all_positions_is_known_too() -> None:
    positions = moved(PACKED)["position_ids"]
    with Questions() as questions:
        find_documents(positions.view(2, 8))
    assert questions.asked == 0

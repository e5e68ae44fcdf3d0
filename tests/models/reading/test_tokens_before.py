"""How many tokens before a token a module needs: modules that need few, and others that must not be taken for such."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.models.reading.context.mixer_calls import MixerCalls
from meshwright.models.reading.context.tokens_before import tokens_before
from meshwright.models.reading.token_dimension import TokenDimension
from meshwright.models.reading.tracing import Operator
from meshwright.plan.given.hidden_argument import hidden_argument

TOKENS, WIDTH = 31, 6


class Convolution(nn.Module):
    """A causal convolution between linear layers."""

    def __init__(self, kernel: int = 3, dilation: int = 1) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.conv = nn.Conv1d(8, 8, kernel, groups=8, padding=(kernel - 1) * dilation, dilation=dilation)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        mixed = self.conv(self.first(hidden_states).transpose(1, 2))[..., : hidden_states.shape[1]]
        return self.last(mixed.transpose(1, 2))


class OfFunction(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, hidden_states: torch.Tensor, position_ids: torch.Tensor | None = None) -> Any:
        return self.function(hidden_states, position_ids)


def decays(hidden: torch.Tensor, _: Any) -> torch.Tensor:
    """A state that forgets most of a token at each step: of the first token, 1e-30 is left after ten."""
    state, states = torch.zeros_like(hidden[:, 0]), []
    for token in hidden.unbind(1):
        state = 1e-3 * state + token
        states.append(state)
    return torch.stack(states, 1)


def pooled(hidden: torch.Tensor, _: Any) -> torch.Tensor:
    """The first token of its block of four, for each token."""
    return hidden[:, torch.arange(hidden.shape[1]) // 4 * 4] + hidden


def counted(hidden: torch.Tensor, _: Any) -> torch.Tensor:
    return hidden.roll(1, 1).index_fill(1, torch.tensor([0]), 0.0) * torch.arange(hidden.shape[1])[:, None]


def placed(hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    shifted = nn.functional.pad(hidden, (0, 0, 1, -1))
    return shifted * (positions[..., : hidden.shape[1], None] > 3)


def later(hidden: torch.Tensor, _: Any) -> torch.Tensor:
    return nn.functional.pad(hidden, (0, 0, -1, 1))


def draws(module: nn.Module, **kwargs: Any) -> list[MixerCalls]:
    hidden, positions = torch.zeros(1, TOKENS, WIDTH, device="meta"), torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    if "position_ids" in kwargs:
        kwargs["position_ids"] = positions
    argument = hidden_argument(module)
    return [
        MixerCalls(module, "mixer", argument, (hidden,), kwargs, lowest, positions=positions) for lowest in (0.1, -0.5)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "needed"),
    [
        (nn.ZeroPad2d((0, 0, 1, -1)), 1),
        (Convolution(), 2),
        (Convolution(17), 16),
        (Convolution(18), None),  # more than a few
        (Convolution(2, 3), 3),
        (nn.Sequential(Convolution(), Convolution(2, 64)), None),  # a token that lies further back than a call has tokens
        (nn.Identity(), 0),
        (OfFunction(lambda hidden, _: nn.functional.pad(hidden, (0, 0, 2, -2))), 2),
        (OfFunction(decays), None),
        (OfFunction(pooled), None),
        (OfFunction(counted), None),
        (OfFunction(later), None),
        (OfFunction(lambda hidden, _: hidden.cumsum(1)), None),
        (OfFunction(lambda hidden, _: hidden.mean(1)), None),
    ],
)
def test_tokens_that_a_module_needs_before(module: nn.Module, needed: int | None) -> None:
    assert tokens_before(draws(module)) == needed


def test_a_module_that_reads_positions_needs_more_than_tokens_before() -> None:
    assert tokens_before(draws(OfFunction(placed), position_ids=None)) is None


def test_a_call_leaves_no_state_behind() -> None:
    class Keeps(nn.Module):
        last: torch.Tensor | None = None

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            self.last = hidden_states[:, -1]
            return nn.functional.pad(hidden_states, (0, 0, 1, -1))

    module = Keeps()
    assert tokens_before(draws(module)) == 1
    assert module.last is None


@pytest.mark.parametrize(("arguments", "mixes"), [((2,), False), ((2, 1), True), ((2, -1), False)])
def test_a_top_k_is_along_the_last_dimension_by_default(arguments: tuple[int, ...], mixes: bool) -> None:
    """The number of entries that are taken is no dimension."""
    tensor = torch.zeros(1, TOKENS, 5, device="meta")
    function = torch.ops.aten.topk.default
    results = list(function(tensor, *arguments))
    operator = Operator(function, (tensor, *arguments), {}, [tensor], results, "router")
    assert TokenDimension(TOKENS).mixed(operator) is mixes

"""The hidden state of a call is bound by the signature: another order of keywords moves the same tensor."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.plan.given.hidden_argument import hidden_argument, place_of, value_of, with_argument


class Named(nn.Module):
    def forward(self, mask: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


class First(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return x


class Wrapped(nn.Module):
    @functools.wraps(First.forward)
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return First.forward(self, *args, **kwargs)  # type: ignore[arg-type]


class Anything(nn.Module):
    def forward(self, **kwargs: Any) -> Any:
        return kwargs


X, MASK, INDICES = torch.zeros(1, 2), torch.ones(1), torch.zeros(1, dtype=torch.long)


@pytest.mark.parametrize("module", [Named(), First(), Wrapped()])
@pytest.mark.parametrize("turned", [False, True])
def test_the_order_of_keywords_does_not_matter(module: nn.Module, turned: bool) -> None:
    argument = hidden_argument(module)
    own = argument[1]
    call = {own: X, "mask": MASK}
    call = dict(reversed(call.items())) if turned else call
    assert place_of(argument, (), call, "m") == own
    assert value_of(argument, (), call, "m") is X
    _, changed = with_argument(argument, (), call, lambda x: x + 1, "m")
    assert changed["mask"] is MASK
    assert torch.equal(changed[own], X + 1)


def test_a_forward_without_names_is_told_by_its_only_floating_tensor_or_refused() -> None:
    argument = hidden_argument(Anything())
    assert place_of(argument, (), {"positions": INDICES, "x": X}, "m") == "x"
    assert place_of(argument, (), {"scale": MASK, "hidden_states": X}, "m") == "hidden_states"
    for call, told in (({"scale": MASK, "x": X}, "is one of scale, x"), ({"positions": INDICES}, "is missing")):
        with pytest.raises(PlanError, match=f"module 'm': .*{told}.*pass it by position or as 'hidden_states'"):
            place_of(argument, (), call, "m")

"""What stands in for a model where an objective is tried."""

import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright.models.heads import is_other_task
from meshwright.models.objective import Objective
from meshwright.models.weights.initial_values import initialize
from meshwright.objectives.call import calling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["StandIn", "with_values"]


class _Head(nn.Module):
    """Logits of a hidden state: a few of its features matter."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cos(torch.arange(words, dtype=torch.float64)[:, None] * torch.tensor([0.7, 1.3, 2.9])))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[..., :3] @ self.weight.T


class StandIn(nn.Module):
    """A causal language model whose outputs depend on one token each, in fp64 until it is cast."""

    def __init__(self, model: "PreTrainedModel") -> None:
        super().__init__()
        self.config, text = model.config, model.config.get_text_config()
        self.width, self.scale = int(getattr(text, "hidden_size", 16)), nn.Parameter(torch.ones((), dtype=torch.float64))
        self.lm_head = _Head(model.config.num_labels if is_other_task(model) else text.vocab_size)
        self.calls: list[dict[str, Any]] = []

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def get_input_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, **arguments: Any) -> SimpleNamespace:
        self.calls.append(arguments)
        features = torch.arange(1, max(3, self.width) + 1, dtype=torch.float64)
        hidden = self.scale * torch.sin(0.37 * features * arguments["input_ids"].double()[..., None]).to(self.scale.dtype)
        return SimpleNamespace(logits=self.lm_head(hidden))


def with_values(objective: Objective, dtype: torch.dtype) -> nn.ModuleDict:
    """Return copies of the modules that an objective adds, with their first values, which compute in a dtype."""
    added = nn.ModuleDict(copy.deepcopy(dict(objective.added))).to("meta", dtype)
    with calling(objective, "reset_parameters of its modules"):
        initialize(added, torch.device("cpu"), 0)
    return added

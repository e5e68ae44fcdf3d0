"""Stages of a model whose stacks run several times: a microbatch goes through all ranks once for each pass.

A rank has one model, which is that of all its stages: pass ``k`` on rank ``r`` of ``p`` is stage ``k p + r`` of the schedule.
What a family computes in a pass, and what it sends, is :class:`Passes`. What a pass leaves on a rank for a later one (keys and
values) does not travel, and neither does its gradient: :class:`Kept`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["Kept", "Passes", "passes_of_model", "set_passes"]

_PASSES = "_meshwright_passes"


class Kept:
    """What a pass leaves for later ones: tensors whose gradients are collected here, until backward comes to the pass.

    Attributes:
        made: the tensors as the pass made them.
        leaves: the same without a graph, for later passes.
    """

    def __init__(self, made: Sequence[torch.Tensor]) -> None:
        self.made = tuple(made)
        self.leaves = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in made)

    def gradients(self) -> tuple[torch.Tensor, ...]:
        """Return what later passes gave them, and forget it."""
        found = tuple(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self.leaves)
        for leaf in self.leaves:
            leaf.grad = None
        return found

    def behind(self, sent: torch.Tensor) -> torch.Tensor:
        """Return what is sent, so that its backward goes through what is kept too."""
        return _Behind.apply(self, sent, *self.made) if torch.is_grad_enabled() else sent


class _Behind(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, kept: Kept, sent: torch.Tensor, *made: torch.Tensor) -> torch.Tensor:
        context.kept = kept
        return sent.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return None, gradient, *context.kept.gradients()


class Passes(ABC):
    """The passes of a model that was cut into stages.

    Attributes:
        without_gradient: the passes that no gradient goes through to what they received.
        columns: number of columns that canvases are filled up to, so that all microbatches have one shape.
    """

    without_gradient: tuple[int, ...] = ()
    columns: int = 0

    @abstractmethod
    def shapes(self, hidden: tuple[int, ...], ranks: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return for each pass the shape of what crosses a cut, and of what its last stage sends to the first of the next pass.

        Args:
            hidden: shape of a hidden state of this rank's part of the sequences of a microbatch.
            ranks: number of ranks that share each sequence.
        """

    @abstractmethod
    def run(
        self, number: int, received: torch.Tensor | None, arguments: Mapping[str, Any], state: dict[str, Any]
    ) -> torch.Tensor:
        """Run a pass of this rank, and return what is sent. The last stage of the last pass is called by its loss instead.

        Args:
            number: of the pass.
            received: what the stage before sent; ``None``: the stage is the first of all.
            arguments: what the model is called with.
            state: what earlier passes of this microbatch left on this rank.
        """

    @abstractmethod
    def enter_last(self, received: torch.Tensor, state: dict[str, Any]) -> None:
        """Prepare the next call of the model, which is that of the loss in the last stage of the last pass."""


def set_passes(model: nn.Module, passes: Passes) -> None:
    """Let the stages of a model be run by passes."""
    vars(model)[_PASSES] = passes


def passes_of_model(model: nn.Module) -> Passes | None:
    """Return what runs the passes of a model; ``None``: a microbatch goes through its stages once."""
    found: Passes | None = vars(model).get(_PASSES)
    return found

"""What a model is trained to do: how a batch is made ready, which losses it gives, and what each is divided by.

A loss has one or more *terms*, each a sum over its own targets. Every term is divided by the number of its targets in the whole
optimizer step, over all ranks and microbatches; then they are added with their weights.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from meshwright.models.loss import IGNORE, count_tokens, forward_logits, token_loss_sum
from meshwright.plan.options import ActivationCheckpointing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Batch", "NextToken", "Objective", "RunFacts"]

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class RunFacts:
    """What an objective asks of a run, besides its own options.

    Attributes:
        seed: of the run.
        sequence_length: tokens of a sequence.
        packing: ``data.packing``.
        output_dtype: that the model's outputs are cast to; ``None``: as they are.
        compiled: whether layers are compiled.
        recomputed: what is recomputed, of any layer.
    """

    seed: int
    sequence_length: int
    packing: str
    output_dtype: str | None
    compiled: bool
    recomputed: Collection[ActivationCheckpointing]


class Objective(ABC):
    """What a model is trained to do. It has no state: the same batch gives the same loss.

    Attributes:
        name: value of ``training.objective``.
        purpose: what a model with this objective is trained to do, in words.
        section: of the configuration, with its options; empty: it has none.
        terms: names of the losses.
        weights: of the terms.
        perplexity: whether the exponential of the loss is one.
        uncounted: why :meth:`routed` tells no tokens apart, said to who asks for a balance loss; empty: it does.
        frozen: patterns of parameters that are not trained, besides those of ``parallel.freeze``.
    """

    name: str
    purpose: str
    section = ""
    terms: tuple[str, ...]
    weights: tuple[float, ...]
    perplexity = False
    uncounted = ""
    frozen: tuple[str, ...] = ()

    @classmethod
    def problems(cls, model: "PreTrainedModel", options: Any, run: RunFacts) -> list[str]:
        """What of a run, or of its model, the objective cannot do, a line each.

        Args:
            model: of the run, on any device.
            options: the section of this objective; ``None`` where it has none.
            run: what else there is to know.
        """
        return []

    @classmethod
    @abstractmethod
    def of(cls, model: "PreTrainedModel", options: Any, run: RunFacts) -> Self:
        """The objective of a run in which there are no :meth:`problems`; arguments as there."""

    @abstractmethod
    def attach(self, model: nn.Module) -> None:
        """Make a parallelized model ready for :meth:`sums`."""

    def training(self, batches: list[Batch], numbers: Sequence[Sequence[int]]) -> list[Batch]:
        """Make the microbatches of a step ready, on the host.

        Args:
            batches: of this rank.
            numbers: of their sequences in the stream of all sequences of the run.
        """
        return batches

    def held_out(self, batch: Batch, numbers: Sequence[int]) -> Batch:
        """Make a batch of held-out sequences ready, the same in every evaluation; ``numbers``: among all held out."""
        return batch

    @abstractmethod
    def counts(self, batches: list[Batch]) -> list[int]:
        """Targets of each term in some batches that are ready."""

    def routed(self, batch: Batch) -> torch.Tensor | None:
        """The tokens, bool [B, S], that count for the balance of experts; ``None``: all that routers are given, in any pass."""
        return None

    @abstractmethod
    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Each term, summed over its targets, in nats."""

    def combine(self, sums: Sequence[torch.Tensor], counts: torch.Tensor) -> torch.Tensor:
        """The loss times ``counts[0]``.

        Args:
            sums: terms of some of a step's tokens.
            counts: targets of each term in the whole step.
        """
        total = sums[0]
        for index, weight in enumerate(self.weights[1:], start=1):
            share = (counts[0].clamp(min=1).double() / counts[index].clamp(min=1)).to(total.dtype)
            total = total + weight * share * sums[index]
        return total


class NextToken(Objective):
    """Say the next token: the loss of a causal language model."""

    name = "next_token"
    purpose = "say the next token"
    terms = ("next_token",)
    weights = (1.0,)
    perplexity = True

    @classmethod
    def of(cls, model: "PreTrainedModel", options: Any, run: RunFacts) -> Self:
        """It depends on nothing."""
        return cls()

    def attach(self, model: nn.Module) -> None:
        """The model's own forward will do."""

    def counts(self, batches: list[Batch]) -> list[int]:
        """Valid labels."""
        return [count_tokens(batches)]

    def routed(self, batch: Batch) -> torch.Tensor:
        """Tokens up to the last label of their sequence: what is behind it was read for nothing, as padding is."""
        return (batch["labels"] != IGNORE).flip(1).cumsum(1).flip(1) > 0

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Cross-entropy of the next token."""
        return (token_loss_sum(forward_logits(model, batch), batch["labels"]),)

"""Masked diffusion, an objective of one's own: fill in what is masked, with attention in both directions (LLaDA).

A share t of the learned tokens of a sequence is masked, t even between 0 and 1; the loss is the cross-entropy of the masked
tokens over t, divided by the number of learned tokens (Nie et al. 2025, arXiv 2502.09992, equation 3).
Run it from this directory: ``meshwright train masked_diffusion.yaml``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from meshwright.objectives import Batch, Objective, RunFacts, given

IGNORE = -100


class MaskedDiffusion(Objective):
    """Fills in masked tokens.

    Args:
        mask_id: the token that masks others.
        least: smallest share that is masked.
    """

    def __init__(self, mask_id: int, least: float = 0.05) -> None:
        self.mask_id, self.least = mask_id, least

    def begin(self, model: nn.Module, run: RunFacts) -> None:
        """Let every token see all others."""
        self.seed = run.seed
        model.config.is_causal = False  # type: ignore[union-attr]  # transformers' masks
        for module in model.modules():
            if hasattr(module, "is_causal"):
                module.is_causal = False  # type: ignore[assignment]  # its kernels

    def training(self, batches: list[Batch], numbers: Sequence[Sequence[int]]) -> list[Batch]:
        """Mask each sequence by random numbers of its own, so that no layout changes them."""
        return [self._masked(batch, numbers, self.seed) for batch, numbers in zip(batches, numbers, strict=True)]

    def held_out(self, batch: Batch, numbers: Sequence[int]) -> Batch:
        """Mask the same tokens in each evaluation."""
        return self._masked(batch, numbers, -1)

    def _masked(self, batch: Batch, numbers: Sequence[int], seed: int) -> dict[str, Any]:
        ids, learned = batch["input_ids"], (batch["labels"] != IGNORE).roll(1, 1)  # labels are those of the next token
        learned[:, 0] = False
        draws = torch.stack([
            torch.rand(ids.shape[1] + 1, generator=torch.Generator().manual_seed(hash((seed, number)) % 2**63))
            for number in numbers
        ])  # fmt: skip
        rates = self.least + (1 - self.least) * draws[:, -1:]
        masked = learned & (draws[:, :-1] < rates)
        hidden, labels = ids.masked_fill(masked, self.mask_id), ids.masked_fill(~masked, IGNORE)
        return {**batch, "input_ids": hidden, "labels": labels, "learned": learned, "weights": (1 / rates).expand_as(ids)}

    def counts(self, batches: list[Batch]) -> list[int]:
        """The loss is divided by the number of learned tokens, masked or not."""
        return [sum(int(batch["learned"].sum()) for batch in batches)]

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return the weighted cross-entropy of the masked tokens."""
        return (-(given.log_probs(model, batch) * batch["weights"]).sum(),)

"""A contrastive objective of one's own: the beginning of a document finds its end among the ends of all others.

InfoNCE (van den Oord et al. 2018, arXiv 1807.03748, equation 4). The others are those of the same microbatch on all data ranks.
Run it from this directory: ``meshwright train contrastive.yaml``.
"""

import torch
from torch import nn

from meshwright.objectives import Batch, Objective, given


class Contrastive(Objective):
    """Says which end belongs to a beginning.

    Args:
        temperature: what cosines are divided by.
    """

    unit = "document"

    def __init__(self, temperature: float = 0.1) -> None:
        self.temperature = temperature

    def counts(self, batches: list[Batch]) -> list[int]:
        """The loss is divided by the number of documents of the step."""
        return [given.document_count(batches)]

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return the cross-entropy of each document's own end."""
        scores, own = self._scores(model, batch)
        losses = nn.functional.cross_entropy(scores, own, reduction="none")
        return (given.document_sum(losses.view(batch["document_exists"].shape), batch),)

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Count how often the own end is the nearest."""
        scores, own = self._scores(model, batch)
        hits = (scores.argmax(-1) == own).double().view(batch["document_exists"].shape)
        return {"accuracy": (given.document_sum(hits, batch), given.document_sum(torch.ones_like(hits), batch))}

    def _scores(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines over the temperature [documents, documents of all data ranks], and the column of each own end."""
        hidden, exists = given.hidden(model, batch), batch["document_exists"]
        lengths = given.per_document(torch.ones_like(batch["documents"], dtype=hidden.dtype), batch)
        half = lengths.gather(1, batch["documents"].clamp(min=0).long()) / 2
        begins = given.per_document(hidden * (batch["position_ids"] < half).unsqueeze(-1), batch).flatten(0, 1)
        ends = given.gather(given.pooled(hidden, batch, "last")).flatten(0, 1)
        there = given.gather(exists.to(hidden.dtype)).flatten() > 0
        cosines = nn.functional.normalize(begins, dim=-1) @ nn.functional.normalize(ends, dim=-1).T
        own = given.data_rank() * exists.numel() + torch.arange(exists.numel(), device=exists.device)
        return (cosines / self.temperature).masked_fill(~there, -1e4), own

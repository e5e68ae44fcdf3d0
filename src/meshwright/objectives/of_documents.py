"""What objectives with a head for texts share: the numbers of each document, and sums that make correlations."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.heads import ENDINGS, task_of
from meshwright.models.objective import Batch, RunFacts
from meshwright.objectives import given
from meshwright.objectives.documents import BEGIN, number_documents
from meshwright.objectives.shipped import Shipped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

__all__ = ["OfLastTokens", "Pairs", "check_head", "correlation", "moments"]

LAST = "last_token"
"""Key of which token of each document its numbers are of, float32 [B, S]: 1 there, else 0."""

Pairs = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""Name of a metric to its sum, and to what that is divided by; both are scalars."""


def check_head(model: "PreTrainedModel", objective: str, kind: str) -> None:
    """Refuse a model that has another head than an objective needs.

    Raises:
        ConfigError: names the class and ``model.head``.
    """
    if task_of(model) != kind:
        needs = f"training.objective={objective}: needs a model {ENDINGS[kind]}"
        raise ConfigError("config.objective", f"{needs}; set model.head={{kind: {kind}, num_labels: N}}")


class OfLastTokens(Shipped):
    """An objective for a head that gives numbers for each document: those of its last token, as transformers takes it."""

    documents = True
    unit = "document"
    pad: int | None = None

    def begin(self, model: "PreTrainedModel", run: RunFacts) -> None:
        """Read the padding token of the model, which is not the last token of a text.

        Raises:
            ConfigError: the model has no such head.
        """
        check_head(model, self.name, "sequence_classification")
        self.pad = getattr(model.config.get_text_config(), "pad_token_id", None)

    def training(self, batches: list[Batch], numbers: "Sequence[Sequence[int]]") -> list[Batch]:
        """Mark the last token of each document."""
        return [self._marked(batch) for batch in batches]

    def held_out(self, batch: Batch, numbers: "Sequence[int]") -> Batch:
        """Mark the last token of each document."""
        return self._marked(batch)

    def _marked(self, batch: Batch) -> Batch:
        """Return a batch with :data:`LAST`: the last token that is no padding token, or the first if all of them are.

        That is the token of ``*ForSequenceClassification`` of transformers, for the document alone.
        """
        found = number_documents(batch)
        numbers = found["documents"].long()
        counts = (batch["input_ids"] != self.pad) | ((found["document_marks"] & BEGIN) > 0)
        places = torch.arange(numbers.shape[1]).expand_as(numbers)
        inside = numbers >= 0
        last = torch.full_like(numbers, -1).scatter_reduce(
            1, numbers.clamp(min=0), torch.where(inside & counts, places, -1), "amax"
        )
        return {**batch, LAST: (inside & (last.gather(1, numbers.clamp(min=0)) == places)).float()}

    def counts(self, batches: list[Batch]) -> list[int]:
        """Return the number of documents."""
        return [given.document_count(batches)]

    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the numbers of each document [B, D, labels], in at least fp32; the same on all ranks of `cp`."""
        logits = given.logits(model, batch)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return given.per_document(logits * batch[LAST].unsqueeze(-1).to(logits.dtype), batch)


_MOMENTS = ("x", "y", "xx", "yy", "xy")


def moments(outputs: torch.Tensor, label: torch.Tensor, batch: Batch) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the sums of x, y, x², y² and xy over documents, of the output x and the label y of each number."""
    count = given.document_sum(torch.ones_like(outputs[..., 0]), batch)
    found = {}
    for number, (x, y) in enumerate(zip(outputs.unbind(-1), label.unbind(-1), strict=True)):
        for name, values in zip(_MOMENTS, (x, y, x * x, y * y, x * y), strict=True):
            found[f"moment_{number}_{name}"] = (given.document_sum(values, batch), count)
    return found


def correlation(sums: Mapping[str, Any], prefix: str) -> torch.Tensor:
    """Return Pearson's correlation from sums of x, y, x², y² and xy, each with its count; 0 where x or y is constant."""
    x, y, xx, yy, xy = (sums[f"{prefix}{name}"][0] / sums[f"{prefix}{name}"][1].clamp(min=1) for name in _MOMENTS)
    size = ((xx - x * x).clamp(min=0) * (yy - y * y).clamp(min=0)).sqrt()
    return torch.where(size > 0, (xy - x * y) / size.clamp(min=1e-300), 0.0)

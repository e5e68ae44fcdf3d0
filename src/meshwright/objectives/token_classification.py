"""Labels of the words of a text."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from meshwright.models.objective import Batch, RunFacts
from meshwright.objectives import given
from meshwright.objectives.classification import MOST_CLASSES
from meshwright.objectives.of_documents import Pairs, check_head
from meshwright.objectives.shipped import Shipped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["TokenClassification"]

LABELS = "word_labels"
"""Key of the labels of tokens, int64 [B, S]: 1 more than the class, 0 where there is none."""


class TokenClassification(Shipped):
    """Say the class of each word of a text, at its first token: the mean cross-entropy over the words of the step.

    It is the loss of ``*ForTokenClassification`` of transformers with -100 at the other tokens. Metrics, over the whole step or
    evaluation: ``accuracy`` of words, and ``macro_f1``, the mean over the classes that are said or true, for at most 64.
    """

    name = "token_classification"
    purpose = "say the classes of words"
    unit = "word"
    labels = 0

    def begin(self, model: "PreTrainedModel", run: RunFacts) -> None:
        """Read how many classes there are.

        Raises:
            ConfigError: the model has no such head.
        """
        check_head(model, self.name, "token_classification")
        self.labels = model.config.num_labels

    def counts(self, batches: list[Batch]) -> list[int]:
        """Return the number of words."""
        return [sum(int((batch[LABELS] > 0).sum()) for batch in batches)]

    def _outputs(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the numbers of each token [B, S, labels], in at least fp32; its class [B, S]; and which have one."""
        outputs = given.logits(model, batch)
        return (
            outputs.to(torch.promote_types(outputs.dtype, torch.float32)),
            (batch[LABELS] - 1).clamp(min=0),
            batch[LABELS] > 0,
        )

    def sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return the sum of the cross-entropies of words."""
        outputs, label, there = self._outputs(model, batch)
        losses = nn.functional.cross_entropy(outputs.flatten(0, 1), label.flatten(), reduction="none").view(label.shape)
        return (torch.where(there, losses, 0).sum(),)

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return what is counted: right words, and for each class what its F1 score is made of."""
        outputs, label, there = self._outputs(model, batch)
        said = outputs.argmax(-1)
        found = {"accuracy": (((said == label) & there).sum(), there.sum())}
        if self.labels <= MOST_CLASSES:
            for number in range(self.labels):
                one, other = (said == number) & there, (label == number) & there
                found[f"f1_{number}"] = (2 * (one & other).sum(), one.sum() + other.sum())
        return found

    def summary(self, sums: Pairs) -> dict[str, torch.Tensor]:
        """Return the metrics. An F1 score is 2 TP / (2 TP + FP + FN)."""
        found = super().summary({name: pair for name, pair in sums.items() if not name.startswith("f1_")})
        if each := [pair for name, pair in sums.items() if name.startswith("f1_")]:
            top, bottom = (torch.stack(parts) for parts in zip(*each, strict=True))
            found["macro_f1"] = (top / bottom.clamp(min=1)).sum() / (bottom > 0).sum().clamp(min=1)
        return found
